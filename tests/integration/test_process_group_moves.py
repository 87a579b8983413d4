"""What the process group moves arrives bit for bit, wherever it lies, and nothing beside it changes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo  # functional collectives load it: here once, instead of in each member
from helpers.oracle import (
    DTYPES,
    MOVABLE,
    PLAIN,
    SIZES,
    Laid,
    Layout,
    Pools,
    Seen,
    anything,
    fold,
    lay,
    layouts,
    numbers,
    quiet,
    seen,
    shapes,
    thoroughly,
    turned,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed
from torch.distributed import _functional_collectives as functional

from paceline.transport.control_block import ControlBlock

torch.set_num_threads(1)
pytestmark = quiet
briefly = settings(thoroughly, max_examples=4)


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with Pools() as made:
        yield made


@pytest.fixture(scope="module")
def closed() -> Iterator[Pools]:
    with Pools(reaching=False) as made:
        yield made


# -- every way to move, however tensors lie --------------------------------------------------------------------------


class Move(NamedTuple):
    """A collective that only moves, in all that it may depend on."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    layouts: list[Layout]
    root: int
    later: bool

    def shape_of(self, giver: int, taker: int) -> tuple[int, ...]:
        """Of what one rank has for another."""
        if not self.kind.endswith("uneven"):
            return self.shape
        rows, *others = self.shape or (1,)
        return rows + (3 * giver + taker) % 4, *others

    def part(self, giver: int, taker: int) -> torch.Tensor:
        return anything(taker, giver, self.shape_of(giver, taker), self.dtype)


KINDS = [
    "broadcast",
    "all_gather",
    "all_gather_uneven",
    "all_gather_single",
    "all_gather_coalesced",
    "gather",
    "gather_uneven",
    "scatter",
    "scatter_uneven",
    "all_to_all",
    "all_to_all_uneven",
    "all_to_all_single",
    "all_to_all_single_uneven",
]
TO_ONE = {"gather", "gather_uneven"}
FROM_ONE = {"scatter", "scatter_uneven"}
ONE_BY_ONE = {"all_to_all", "all_to_all_uneven"}
IN_ROWS = {"all_to_all_single", "all_to_all_single_uneven"}


def given_by(move: Move, rank: int, size: int) -> list[torch.Tensor]:
    """The inputs of a rank."""
    if move.kind in ONE_BY_ONE or (move.kind in FROM_ONE and rank == move.root):
        return [move.part(rank, taker) for taker in range(size)]
    if move.kind in IN_ROWS:
        return [torch.cat([move.part(rank, taker) for taker in range(size)])]
    if move.kind in FROM_ONE or (move.kind == "broadcast" and rank != move.root):
        return []
    return [move.part(rank, 0)] * (3 if move.kind == "all_gather_coalesced" else 1)


def taken_by(move: Move, rank: int, size: int) -> list[torch.Tensor]:
    """The outputs of a rank, as they must be."""
    if move.kind == "broadcast" or move.kind in FROM_ONE:
        return [move.part(move.root, rank if move.kind in FROM_ONE else 0)]
    if move.kind in TO_ONE and rank != move.root:
        return []
    to_each = move.kind in ONE_BY_ONE or move.kind in IN_ROWS
    parts = [move.part(giver, rank if to_each else 0) for giver in range(size)]
    if move.kind in IN_ROWS:
        return [torch.cat(parts)]
    if move.kind == "all_gather_single":
        return [torch.stack(parts)]
    return parts * (3 if move.kind == "all_gather_coalesced" else 1)


def blank(like: torch.Tensor, layout: Layout) -> Laid:
    return lay(torch.zeros(like.nbytes, dtype=torch.uint8).view(like.dtype).view(like.shape), layout)


def move_case(rank: int, size: int, move: Move) -> tuple[list[Seen], list[Seen], bool]:
    """The outputs; the inputs after that; whether nothing else changed."""
    layout, later = move.layouts[rank], move.later
    sources = [lay(tensor, layout) for tensor in given_by(move, rank, size)]
    places = [blank(tensor, layout) for tensor in taken_by(move, rank, size)]
    inputs, outputs = [laid.tensor for laid in sources], [laid.tensor for laid in places]
    work: Any
    if move.kind == "broadcast":
        if rank == move.root:
            places, outputs = sources, inputs
        work = distributed.broadcast(outputs[0], move.root, async_op=later)
    elif move.kind in TO_ONE:
        work = distributed.gather(inputs[0], outputs or None, move.root, async_op=later)
    elif move.kind in FROM_ONE:
        work = distributed.scatter(outputs[0], inputs or None, move.root, async_op=later)
    elif move.kind in ONE_BY_ONE:
        work = distributed.all_to_all(outputs, inputs, async_op=later)
    elif move.kind in IN_ROWS:
        splits: list[list[int] | None] = [None, None]
        if move.kind.endswith("uneven"):
            splits = [
                [move.shape_of(giver, rank)[0] for giver in range(size)],
                [move.shape_of(rank, taker)[0] for taker in range(size)],
            ]
        work = distributed.all_to_all_single(outputs[0], inputs[0], *splits, async_op=later)
    elif move.kind == "all_gather_single":
        work = distributed.all_gather_single(outputs[0], inputs[0], async_op=later)
    elif move.kind == "all_gather_coalesced":
        by_rank = [outputs[giver::size] for giver in range(size)]
        work = distributed.all_gather_coalesced(by_rank, inputs, async_op=later)
    else:
        work = distributed.all_gather(outputs, inputs[0], async_op=later)
    assert (work is not None) == later
    if work is not None:
        work.wait()
    fine = all(laid.unharmed() for laid in (*sources, *places))
    return [seen(tensor) for tensor in outputs], [seen(tensor) for tensor in inputs], fine


def expect(move: Move, size: int) -> list[tuple[list[Seen], list[Seen], bool]]:
    return [
        (
            [seen(tensor) for tensor in taken_by(move, rank, size)],
            [seen(tensor) for tensor in given_by(move, rank, size)],
            True,
        )
        for rank in range(size)
    ]


@st.composite
def moves(draw: st.DrawFn, size: int, kind: str) -> Move:
    turn = 5 * KINDS.index(kind) + size
    dtype = draw(st.sampled_from(turned(MOVABLE, turn)))
    alone = kind in ("broadcast", *TO_ONE, *FROM_ONE)
    shape = draw(shapes(dtype, 4_000_000 // size if alone else 3_000_000 // size**2))
    if kind in IN_ROWS and not shape:
        shape = (1,)
    root = draw(st.integers(0, size - 1))
    return Move(kind, dtype, shape, draw(layouts(size, turn)), root, draw(st.booleans()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
@briefly
@given(st.data())
def test_what_is_moved_arrives_as_it_was(pools: Pools, size: int, kind: str, data: st.DataObject) -> None:
    move = data.draw(moves(size, kind))
    assert pools.run(size, move_case, move) == expect(move, size)


@pytest.mark.parametrize("kind", KINDS)
@briefly
@given(st.data())
def test_it_does_too_between_members_that_cannot_reach_each_other(
    closed: Pools, kind: str, data: st.DataObject
) -> None:
    move = data.draw(moves(4, kind))
    assert closed.run(4, move_case, move) == expect(move, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_dtype_is_moved(pools: Pools, kind: str) -> None:
    wide = {dtype.itemsize: dtype for dtype in DTYPES}.values()  # of many elements it is only their size that matters
    for dtype in DTYPES:
        for shape in ((3, 5), (40_000,)) if dtype in wide else ((3, 5),):
            move = Move(kind, dtype, shape, [PLAIN] * 3, 1, False)
            assert pools.run(3, move_case, move) == expect(move, 3), (dtype, shape)


@pytest.mark.parametrize("kind", KINDS)
def test_what_just_fits_into_a_slot_and_what_just_does_not_are_moved_alike(pools: Pools, kind: str) -> None:
    slot = ControlBlock.SLOT // 4
    for count in (slot - 1, slot, slot + 1, slot // 2 - 1, slot // 2, slot // 2 + 1):  # one part, or one per peer
        move = Move(kind, torch.int32, (count,), [PLAIN, Layout(shared=True), PLAIN], 2, False)
        assert pools.run(3, move_case, move) == expect(move, 3), count


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["strided", "transposed", "offset"])
def test_one_element_is_moved_from_any_place_to_any(pools: Pools, kind: str, form: str) -> None:
    for shape in ((1,), (1, 1)):
        move = Move(kind, torch.float64, shape, [Layout(form)] * 2, 0, False)
        assert pools.run(2, move_case, move) == expect(move, 2), shape


def move_numbers(rank: int, size: int, kind: str, shape: tuple[int, ...], form: str) -> Seen:
    own = lay(numbers(1, rank, shape, torch.float32), Layout(form)).tensor
    outs = [lay(torch.zeros(shape), Layout(form)).tensor for _ in range(size)]
    if kind == "broadcast":
        distributed.broadcast(own, 1)
        outs = [own]
    elif kind == "all_gather":
        distributed.all_gather(outs, own)
    elif kind == "all_to_all":
        distributed.all_to_all(outs, [own] * size)
    else:
        distributed.gather(own, outs if rank == 1 else None, 1)
        distributed.scatter(own, outs if rank == 1 else None, 1)
        outs = [own]
    return seen(torch.stack(outs))


@pytest.mark.parametrize("shape", [(5, 3), (70_000,)], ids=["small", "large"])
@pytest.mark.parametrize("kind", ["broadcast", "all_gather", "all_to_all", "gather and scatter"])
def test_a_sign_that_is_still_to_be_changed_is_changed_on_the_way(
    pools: Pools, kind: str, shape: tuple[int, ...]
) -> None:
    parts = [numbers(1, rank, shape, torch.float32) for rank in range(3)]
    every = [seen(torch.stack(parts))] * 3
    one = [seen(torch.stack([part])) for part in ([parts[1]] * 3 if kind == "broadcast" else parts)]
    expected = every if kind.startswith("all") else one
    assert pools.run(3, move_numbers, kind, shape, "neg") == expected


def gather_conjugates(rank: int, size: int, shape: tuple[int, ...], there: str, here: str) -> list[Seen]:
    own = lay(numbers(1, rank, shape, torch.complex64), Layout(there)).tensor
    outs = [lay(torch.zeros(shape, dtype=torch.complex64), Layout(here)).tensor for _ in range(size)]
    distributed.gather(own, outs if rank == 0 else None, 0)
    return [seen(out) for out in outs] if rank == 0 else []


@pytest.mark.parametrize("shape", [(5, 3), (70_000,)], ids=["small", "large"])
@pytest.mark.parametrize(("there", "here"), [("conj", "plain"), ("plain", "conj"), ("conj", "conj")])
def test_a_conjugate_that_is_still_to_be_taken_is_taken_on_the_way(
    pools: Pools, there: str, here: str, shape: tuple[int, ...]
) -> None:
    expected = [seen(numbers(1, rank, shape, torch.complex64)) for rank in range(3)]
    assert pools.run(3, gather_conjugates, shape, there, here) == [expected, [], []]


def expanded(rank: int, count: int) -> torch.Tensor:
    return anything(2, rank, (count, 1), torch.int32).expand(count, 7)


def give_expanded(rank: int, size: int, count: int) -> list[Seen]:
    own = expanded(rank, count)
    outs = [torch.zeros(count, 7, dtype=torch.int32) for _ in range(size)]
    results: list[Seen] = []
    distributed.all_gather(outs, own)
    results.append(seen(torch.stack(outs)))
    distributed.all_to_all(outs, [own] * size)
    results.append(seen(torch.stack(outs)))
    whole = torch.zeros(size * count, 7, dtype=torch.int32)
    distributed.all_gather_single(whole, own)
    results.append(seen(whole))
    distributed.all_to_all_single(whole, own.repeat(size, 1)[:, :1].expand(size * count, 7))
    results.append(seen(whole))
    distributed.reduce_scatter(outs[0], [own] * size)
    results.append(seen(outs[0]))
    place = own if rank == 2 else outs[0]
    distributed.broadcast(place, 2)
    results.append(seen(place))
    distributed.scatter(outs[0], [own] * size if rank == 1 else None, 1)
    results.append(seen(outs[0]))
    return results


@pytest.mark.parametrize("count", [3, 20_000])
def test_what_is_given_may_be_expanded(pools: Pools, count: int) -> None:
    parts = [expanded(rank, count) for rank in range(3)]
    every, rows = seen(torch.stack(parts)), seen(torch.cat(parts))
    expected = [every, every, rows, rows, seen(fold("sum", parts)), seen(parts[2]), seen(parts[1])]
    assert pools.run(3, give_expanded, count) == [expected] * 3


def gather_in_place(rank: int, size: int, count: int) -> Seen:
    whole = torch.zeros(size, count)
    whole[rank] = anything(3, rank, (count,), torch.float32)
    distributed.all_gather_single(whole, whole[rank])
    return seen(whole)


@pytest.mark.parametrize("count", [7, 50_000])
def test_the_input_of_an_all_gather_may_be_its_own_part_of_the_output(pools: Pools, count: int) -> None:
    expected = seen(torch.stack([anything(3, rank, (count,), torch.float32) for rank in range(4)]))
    assert pools.run(4, gather_in_place, count) == [expected] * 4


def swap_in_place(rank: int, size: int, count: int) -> Seen:
    whole = torch.stack([anything(taker, rank, (count,), torch.float32) for taker in range(size)])
    distributed.all_to_all_single(whole, whole)
    return seen(whole)


@pytest.mark.parametrize("count", [7, 50_000])
def test_an_all_to_all_may_happen_in_one_place(pools: Pools, count: int) -> None:
    expected = [
        seen(torch.stack([anything(taker, giver, (count,), torch.float32) for giver in range(4)])) for taker in range(4)
    ]
    assert pools.run(4, swap_in_place, count) == expected


def gather_together(rank: int, size: int, later: bool) -> list[Seen]:
    counts = [1, 6, 60_000]
    outs = [torch.zeros(size, count, dtype=torch.float64) for count in counts]
    with distributed._coalescing_manager(async_ops=later) as manager:
        for out, count in zip(outs, counts, strict=True):
            distributed.all_gather_single(out, anything(count, rank, (count,), torch.float64))
    if later:
        manager.wait()
    return [seen(out) for out in outs]


@pytest.mark.parametrize("later", [False, True])
def test_what_is_gathered_together_is_as_what_is_gathered_alone(pools: Pools, later: bool) -> None:
    expected = [
        seen(torch.stack([anything(count, rank, (count,), torch.float64) for rank in range(3)]))
        for count in (1, 6, 60_000)
    ]
    assert pools.run(3, gather_together, later) == [expected] * 3


def by_old_names(rank: int, size: int) -> list[Seen]:
    own = anything(5, rank, (size, 9), torch.int64)
    whole, row = torch.zeros(size * 9, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)
    results = []
    for gather in (distributed.all_gather_into_tensor, distributed._all_gather_base):
        gather(whole.zero_(), own[0])
        results.append(seen(whole))
    for scatter in (distributed.reduce_scatter_tensor, distributed._reduce_scatter_base):
        scatter(row.zero_(), own.view(-1))
        results.append(seen(row))
    return results


def test_old_names_do_what_new_ones_do(pools: Pools) -> None:
    parts = [anything(5, rank, (3, 9), torch.int64) for rank in range(3)]
    whole = seen(torch.cat([part[0] for part in parts]))
    for rank, told in enumerate(pools.run(3, by_old_names)):
        row = seen(fold("sum", parts)[rank])
        assert told == [whole, whole, row, row]


def come_late(rank: int, size: int) -> tuple[float, float]:
    if rank == size - 1:
        time.sleep(0.15)
    came = time.monotonic()
    distributed.barrier()
    return came, time.monotonic()


@pytest.mark.parametrize("size", SIZES)
def test_nobody_leaves_a_barrier_before_the_last_has_come(pools: Pools, size: int) -> None:
    times = pools.run(size, come_late)
    assert min(left for _, left in times) >= max(came for came, _ in times)


# -- objects ---------------------------------------------------------------------------------------------------------


def thing(rank: int) -> dict[str, Any]:
    return {"rank": rank, "text": "ä" * rank, "tensor": list(range(rank * 3000)), "nothing": None}


def move_objects(rank: int, size: int) -> list[Any]:
    everything = [None] * size
    distributed.all_gather_object(everything, thing(rank))
    news = [thing(rank), rank] if rank == size - 1 else [None, None]
    distributed.broadcast_object_list(news, size - 1)
    collected = [None] * size if rank == 0 else None
    distributed.gather_object(thing(rank), collected, 0)
    own: list[Any] = [None]
    distributed.scatter_object_list(own, [thing(peer + 5) for peer in range(size)] if rank == 0 else None, 0)
    passed: list[Any] = [None, None]
    if size > 1:
        if rank == 0:
            distributed.send_object_list([thing(7), "end"], 1)
        if rank == 1:
            assert distributed.recv_object_list(passed, 0) == 0
    return [everything, news, collected, own, passed]


@pytest.mark.parametrize("size", SIZES)
def test_objects_are_moved_as_tensors_are(pools: Pools, size: int) -> None:
    things = [thing(rank) for rank in range(size)]
    for rank, told in enumerate(pools.run(size, move_objects)):
        assert told == [
            things,
            [thing(size - 1), size - 1],
            things if rank == 0 else None,
            [thing(rank + 5)],
            [thing(7), "end"] if rank == 1 else [None, None],
        ]


# -- functional collectives ------------------------------------------------------------------------------------------


def functionally(rank: int, size: int, count: int) -> dict[str, list[Seen]]:
    world, own = distributed.group.WORLD, numbers(1, rank, (size, count), torch.float32)
    before = own.clone()
    uneven = [[(3 * giver + taker) % 4 for taker in range(size)] for giver in range(size)]
    results: dict[str, list[torch.Tensor]] = {
        "all_reduce": [functional.all_reduce(own, name, world) for name in ("sum", "avg", "max")],
        "broadcast": [functional.broadcast(own, size - 1, world)],
        "all_gather": [functional.all_gather_tensor(own, 0, world), functional.all_gather_tensor(own, 1, world)],
        "reduce_scatter": [functional.reduce_scatter_tensor(own, "sum", 0, world)],
        "all_to_all": [functional.all_to_all_single(own, None, None, world)],
        "uneven": [
            functional.all_to_all_single(
                own.view(-1)[: sum(uneven[rank])], [row[rank] for row in uneven], uneven[rank], world
            )
        ],
        "together": list(functional.all_reduce_coalesced([own, own[0]], "sum", world)),
        "gathered together": list(functional.all_gather_into_tensor_coalesced([own, own[0]], world)),
        "scattered together": list(functional.reduce_scatter_tensor_coalesced([own], "sum", [0], world)),
    }
    assert torch.equal(own, before)
    return {name: [seen(functional.wait_tensor(result)) for result in given] for name, given in results.items()}


@pytest.mark.parametrize("count", [4, 33_000])
@pytest.mark.parametrize("size", [1, 3])
def test_functional_collectives_are_those_of_one_process(pools: Pools, size: int, count: int) -> None:
    parts = [numbers(1, rank, (size, count), torch.float32) for rank in range(size)]
    first = [part[0] for part in parts]
    uneven = [[(3 * giver + taker) % 4 for taker in range(size)] for giver in range(size)]
    pieces = [part.view(-1)[: sum(splits)].split(splits) for part, splits in zip(parts, uneven, strict=True)]
    for rank, told in enumerate(pools.run(size, functionally, count)):
        mine = fold("sum", parts)[rank : rank + 1]
        expected: dict[str, list[torch.Tensor]] = {
            "all_reduce": [fold(name, parts) for name in ("sum", "avg", "max")],
            "broadcast": [parts[-1]],
            "all_gather": [torch.cat(parts), torch.cat(parts, 1)],
            "reduce_scatter": [mine],
            "all_to_all": [torch.stack([part[rank] for part in parts])],
            "uneven": [torch.cat([piece[rank] for piece in pieces])],
            "together": [fold("sum", parts), fold("sum", first)],
            "gathered together": [torch.cat(parts), torch.cat(first)],
            "scattered together": [mine],
        }
        assert told == {name: [seen(tensor) for tensor in given] for name, given in expected.items()}
