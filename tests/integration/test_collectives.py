"""`paceline.collectives`: every primitive in every topology gives what one process gets, under any launcher."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # any optimizer imports it, which takes seconds: once here, not once in every fork
from helpers.forks import done
from helpers.formulas import traffic as traffic_of
from helpers.groups import Pool
from helpers.oracle import fold, seen
from helpers.primitives import (
    CHECKS,
    LARGE,
    Groups,
    Here,
    check_everything,
    check_map_reduce,
    check_push_and_pull,
    end,
    same,
    topologies,
    whole,
)
from helpers.support import PACELINE, PYTHON, TORCHRUN, Outcome, free_port, write_script
from helpers.teams import run_script, run_team
from torch import distributed
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import collectives
from paceline.collectives.algorithms import ALGORITHMS
from paceline.collectives.communicator import Communicator
from paceline.collectives.default_group import communicator
from paceline.errors import UsageError
from paceline.topologies import Traffic
from paceline.transport import segments

torch.set_num_threads(1)
BACKENDS = ["paceline", "gloo"]
UNEVEN = ["all_gather", "gather", "scatter", "all_to_all"]
"""Operations whose tensors may be of different shapes."""
TABLE = [(operation, topology) for operation in CHECKS for topology in topologies(operation)]


def sizes(topology: str) -> list[int]:
    """Eight members where they are in levels, or all see each other; or else five, of which one is left over."""
    return [1, 2, 3, 8 if topology in ("shared", "tree", "halving-doubling") else 5]


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    with Groups() as made:
        yield made


@pytest.fixture(scope="module")
def hasty() -> Iterator[Groups]:
    """Members that do not wait long for each other."""
    with Groups(timeout=5.0) as made:
        yield made


# -- every operation in every topology -------------------------------------------------------------------------------


def check(rank: int, size: int, operation: str, several: list[str], uneven: bool = False, brief: bool = False) -> int:
    return sum(CHECKS[operation](Here(rank, size, topology, None, uneven, brief)) for topology in several)


@pytest.mark.parametrize(
    ("operation", "topology", "size"), [(*pair, size) for pair in TABLE for size in sizes(pair[1])]
)
def test_each_topology_gives_what_one_process_gets(groups: Groups, operation: str, topology: str, size: int) -> None:
    brief = size > 3  # what a tensor is like matters to each member alone: fewer show it
    assert all(count >= size for count in groups.run(size, check, size, operation, [topology], False, brief))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(("operation", "topology"), [pair for pair in TABLE if pair[0] in UNEVEN])
def test_members_may_have_tensors_of_different_shapes(hasty: Groups, operation: str, topology: str, size: int) -> None:
    brief = size == 5
    counts = hasty.run(size, check, size, operation, [topology], True, brief)
    assert all(count > (5 if brief else 10) for count in counts)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("operation", CHECKS)
def test_each_topology_works_over_the_messages_of_gloo(groups: Groups, operation: str, size: int) -> None:
    several = topologies(operation, shared=False)
    assert all(groups.run(size, check, size, operation, several, False, size > 2, backend="gloo"))


@pytest.mark.parametrize("size", [5, 8])
def test_gloo_may_have_more_members(groups: Groups, size: int) -> None:
    assert all(groups.run(size, reduce_in_all, size, backend="gloo"))


def reduce_in_all(rank: int, size: int) -> int:
    several = topologies("all_reduce", shared=False)
    for topology in several:
        tensor = whole(3, rank, (57,)).clone()
        total = fold("sum", [whole(3, other, (57,)) for other in range(size)])
        same(collectives.all_reduce(tensor, topology=topology), total)
    return len(several)


def add_up(rank: int, size: int, topology: str, times: int) -> list[Any]:
    generator = torch.Generator().manual_seed(rank)
    tensor = torch.randn(501, generator=generator)
    return [seen(collectives.all_reduce(tensor.clone(), topology=topology)) for _ in range(times)]


@pytest.mark.parametrize("topology", topologies("all_reduce"))
@pytest.mark.parametrize("size", [3, 5])
def test_all_get_the_same_bits_and_every_time_the_same(groups: Groups, size: int, topology: str) -> None:
    told = groups.run(size, add_up, size, topology, 4)
    assert len({bits for result in told for bits in result}) == 1
    if topology in ("shared", "hub", "direct"):  # the others have an order of their own
        drawn = [torch.randn(501, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
        assert told[0][0] == seen(fold("sum", drawn))


def lazily(rank: int, backend: str) -> None:
    """Of a tensor whose sign is still to be changed, it is the values that count."""
    shared = backend == "paceline"

    def given() -> torch.Tensor:
        return (torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)).conj()

    expected = torch.tensor([3 - 6j, 9 + 3j])
    for topology in topologies("all_reduce", shared=shared):
        tensor = given()
        assert tensor.is_conj()
        same(collectives.all_reduce(tensor, topology=topology).resolve_conj(), expected, topology)
        tensor = given().imag
        assert tensor.is_neg()
        same(collectives.all_reduce(tensor, topology=topology).resolve_neg(), expected.imag, topology)
    for topology in topologies("all_gather", shared=shared):
        parts = collectives.all_gather(given(), topology=topology)
        same(parts[0] + parts[1], expected, topology)
    for topology in topologies("broadcast", shared=shared):
        same(collectives.broadcast(given(), 0, topology=topology).resolve_conj(), expected / 3, topology)
    sending = collectives.push(given(), 1 - rank)
    same(collectives.pull(given(), 1 - rank).resolve_conj() + given().resolve_conj(), expected)
    collectives.wait(sending)


@pytest.mark.parametrize("backend", BACKENDS)
def test_conjugates_that_torch_has_not_made_yet_are_made(hasty: Groups, backend: str) -> None:
    hasty.run(2, lazily, backend, backend=backend)


# -- one to one ------------------------------------------------------------------------------------------------------


def one_to_one(rank: int, size: int) -> int:
    return check_push_and_pull(Here(rank, size))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_is_pushed_is_pulled_whatever_the_order_of_tags(groups: Groups, size: int, backend: str) -> None:
    assert all(groups.run(size, one_to_one, size, backend=backend))


def push_to_itself(rank: int) -> float:
    sending = collectives.push(torch.full((LARGE,), rank + 1.0), rank)
    pulled = collectives.pull(torch.empty(LARGE), rank)
    collectives.wait(sending)
    return float(pulled.sum() / LARGE)


def test_a_member_may_push_to_itself(groups: Groups) -> None:
    assert groups.run(2, push_to_itself) == [1.0, 2.0]


def push_before_anybody_pulls(rank: int) -> float:
    tensor = torch.arange(float(LARGE)) + rank
    sending = collectives.push(tensor, 1 - rank)
    distributed.barrier()  # both have pushed, and neither has pulled
    pulled = collectives.pull(torch.empty(LARGE), 1 - rank)
    collectives.wait(sending)
    tensor.zero_()  # which nobody sees any more
    return float(pulled[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_push_does_not_wait_for_the_pull(groups: Groups, backend: str) -> None:
    assert groups.run(2, push_before_anybody_pulls, backend=backend) == [1.0, 0.0]


def wait_for_some(rank: int, ranks: tuple[int, ...], late: int) -> tuple[float, float]:
    distributed.barrier()
    time.sleep(0.2 if rank == late else 0.0)
    came = time.monotonic()
    collectives.wait(*ranks)
    left = time.monotonic()
    distributed.barrier()
    return came, left


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ranks", [(0,), (2,), (0, 1), (0, 1, 2)])
def test_waiting_for_ranks_lasts_until_they_come(hasty: Groups, ranks: tuple[int, ...], backend: str) -> None:
    times = hasty.run(3, wait_for_some, ranks, ranks[-1], backend=backend)
    latest = max(times[rank][0] for rank in ranks)
    assert all(left >= latest for _, left in times)


def wait_for_the_first(rank: int) -> tuple[float, float]:
    """The last one comes only when the one that is waited for has gone on."""
    if rank == 1:
        distributed.recv(torch.empty(1), 0)
    came = time.monotonic()
    collectives.wait(0)
    left = time.monotonic()
    if rank == 0:
        distributed.send(torch.ones(1), 1)
    distributed.barrier()
    return came, left


@pytest.mark.parametrize("backend", BACKENDS)
def test_whoever_is_waited_for_goes_on_at_once(hasty: Groups, backend: str) -> None:
    times = hasty.run(3, wait_for_the_first, backend=backend)
    assert times[0][1] < times[1][0]


def wait_for_works(rank: int) -> list[float]:
    first, second = torch.ones(LARGE), torch.ones(5)
    works = [distributed.all_reduce(first, async_op=True), distributed.broadcast(second, 1, async_op=True)]
    sending = collectives.push(torch.full((3,), float(rank)), 1 - rank)
    pulled = collectives.pull(torch.empty(3), 1 - rank)
    collectives.wait(*works, sending)
    return [float(first[-1]), float(pulled[0])]


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_can_wait_for_pushes_and_works_of_torch(groups: Groups, backend: str) -> None:
    assert groups.run(2, wait_for_works, backend=backend) == [[2.0, 1.0], [2.0, 0.0]]


# -- the rest --------------------------------------------------------------------------------------------------------


def map_and_reduce(rank: int, size: int, topology: str) -> int:
    return check_map_reduce(Here(rank, size, topology))


@pytest.mark.parametrize("topology", [name for name in topologies("all_reduce") if name in topologies("all_gather")])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_map_reduce_deals_out_its_items(hasty: Groups, size: int, topology: str) -> None:
    assert all(hasty.run(size, map_and_reduce, size, topology))


def map_floats(rank: int, dtype: torch.dtype, count: int) -> list[float]:
    items = [torch.tensor([index, 0.5], dtype=dtype) for index in range(count)]
    result = collectives.map_reduce(lambda item: item * 2, items)
    assert result.dtype is dtype
    return result.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_map_reduce_of_fewer_items_than_members_works_in_any_dtype(
    hasty: Groups, count: int, dtype: torch.dtype
) -> None:
    expected = [float(count * (count - 1)), float(count)]
    assert hasty.run(3, map_floats, dtype, count) == [expected] * 3


def share_memory(rank: int) -> list[Any]:
    made = [collectives.empty(3, 4), collectives.empty(7, dtype=torch.int16), collectives.empty()]
    assert all(segments.find(tensor) is not None for tensor in made)
    assert all(not tensor.any() for tensor in made)
    nothing = collectives.empty(0, 5)
    totals = []
    for topology in topologies("all_reduce"):
        for tensor in (*made, nothing):
            tensor.fill_(rank + 1)
            where = tensor.data_ptr()
            assert collectives.all_reduce(tensor, topology=topology).data_ptr() == where
            totals.append(tensor.sum().item() / max(1, tensor.numel()))
    return [[(tuple(tensor.shape), str(tensor.dtype)) for tensor in made], totals]


def test_tensors_in_shared_memory_are_zero_at_first_and_reduced_where_they_are(groups: Groups) -> None:
    kinds = [((3, 4), "torch.float32"), ((7,), "torch.int16"), ((), "torch.float32")]
    totals = [6.0, 6.0, 6.0, 0.0] * len(topologies("all_reduce"))
    assert groups.run(3, share_memory) == [[kinds, totals]] * 3


def outlive(rank: int) -> float:
    """Shared tensors come and go while others have them mapped."""
    total = 0.0
    for number in range(30):
        tensor = collectives.empty(LARGE)
        tensor += number + rank
        collectives.all_reduce(tensor, topology="shared")
        total += float(tensor[-1])
    return total


def test_shared_tensors_may_come_and_go(groups: Groups) -> None:
    assert groups.run(2, outlive) == [sum(2 * number + 1 for number in range(30))] * 2


# -- what is seen of it ----------------------------------------------------------------------------------------------


def observe_all_reduce(rank: int, topology: str, cases: list[tuple[int, torch.dtype]]) -> list[Any]:
    told = []
    for length, dtype in cases:
        tensor = torch.ones(length, dtype=dtype)
        with collectives.observe() as observed:
            collectives.all_reduce(tensor, topology=topology)
        collectives.all_reduce(tensor, topology=topology)  # which nobody looks at
        told.append((observed.traffic, observed.messages))
    return told


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("topology", ALGORITHMS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_the_messages_seen_are_those_of_the_formulas(groups: Groups, topology: str, size: int, backend: str) -> None:
    cases = [(0, torch.float32), (1, torch.float64), (7, torch.uint8), (120, torch.float32), (1003, torch.int16)]
    results = groups.run(size, observe_all_reduce, topology, cases, backend=backend)
    for number, (length, dtype) in enumerate(cases):
        bytes_each = length * dtype.itemsize
        sent, received = [], []
        for rank in range(size):
            traffic, messages = results[rank][number]
            if size > 1 or topology != "hub":
                assert traffic == traffic_of(topology, rank, size, bytes_each, itemsize=dtype.itemsize), (
                    rank,
                    length,
                )
            outgoing = [message for message in messages if message.direction == "send"]
            incoming = [message for message in messages if message.direction == "receive"]
            assert (
                Traffic(len(outgoing), sum(m.bytes for m in outgoing), len(incoming), sum(m.bytes for m in incoming))
                == traffic
            )
            assert all((m.rank, m.operation, m.topology) == (rank, "all_reduce", topology) for m in messages)
            assert all(m.seconds >= 0 for m in messages)
            ends = [m.start + m.seconds for m in messages]
            assert ends == sorted(ends)
            sent += [(rank, m.peer, m.bytes) for m in outgoing]
            received += [(m.peer, rank, m.bytes) for m in incoming]
        assert sorted(sent) == sorted(received)  # nothing is lost, nothing comes from nowhere


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_traffic_seen_costs_what_textbooks_say(groups: Groups, size: int) -> None:
    """N divides the tensor, and is a power of two: then the formulas of textbooks hold to the byte."""
    length, alpha, rate = 840 * size, 10e-6, 12.5e9
    whole_time = 4 * length / rate
    seconds, most = {}, {}
    for topology in ALGORITHMS:
        results = groups.run(size, observe_all_reduce, topology, [(length, torch.float32)])
        traffic = [told[0][0] for told in results]
        # A rank sends one message at a time.
        seconds[topology] = [seen.sent * alpha + seen.bytes_sent / rate for seen in traffic]
        most[topology] = [max(seen.bytes_sent, seen.bytes_received) for seen in traffic]
        # No all-reduce can do with less (Patarasuk and Yuan), unless somebody does the work of others.
        assert sum(seen.bytes_sent for seen in traffic) >= 2 * (size - 1) * 4 * length
    levels = int(math.log2(size))
    ring = 2 * (size - 1) * (alpha + whole_time / size)
    assert seconds["ring"] == pytest.approx([ring] * size, rel=1e-12)
    doubling = 2 * levels * alpha + 2 * (size - 1) / size * whole_time
    assert seconds["halving-doubling"] == pytest.approx([doubling] * size, rel=1e-12)
    bound = 2 * (size - 1) * 4 * length // size
    assert most["ring"] == most["halving-doubling"] == most["direct"] == [bound] * size
    assert most["hub"] == [(size - 1) * 4 * length] + [4 * length] * (size - 1)
    assert max(most["tree"]) <= 2 * 4 * length
    assert max(seconds["tree"]) <= 2 * math.ceil(math.log2(size)) * (alpha + whole_time) + 2 * alpha


def observe_neighbours(rank: int) -> list[Any]:
    with collectives.observe() as observed:
        collectives.all_reduce(torch.ones(40), topology="ring")
    return sorted({(message.direction, message.peer) for message in observed.messages})


def test_in_a_ring_one_hears_from_the_one_before_and_tells_the_next(groups: Groups) -> None:
    results = groups.run(4, observe_neighbours)
    assert results == [[("receive", (rank - 1) % 4), ("send", (rank + 1) % 4)] for rank in range(4)]


def observe_shared(rank: int, operation: str, length: int) -> tuple[Traffic, list[Any]]:
    with collectives.observe() as observed:
        getattr(collectives, operation)(torch.ones(length), topology="shared")
        collectives.barrier(topology="shared")
    return observed.traffic, observed.messages


@pytest.mark.parametrize("size", [2, 3, 4])
def test_through_shared_memory_nothing_is_sent_but_the_least_is_read_and_written(groups: Groups, size: int) -> None:
    length = 64 * 1000 * size  # parts begin at whole cache lines
    part = (size - 1) * 4 * length // size
    for traffic, messages in groups.run(size, observe_shared, "all_reduce", length):
        assert traffic == Traffic()
        for direction in ("read", "write"):
            assert sum(message.bytes for message in messages if message.direction == direction) == part
        assert {(message.operation, message.topology) for message in messages} == {("all_reduce", "shared")}


def test_small_tensors_in_shared_memory_are_in_slots_that_all_see(groups: Groups) -> None:
    assert groups.run(3, observe_shared, "all_reduce", 100) == [(Traffic(), [])] * 3


def test_what_is_seen_has_the_name_of_its_operation(groups: Groups) -> None:
    for _, messages in groups.run(3, observe_shared, "reduce", 64 * 3000):
        assert {message.operation for message in messages} == {"reduce"}


def observe_one_to_one(rank: int) -> Traffic:
    with collectives.observe() as observed:
        if rank == 0:
            collectives.wait(collectives.push(torch.ones(10), 1), collectives.push(torch.ones(3), 2))
        elif rank == 1:
            collectives.pull(torch.empty(10), 0)
        else:
            collectives.pull(torch.empty(3), 0)
    return observed.traffic


def test_pushes_and_pulls_are_seen_too(groups: Groups) -> None:
    expected = [Traffic(2, 52, 0, 0), Traffic(0, 0, 1, 40), Traffic(0, 0, 1, 12)]
    assert groups.run(3, observe_one_to_one) == expected


def observe_twice(rank: int) -> tuple[int, int]:
    with collectives.observe() as outer:
        collectives.all_reduce(torch.ones(4), topology="ring")
        with collectives.observe() as inner:
            collectives.all_reduce(torch.ones(4), topology="ring")
    return outer.traffic.sent, inner.traffic.sent


def test_who_looks_longer_sees_more(groups: Groups) -> None:
    assert groups.run(3, observe_twice) == [(8, 4)] * 3


def observe_gradients(rank: int, topology: str, operators: list[str]) -> set[tuple[str, str]]:
    with collectives.observe() as observed:
        for operator in operators:
            tensor = torch.ones(12, requires_grad=True)
            collectives.all_reduce(tensor, operator, topology=topology).sum().backward()
    return {(message.operation, message.topology) for message in observed.messages}


@pytest.mark.parametrize("topology", ALGORITHMS)
def test_gradients_travel_in_the_same_topology(groups: Groups, topology: str) -> None:
    results = groups.run(3, observe_gradients, topology, ["sum", "avg", "min", "max"])
    assert results == [{("all_reduce", topology)}] * 3


def test_products_with_gradients_travel_in_the_topology_asked_for(groups: Groups) -> None:
    for told in groups.run(3, observe_gradients, "ring", ["product"]):
        assert {topology for _, topology in told} == {"ring"}


# -- auto ------------------------------------------------------------------------------------------------------------

BYTES = [0, 1, 100, 5_000, 70_000, 1_500_000]


def choose(rank: int) -> tuple[dict[Any, str], dict[str, list[float]]]:
    here = communicator()
    for count in BYTES:
        tensor = torch.ones(count, dtype=torch.uint8)
        for operation in ("all_reduce", "reduce", "broadcast", "gather", "all_gather"):
            getattr(collectives, operation)(tensor.clone())
        parts = [tensor] * here.size
        collectives.scatter(parts if rank == 0 else None)
        collectives.reduce_scatter(parts)
        collectives.all_to_all(parts)
    collectives.barrier()
    prices = {name: [price(1 << bits) for bits in range(26)] for name, price in here.prices().items()}
    return dict(here._chosen), prices


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_auto_is_the_cheapest_topology_that_has_the_operation_the_same_on_all(
    groups: Groups, size: int, backend: str
) -> None:
    results = groups.run(size, choose, backend=backend)
    chosen, prices = results[0]
    assert all(result == results[0] for result in results)
    assert {operation for operation, _ in chosen} == set(CHECKS)
    assert set(prices) == set(ALGORITHMS) | ({"shared"} if backend == "paceline" else set())
    assert all(0 < seconds < 60 for measured in prices.values() for seconds in measured)
    for (operation, bits), topology in chosen.items():
        having = topologies(operation, shared=backend == "paceline")[1:]
        assert topology in having
        assert prices[topology][bits] == min(prices[name][bits] for name in having)


def choose_by(rank: int, uneven: list[int], operation: str) -> set[str]:
    """Small tensors through memory and large ones by messages, as it is on some machines."""
    here = communicator()
    collectives.barrier()
    dear: Callable[[int], float] = lambda size: 9.0  # noqa: E731
    known, here._prices = here._prices, dict.fromkeys((*ALGORITHMS, "shared"), dear)
    here._prices |= {"shared": lambda size: 1.0 if size < 10_000 else 3.0, "direct": lambda size: 2.0}
    here._chosen.clear()
    sizes = [count for count, _ in zip(uneven, range(here.size), strict=False)]
    try:
        with collectives.observe() as observed:
            if operation == "gather":
                results = collectives.gather(torch.full((sizes[rank],), float(rank)), 1)
            elif operation == "all_gather":
                results = collectives.all_gather(torch.full((sizes[rank],), float(rank)))
            elif operation == "scatter":
                parts = [torch.full((count,), 1.0) for count in sizes]
                results = [collectives.scatter(parts if rank == 0 else None)]
                sizes = [sizes[rank]]
            else:
                results = collectives.all_to_all([torch.ones(sizes[rank])] * here.size)
        assert [len(result) for result in results] == (sizes if results else [])
    finally:
        here._prices = known
        here._chosen.clear()
    return {message.topology for message in observed.messages if message.operation == operation}


@pytest.mark.parametrize("operation", UNEVEN)
def test_auto_agrees_even_if_members_have_more_or_less(hasty: Groups, operation: str) -> None:
    hasty.run(3, choose_by, [50_000, 0, 100], operation)
    assert hasty.run(3, choose_by, [10, 20, 10], operation) == [set()] * 3  # through memory
    assert hasty.run(3, choose_by, [50_000] * 3, operation)[0] == {"direct"}


# -- what cannot be --------------------------------------------------------------------------------------------------


def parts_of(count: int, **options: Any) -> list[torch.Tensor]:
    return [torch.ones(2, **options) for _ in range(count)]


BAD: dict[str, tuple[Callable[[int, dict[str, Any]], Any], str]] = {
    "unknown topology": (
        lambda n, o: collectives.all_reduce(torch.ones(2, **o), topology="star"),
        "no topology 'star'",
    ),
    "unknown topology of a product": (
        lambda n, o: collectives.all_reduce(torch.ones(2, **o), "product", topology="star"),
        "no topology 'star'",
    ),
    "unknown topology of a barrier": (lambda n, o: collectives.barrier(topology="star"), "no topology 'star'"),
    "unknown op of all_reduce": (lambda n, o: collectives.all_reduce(torch.ones(2, **o), "median"), "'median'"),
    "unknown op of reduce": (lambda n, o: collectives.reduce(torch.ones(2, **o), 0, "median"), "'median'"),
    "unknown op of reduce_scatter": (lambda n, o: collectives.reduce_scatter(parts_of(n, **o), "median"), "'median'"),
    "no op at all": (lambda n, o: collectives.reduce_scatter(parts_of(n, **o), "none"), "'none'"),
    "unknown op of map_reduce": (lambda n, o: collectives.map_reduce(float, [1], "median"), "'median'"),
    "nothing to map": (lambda n, o: collectives.map_reduce(float, []), "at least one item"),
    "root too large": (lambda n, o: collectives.broadcast(torch.ones(2, **o), n), "root is 3.*from 0 to 2"),
    "root of reduce too large": (lambda n, o: collectives.reduce(torch.ones(2, **o), n), "root is 3.*from 0 to 2"),
    "root of gather too large": (lambda n, o: collectives.gather(torch.ones(2, **o), n), "root is 3.*from 0 to 2"),
    "root of scatter too large": (lambda n, o: collectives.scatter(parts_of(n, **o), n), "root is 3.*from 0 to 2"),
    "root below zero": (lambda n, o: collectives.reduce(torch.ones(2, **o), -1), "root is -1.*from 0 to 2"),
    "root no number": (lambda n, o: collectives.broadcast(torch.ones(2, **o), "0"), "root is '0'.*from 0 to 2"),
    "push to nobody": (lambda n, o: collectives.push(torch.ones(2, **o), n), "to is 3.*from 0 to 2"),
    "pull from nobody": (lambda n, o: collectives.pull(torch.ones(2, **o), n), "source is 3.*from 0 to 2"),
    "push with a bad tag": (lambda n, o: collectives.push(torch.ones(2, **o), 0, tag=-1), "tag is -1"),
    "pull with a bad tag": (lambda n, o: collectives.pull(torch.ones(2, **o), 0, tag=-1), "tag is -1"),
    "wait for nobody": (lambda n, o: collectives.wait(n), "rank is 3.*from 0 to 2"),
    "too few to all_to_all": (lambda n, o: collectives.all_to_all(parts_of(n - 1, **o)), "given 2 tensors.*3"),
    "too many to reduce_scatter": (lambda n, o: collectives.reduce_scatter(parts_of(n + 1, **o)), "given 4 tensors.*3"),
    "not to be cut": (lambda n, o: collectives.all_to_all(torch.ones(4, 2, **o)), r"\(4, 2\) does not divide by 3"),
    "nothing to be cut": (lambda n, o: collectives.reduce_scatter(torch.ones((), **o)), "does not divide by 3"),
    "ring has no gather": (lambda n, o: collectives.gather(torch.ones(2, **o), topology="ring"), "ring has no gather"),
    "tree has no all_gather": (
        lambda n, o: collectives.all_gather(torch.ones(2, **o), topology="tree"),
        "tree has no all_gather; these have: ring",
    ),
    "halving-doubling has no broadcast": (
        lambda n, o: collectives.broadcast(torch.ones(2, **o), topology="halving-doubling"),
        "halving-doubling has no broadcast",
    ),
    "ring has no barrier": (lambda n, o: collectives.barrier(topology="ring"), "ring has no barrier"),
    "a group that it is not in": (
        lambda n, o: collectives.all_reduce(torch.ones(2, **o), group=distributed.GroupMember.NON_GROUP_MEMBER),
        "must be a process group of torch.distributed that this process is in",
    ),
    "no group": (lambda n, o: collectives.barrier(group="everybody"), "must be a process group"),
    "undefined for floats": (
        lambda n, o: collectives.all_reduce(torch.ones(2), "band", topology="ring"),
        "band.*float32",
    ),
    "undefined for floats in memory": (
        lambda n, o: collectives.all_reduce(torch.ones(LARGE), "bxor", topology="shared"),
        "bxor.*float32",
    ),
    "too many dimensions": (
        lambda n, o: collectives.all_gather(torch.ones([1] * 14, **o)),
        "14 dimensions; at most 13",
    ),
}


def err(rank: int, name: str, tracked: bool) -> tuple[str, str, list[float]]:
    size = distributed.get_world_size()
    try:
        BAD[name][0](size, {"requires_grad": tracked})
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    else:
        kind, text = "nothing", ""
    after = collectives.all_reduce(torch.ones(2), topology="ring")
    return kind, text, collectives.all_reduce(after, "max").tolist()


@pytest.mark.parametrize("tracked", [False, True], ids=["plain", "with a gradient"])
@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_said_in_one_sentence_and_the_group_goes_on(hasty: Groups, name: str, tracked: bool) -> None:
    for kind, text, after in hasty.run(3, err, name, tracked):
        assert kind in ("UsageError", "InvalidCall"), text
        assert re.search(BAD[name][1], text), text
        assert "\n" not in text
        assert after == [3.0, 3.0]


def err_at_the_root(rank: int, given: int | None) -> tuple[str, float]:
    parts = None if given is None else parts_of(given)
    try:
        collectives.scatter(parts if rank == 0 else None)
    except paceline.PacelineError as error:
        text = f"{type(error).__name__}: {error}"
    return text, float(collectives.all_reduce(torch.ones(1)))


@pytest.mark.parametrize("given", [None, 1, 3])
def test_if_the_root_has_the_wrong_parts_all_are_told(hasty: Groups, given: int | None) -> None:
    for text, after in hasty.run(2, err_at_the_root, given):
        assert text.startswith("UsageError")
        assert after == 2.0


def err_without_memory(rank: int) -> tuple[str, float]:
    with pytest.raises(UsageError) as caught:
        collectives.all_reduce(torch.ones(2), topology="shared")
    return str(caught.value), float(collectives.all_reduce(torch.ones(1)))


def test_shared_memory_is_only_there_with_the_backend_paceline(groups: Groups) -> None:
    for text, after in groups.run(2, err_without_memory, backend="gloo"):
        assert text == "the topology shared needs a group of the backend paceline, on one machine"
        assert after == 2.0


# -- groups of torch.distributed -------------------------------------------------------------------------------------


def in_subgroups(rank: int, size: int) -> int:
    """Two groups that overlap, and the numbers of whose members are not their ranks."""
    count = 0
    for ranks in ([1, 3], [0, 2, 3]):
        group = distributed.new_group(ranks)
        if rank in ranks:
            count += check_everything(ranks.index(rank), len(ranks), group)
    # The whole group, and one as an argument, are still there.
    assert float(collectives.all_reduce(torch.ones(1))) == size
    assert float(collectives.all_reduce(torch.ones(1), group=distributed.group.WORLD)) == size
    return count


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_part_of_the_members_can_do_everything_among_themselves(groups: Groups, backend: str) -> None:
    assert [count > 50 for count in groups.run(4, in_subgroups, 4, backend=backend)] == [True] * 4


def keep_out(rank: int) -> str:
    group = distributed.new_group([0, 2])
    if rank != 1:
        return str(float(collectives.all_reduce(torch.ones(1), group=group)))
    try:
        collectives.all_reduce(torch.ones(1), group=group)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("backend", BACKENDS)
def test_whoever_is_not_in_a_group_is_told_so(hasty: Groups, backend: str) -> None:
    first, outside, last = hasty.run(3, keep_out, backend=backend)
    assert (first, last) == ("2.0", "2.0")
    assert re.fullmatch("UsageError: .*that this process is in", outside)


def everything(rank: int, size: int) -> int:
    return check_everything(rank, size)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1, 3])
def test_everything_works_on_the_default_group(groups: Groups, size: int, backend: str) -> None:
    assert all(count > 50 for count in groups.run(size, everything, size, backend=backend))


def in_between(rank: int, size: int, backend: str) -> list[float]:
    """Operations of torch that were begun, and not waited for, before ours; and the other way round."""
    works, tensors = [], []
    for number in range(12):
        tensor = torch.full((3 if number % 2 else LARGE,), float(number + rank))
        tensors.append(tensor)
        works.append(distributed.all_reduce(tensor, async_op=True))
        peer, before = (rank + 1) % size, (rank - 1) % size
        box = torch.empty(4)
        works.append(distributed.irecv(box, before, tag=number))
        tensors.append(box)
        several = topologies("all_reduce", shared=backend == "paceline")
        own = torch.full((3 if number % 3 else LARGE,), 1.0)
        collectives.all_reduce(own, topology=several[number % len(several)])
        tensors.append(own)
        tensors.append(collectives.all_gather(torch.full((2,), float(rank)), topology="direct")[before])
        works.append(distributed.isend(torch.full((4,), 10.0 * number + rank), peer, tag=number))
        tensors.append(collectives.broadcast(torch.full((2,), float(rank)), number % size))
        collectives.barrier()
    collectives.wait(*works)
    return [float(tensor[-1]) for tensor in tensors]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [2, 3])
def test_operations_of_torch_may_be_under_way_meanwhile(groups: Groups, size: int, backend: str) -> None:
    results = groups.run(size, in_between, size, backend, backend=backend)
    for rank, result in enumerate(results):
        expected: list[float] = []
        for number in range(12):
            before = (rank - 1) % size
            total = sum(number + other for other in range(size))
            expected += [total, 10 * number + before, size, before, number % size]
        assert result == expected


def begin_anew(rank: int, folder: str) -> list[float]:
    """Groups that end, and others that begin, in one process."""
    totals = []
    for number, backend in enumerate(["paceline", "gloo", "paceline"]):
        if number:
            store = distributed.FileStore(f"{folder}/{number}", 2)
            distributed.init_process_group(backend, store=store, rank=rank, world_size=2)
        totals.append(float(collectives.all_reduce(torch.full((1,), number + 1.0))))
        totals.append(float(collectives.all_reduce(torch.full((1,), number + 1.0), topology="ring")))
        distributed.barrier()
        if number < 2:
            distributed.destroy_process_group()
    return totals


def test_after_a_group_has_ended_another_can_begin(tmp_path: Path) -> None:
    pool = Pool(2, timeout=10.0)
    try:
        assert pool.run(begin_anew, str(tmp_path), timeout=30.0) == [[2.0, 2.0, 4.0, 4.0, 6.0, 6.0]] * 2
    finally:
        end(pool)


# -- teams -----------------------------------------------------------------------------------------------------------

TESTS = Path(__file__).parents[1]
SCRIPT = f"""
import os, sys
sys.path.insert(0, {str(TESTS)!r})
from helpers.primitives import check_everything

rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
count = check_everything(rank, size)
(__import__("pathlib").Path(os.environ["RUN_NOTES"]) / f"{{rank}}.count").write_text(str(count))
"""
MIXED = f"""
import os, pathlib, sys
sys.path.insert(0, {str(TESTS)!r})
import torch, paceline
from paceline import collectives
from helpers.primitives import check_everything
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

first = collectives.all_reduce(torch.ones(1))
team = paceline.join()
assert float(first) == team.world_size
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(64, 4)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4 * team.world_size)
model, optimizer, loader = team.setup(model, optimizer, loader)
for x, y in loader:
    loss = mse_loss(model(x), y)
    loss.backward()
    mean = collectives.all_reduce(loss.detach().clone(), "avg")
    parts = collectives.all_gather(loss.detach(), topology="ring")
    assert torch.allclose(torch.stack(parts).mean(), mean)
    optimizer.step()
    optimizer.zero_grad()
count = check_everything(team.rank, team.world_size)
weights = torch.cat([value.detach().flatten() for value in model.parameters()])
for other in collectives.all_gather(weights):
    assert torch.equal(other, weights)
team.close()
(pathlib.Path(os.environ["RUN_NOTES"]) / f"{{team.rank}}.count").write_text(str(count))
"""


def counts(outcome: Outcome) -> list[int]:
    assert outcome.code == 0, outcome.err
    return counted(outcome.run.notes)


def counted(notes: Path) -> list[int]:
    """How many checks each member made."""
    return [int(path.read_text()) for path in sorted(notes.glob("*.count"))]


def launch(launcher: str, script: Path) -> list[Any]:
    return {
        "paceline run": [PACELINE, "run", script, "--workers", "2"],
        "torchrun": [TORCHRUN, "--nproc_per_node", "2", "--master_port", free_port(), script],
        "python": [PYTHON, script],
    }[launcher]


@pytest.mark.parametrize("launcher", ["paceline run", "torchrun", "python"])
def test_a_script_can_do_everything_under_any_launcher(tmp_path: Path, launcher: str) -> None:
    members = 1 if launcher == "python" else 2
    script = write_script(tmp_path, SCRIPT)
    assert [count > 50 for count in counts(done(launch(launcher, script), tmp_path))] == [True] * members


def test_a_script_can_do_everything_beside_training_with_its_team(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUN_NOTES", str(tmp_path))
    assert run_script(write_script(tmp_path, MIXED), 2) == [("", "")] * 2
    assert [count > 50 for count in counted(tmp_path)] == [True] * 2


def train_and_talk(team: paceline.Team, talk: bool) -> list[float]:
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4 * team.world_size)
    model, optimizer, loader = team.setup(model, optimizer, loader)
    for x, y in loader:
        loss = mse_loss(model(x), y)
        loss.backward()
        if talk:
            sending = collectives.push(loss.detach(), (team.rank + 1) % 3)
            assert float(collectives.all_reduce(torch.ones(1))) == 3.0
            assert float(collectives.pull(torch.zeros(()), (team.rank - 1) % 3)) > 0
            collectives.wait(sending)
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach().flatten().tolist()


def test_collectives_leave_the_training_of_their_team_as_it_is() -> None:
    assert run_team(train_and_talk, 3, True) == run_team(train_and_talk, 3, False)


# -- who it is -------------------------------------------------------------------------------------------------------


def know(rank: int) -> tuple[bool, bool, int, int]:
    known = communicator()
    return communicator() is known, isinstance(known, Communicator), known.rank, known.size


def test_a_group_is_one_member_here_however_often_it_is_asked_for(groups: Groups) -> None:
    assert groups.run(3, know) == [(True, True, rank, 3) for rank in range(3)]


def test_what_is_not_a_primitive_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'all_educe'"):
        collectives.all_educe  # noqa: B018


def test_attach_leaves_the_loss_as_it_is() -> None:
    loss = torch.tensor(2.5, requires_grad=True)
    tokens = [torch.zeros(0, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    attached = collectives.attach(loss, *tokens)
    assert seen(attached) == seen(loss)
    attached.backward()
    assert loss.grad is not None
    assert float(loss.grad) == 1.0
