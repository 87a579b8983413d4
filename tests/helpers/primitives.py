"""Every primitive of `paceline.collectives`, checked by each member against what a single process knows.

Values follow from a seed and a rank, so each member can tell alone what must come out. They are powers of two and the
like: sums and products are exact, in whatever order a topology takes them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeVar

import torch

from helpers.groups import Pool, Work
from helpers.oracle import Laid, Layout, anything, defined, fold, lay
from paceline import collectives
from paceline.collectives.algorithms import ALGORITHMS
from paceline.transport import segments
from paceline.transport.control_block import ControlBlock

T = TypeVar("T")
OPERATORS = ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]
LARGE = ControlBlock.SLOT // 4 + 333
"""Elements of four bytes that fit neither into a slot nor into an envelope."""
_SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0), (1,), (7,), (5, 3), (LARGE,)]
_LAYOUTS = [Layout(form, shared) for form in ("plain", "offset", "transposed", "strided") for shared in (False, True)]
_CALCULATED = [torch.float16, torch.complex64, torch.int8, torch.uint16, torch.bfloat16, torch.bool, torch.int64]
_CALCULATED += [torch.uint8, torch.bool, torch.uint32, torch.int16, torch.uint64, torch.int32, torch.bool, torch.uint16]
_MOVED = [torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex128, torch.uint16, torch.float8_e4m3fn]


def topologies(operation: str, *, shared: bool = True) -> list[str]:
    """Those that have an operation."""
    having = [name for name, operations in ALGORITHMS.items() if operation in operations]
    return ["auto", *(["shared"] if shared else []), *having]


# -- values ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def whole(seed: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Ones and twos of either sign; not to be changed, as it is drawn only once."""
    source = torch.Generator().manual_seed(1009 * seed + rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=source).bool()
    choices = torch.tensor([-2, -1, 1, 2])
    drawn = choices[torch.randint(0, 4, shape, generator=source)]
    if dtype.is_complex:
        drawn = torch.complex(drawn.double(), choices[torch.randint(0, 4, shape, generator=source)].double())
    return drawn.to(dtype)


@functools.lru_cache(maxsize=4096)
def bits(seed: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits at all; not to be changed, as they are drawn only once."""
    return anything(seed, rank, shape, dtype)


def same_bits(result: torch.Tensor, expected: torch.Tensor, *where: Any) -> None:
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape), where
    if result.numel():
        first, second = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (result, expected))
        assert torch.equal(first, second), (*where, first[:16], second[:16])


def same(result: torch.Tensor, expected: torch.Tensor, *where: Any) -> None:
    """The same numbers; whether a zero has a sign depends on the order, even here."""
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape), where
    if result.is_complex() or result.is_floating_point():  # torch compares only some of these
        wide = torch.complex128 if result.is_complex() else torch.float64
        result, expected = result.to(wide), expected.to(wide)
    assert torch.equal(result, expected), (*where, result.flatten()[:8], expected.flatten()[:8])


# -- one check per operation -----------------------------------------------------------------------------------------


class Here(NamedTuple):
    """Who checks, with whom, and in which topology."""

    rank: int
    size: int
    topology: str = "auto"
    group: Any = None
    uneven: bool = False
    """Whether the members' parts are of different shapes, where that is allowed."""
    brief: bool = False
    """Whether a part of the cases will do."""

    @property
    def how(self) -> dict[str, Any]:
        return {"topology": self.topology, "group": self.group}


def _some(cases: list[T], here: Here) -> list[tuple[int, T]]:
    """Cases and their numbers; of a brief check every third one."""
    return list(enumerate(cases))[:: 3 if here.brief else 1]


class _Reduction(NamedTuple):
    number: int
    operator: str
    laid: Laid
    parts: list[torch.Tensor]

    combined: torch.Tensor


def _reductions(here: Here) -> Iterator[_Reduction]:
    """Operators and dtypes on one shape, then shapes and layouts with one operator."""
    kinds = [(name, torch.int64 if name.startswith("b") else torch.float64) for name in OPERATORS]
    kinds += [(name, dtype) for name, dtype in zip(itertools.cycle(OPERATORS), _CALCULATED) if defined(name, dtype)]
    cases: list[tuple[str, torch.dtype, tuple[int, ...], Layout]] = [(*kind, (5, 3), Layout()) for kind in kinds]
    cases += [("sum", torch.float32, shape, Layout()) for shape in _SHAPES]
    cases += [("avg", torch.float64, (4, 3, 2), layout) for layout in _LAYOUTS]
    cases += [("max", torch.int32, (LARGE, 2), layout) for layout in _LAYOUTS[1:3]]
    for number, (name, dtype, shape, layout) in _some(cases, here):
        parts = [whole(number, rank, shape, dtype) for rank in range(here.size)]
        yield _Reduction(
            number, name, lay(parts[here.rank], layout), parts, _combined(name, number, here.size, shape, dtype)
        )


@functools.cache
def _combined(name: str, number: int, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return fold(name, [whole(number, rank, shape, dtype) for rank in range(size)])


def check_all_reduce(here: Here) -> int:
    count = 0
    for case in _reductions(here):
        result = collectives.all_reduce(case.laid.tensor, case.operator, **here.how)
        assert result is case.laid.tensor
        same(result, case.combined, case.operator, case.number)
        assert case.laid.unharmed()
        count += 1
    return count


def check_reduce(here: Here) -> int:
    count = 0
    for case in _reductions(here):
        root = case.number % here.size
        result = collectives.reduce(case.laid.tensor, root, case.operator, **here.how)
        assert result is case.laid.tensor
        same(result, case.combined if here.rank == root else case.parts[here.rank], case.operator, case.number)
        assert case.laid.unharmed()
        count += 1
    return count


def check_reduce_scatter(here: Here) -> int:
    count = 0
    for case in _reductions(here):
        if not case.parts[0].dim():
            continue
        if case.parts[0].numel() <= 100:  # a list of parts of different lengths

            def part(giver: int, taker: int, case: _Reduction = case) -> torch.Tensor:
                shape = (taker * 3 % 5, *case.parts[0].shape)
                return whole(10 * case.number + taker, giver, shape, case.parts[0].dtype)

            own = [part(here.rank, taker) for taker in range(here.size)]
            result = collectives.reduce_scatter(own, case.operator, **here.how)
            same(result, fold(case.operator, [part(giver, here.rank) for giver in range(here.size)]), case.number)
        rows = torch.cat([case.parts[here.rank]] * here.size)
        cut = lay(rows, _LAYOUTS[case.number % len(_LAYOUTS)]).tensor
        result = collectives.reduce_scatter(cut, case.operator, **here.how)
        same(result, case.combined, case.operator, case.number)
        same(cut, rows)  # it is only read
        count += 1
    return count


def _moves(here: Here) -> Iterator[tuple[int, torch.dtype, tuple[int, ...], Layout]]:
    cases: list[tuple[torch.dtype, tuple[int, ...], Layout]] = [(dtype, (4, 3), Layout()) for dtype in _MOVED]
    cases += [(torch.float32, shape, Layout()) for shape in _SHAPES]
    cases += [(torch.int16, (4, 3, 2), layout) for layout in _LAYOUTS]
    for number, (dtype, shape, layout) in _some(cases, here):
        yield number, dtype, shape, layout


def check_broadcast(here: Here) -> int:
    count = 0
    for number, dtype, shape, layout in _moves(here):
        root = number % here.size
        laid = lay(bits(number, here.rank, shape, dtype), layout)
        assert collectives.broadcast(laid.tensor, root, **here.how) is laid.tensor
        same_bits(laid.tensor, bits(number, root, shape, dtype), number)
        assert laid.unharmed()
        count += 1
    return count


def check_all_gather(here: Here) -> int:
    count = 0
    for number, dtype, shape, layout in _moves(here):
        shapes = _varied(shape, here)
        laid = lay(bits(number, here.rank, shapes[here.rank], dtype), layout)
        results = collectives.all_gather(laid.tensor, **here.how)
        assert len(results) == here.size
        for rank, result in enumerate(results):
            same_bits(result, bits(number, rank, shapes[rank], dtype), number, rank)
        count += 1
    return count


def check_gather(here: Here) -> int:
    count = 0
    for number, dtype, shape, layout in _moves(here):
        root = number % here.size
        shapes = _varied(shape, here)
        laid = lay(bits(number, here.rank, shapes[here.rank], dtype), layout)
        results = collectives.gather(laid.tensor, root, **here.how)
        assert len(results) == (here.size if here.rank == root else 0)
        for rank, result in enumerate(results):
            same_bits(result, bits(number, rank, shapes[rank], dtype), number, rank)
        count += 1
    return count


def check_scatter(here: Here) -> int:
    count = 0
    for number, dtype, shape, layout in _moves(here):
        root = number % here.size
        shapes = _varied(shape, here)
        parts = [lay(bits(number, rank, shapes[rank], dtype), layout).tensor for rank in range(here.size)]
        result = collectives.scatter(parts if here.rank == root else None, root, **here.how)
        same_bits(result, bits(number, here.rank, shapes[here.rank], dtype), number)
        if shape:  # or as one tensor, which is cut
            rows = lay(bits(number, 99, (2 * here.size, *shape), dtype), layout).tensor
            result = collectives.scatter(rows if here.rank == root else None, root, **here.how)
            same_bits(result, rows[2 * here.rank : 2 * here.rank + 2], number)
        count += 1
    return count


def check_all_to_all(here: Here) -> int:
    count = 0
    for number, dtype, shape, layout in _moves(here):
        shapes = _varied(shape, here)

        def part(giver: int, taker: int, drawn: tuple[Any, ...] = (number, shapes, dtype)) -> torch.Tensor:
            number, shapes, dtype = drawn
            return bits(number + 50 * taker, giver, shapes[(giver + taker) % len(shapes)], dtype)

        own = [lay(part(here.rank, taker), layout).tensor for taker in range(here.size)]
        results = collectives.all_to_all(own, **here.how)
        assert len(results) == here.size
        for giver, result in enumerate(results):
            same_bits(result, part(giver, here.rank), number, giver)
        if shape and shape[0] < 100:  # or as one tensor, which is cut
            rows = [bits(number, giver, (here.size, *shape), dtype) for giver in range(here.size)]
            results = collectives.all_to_all(lay(rows[here.rank], layout).tensor, **here.how)
            for giver, result in enumerate(results):
                same_bits(result, rows[giver][here.rank : here.rank + 1], number, giver)
        count += 1
    return count


def _varied(shape: tuple[int, ...], here: Here) -> list[tuple[int, ...]]:
    """A shape for each rank. Uneven ones: for some there is nothing, for others more."""
    if not here.uneven or not shape:
        return [shape] * here.size
    return [((rank * 3 + 2) % 5, *shape) for rank in range(here.size)]


def check_barrier(here: Here) -> int:
    for late in range(here.size):
        time.sleep(0.01 if here.rank == late else 0.0)
        came = torch.tensor([time.monotonic()], dtype=torch.float64)
        collectives.barrier(**here.how)
        left = time.monotonic()
        everybody = collectives.all_gather(came, group=here.group)
        assert left >= max(float(time) for time in everybody)
    return here.size


def check_map_reduce(here: Here) -> int:
    count = 0
    calls: list[int] = []

    def square(item: int) -> torch.Tensor:
        calls.append(item)
        return torch.tensor([item * item, -item])

    for items in ([5], list(range(1, here.size + 1)), list(range(-3, 2 * here.size + 1))):
        for operator in ("sum", "product", "min", "max", "avg", "bxor"):
            calls.clear()
            values = [torch.tensor([item * item, -item]) for item in items]
            expected = fold("sum" if operator == "avg" else operator, values)
            expected = expected / len(items) if operator == "avg" else expected
            result = collectives.map_reduce(square, iter(items), operator, **here.how)
            same(result, expected, operator, items)
            assert calls == items[here.rank :: here.size]  # each item is done once, by one member
            count += 1
    assert float(collectives.map_reduce(lambda item: item / 4, [1, 2, 5], **here.how)) == 2.0
    return count


CHECKS: dict[str, Callable[[Here], int]] = {
    "all_reduce": check_all_reduce,
    "reduce": check_reduce,
    "reduce_scatter": check_reduce_scatter,
    "broadcast": check_broadcast,
    "all_gather": check_all_gather,
    "gather": check_gather,
    "scatter": check_scatter,
    "all_to_all": check_all_to_all,
    "barrier": check_barrier,
}


def check_push_and_pull(here: Here) -> int:
    """Everybody to everybody else; with tags, taken in another order than sent."""
    count = 0
    for number, dtype, shape, layout in _moves(here):
        pushed = [
            collectives.push(
                lay(bits(number + tag, 10 * here.rank + to, shape, dtype), layout).tensor,
                to,
                tag=tag,
                group=here.group,
            )
            for to in _others(here)
            for tag in (7, 0)
        ]
        for tag in (0, 7):
            for source in reversed(_others(here)):
                laid = lay(bits(999, 0, shape, dtype), layout)
                assert collectives.pull(laid.tensor, source, tag=tag, group=here.group) is laid.tensor
                same_bits(laid.tensor, bits(number + tag, 10 * source + here.rank, shape, dtype), number, source)
                assert laid.unharmed()
        collectives.wait(*pushed)
        count += len(pushed)
    return count


def _others(here: Here) -> list[int]:
    return [rank for rank in range(here.size) if rank != here.rank]


def check_everything(rank: int, size: int, group: Any = None) -> int:
    """All primitives, in whatever topology is quickest."""
    here = Here(rank, size, group=group, brief=True)
    count = sum(check(here) for check in CHECKS.values()) + check_push_and_pull(here)
    tensor = collectives.empty(3, 2, dtype=torch.float64)
    assert segments.find(tensor) is not None
    tensor += rank + 1
    same(collectives.all_reduce(tensor, group=group), torch.full((3, 2), size * (size + 1) / 2).double())
    collectives.wait(0, group=group)
    return count


# -- groups that stay ------------------------------------------------------------------------------------------------


class Groups(contextlib.AbstractContextManager["Groups"]):
    """One group per backend and size, made when it is first needed, and made anew once a member has failed."""

    def __init__(self, timeout: float = 15.0, make: Callable[..., Pool] = Pool) -> None:
        self._timeout, self._make = timeout, make
        self._known: dict[tuple[str, int], Pool] = {}

    def run(self, size: int, work: Work, *arguments: Any, backend: str = "paceline") -> list[Any]:
        """What `work(rank, *arguments)` returned on each member; the first exception of one is raised at once."""
        key = backend, size
        if key not in self._known:
            self._known[key] = self._make(size, backend, self._timeout)
        pool = self._known[key]
        try:
            pool.begin(work, *arguments)
            return self._results(pool)
        except BaseException:
            # Its members may be anywhere by now, and the next test needs some that are not.
            end(self._known.pop(key))
            raise

    def _results(self, pool: Pool) -> list[Any]:
        results: dict[int, Any] = {}
        left = {end: rank for rank, (_, end) in enumerate(pool._members)}
        until = time.monotonic() + 2 * self._timeout + 10
        while left:
            ready = wait(list(left), until - time.monotonic())
            assert ready, f"nothing was heard from {sorted(left.values())}; the others: {results}"
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = left.pop(connection)
                try:
                    results[rank] = result = pickle.loads(connection.recv_bytes())
                except EOFError:
                    raise AssertionError(f"rank {rank} died") from None
                if isinstance(result, BaseException):
                    raise AssertionError(f"rank {rank}: {result.__notes__[0]}") from result
        return [results[rank] for rank in range(pool.size)]

    def __exit__(self, *_: object) -> None:
        for pool in self._known.values():
            pool.close()


def end(pool: Pool) -> None:
    """Whatever its members are doing."""
    for pid in pool.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    pool.close()
