"""Operations that are begun and not waited for, and groups beside groups: the same results, in whatever order."""

from __future__ import annotations

import datetime
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.oracle import SIZES, Pools, Seen, anything, fold, hear, numbers, quiet, seen, tell, token
from helpers.support import wait_until
from torch import distributed
from torch.distributed import ReduceOp

from paceline.errors import TeamTimeout

torch.set_num_threads(1)
pytestmark = quiet
COUNTS = [3, 1000, 60_000]
KINDS = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_single",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "message",
]


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with Pools() as made:
        yield made


@pytest.fixture(scope="module")
def closed() -> Iterator[Pools]:
    with Pools(reaching=False) as made:
        yield made


# -- one of each kind ------------------------------------------------------------------------------------------------


def begin(kind: str, number: int, count: int, later: bool = True) -> tuple[list[Any], list[torch.Tensor]]:
    """Begin an operation, the `number`th: what to wait for, and what it will fill."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    own = numbers(number, rank, (size, count), torch.float32)
    root = number % size
    whole, row = torch.zeros(size, count), torch.zeros(count)
    outs = list(torch.zeros(size, count))
    calls: dict[str, Callable[[], tuple[Any, list[torch.Tensor]]]] = {
        "all_reduce": lambda: (distributed.all_reduce(own, ReduceOp.AVG, async_op=later), [own]),
        "reduce": lambda: (distributed.reduce(own, root, ReduceOp.MAX, async_op=later), [own]),
        "broadcast": lambda: (distributed.broadcast(own, root, async_op=later), [own]),
        "all_gather": lambda: (distributed.all_gather(outs, own[0], async_op=later), outs),
        "all_gather_single": lambda: (distributed.all_gather_single(whole, own[0], async_op=later), [whole]),
        "gather": lambda: (
            distributed.gather(own[0], outs if rank == root else None, root, async_op=later),
            outs if rank == root else [],
        ),
        "scatter": lambda: (
            distributed.scatter(row, list(own) if rank == root else None, root, async_op=later),
            [row],
        ),
        "reduce_scatter": lambda: (distributed.reduce_scatter(row, list(own), async_op=later), [row]),
        "reduce_scatter_single": lambda: (distributed.reduce_scatter_single(row, own, async_op=later), [row]),
        "all_to_all": lambda: (distributed.all_to_all(outs, list(own), async_op=later), outs),
        "all_to_all_single": lambda: (distributed.all_to_all_single(whole, own, async_op=later), [whole]),
        "barrier": lambda: (distributed.barrier(async_op=later), []),
    }
    if kind == "message":
        receiving = distributed.irecv(row, (rank - 1) % size, tag=number)
        sending = distributed.isend(own[0], (rank + 1) % size, tag=number)
        if not later:
            receiving.wait()
            sending.wait()
        return [receiving, sending], [row]
    work, filled = calls[kind]()
    return [work], filled


def filled_by(kind: str, number: int, count: int, rank: int, size: int) -> list[torch.Tensor]:
    """What a rank's tensors must be after that."""
    parts = [numbers(number, peer, (size, count), torch.float32) for peer in range(size)]
    root = number % size
    firsts = [part[0] for part in parts]
    summed = [fold("sum", parts)[rank]]
    columns = [part[rank] for part in parts]
    results: dict[str, list[torch.Tensor]] = {
        "all_reduce": [fold("avg", parts)],
        "reduce": [fold("max", parts) if rank == root else parts[rank]],
        "broadcast": [parts[root]],
        "all_gather": firsts,
        "all_gather_single": [torch.stack(firsts)],
        "gather": firsts if rank == root else [],
        "scatter": [parts[root][rank]],
        "reduce_scatter": summed,
        "reduce_scatter_single": summed,
        "all_to_all": columns,
        "all_to_all_single": [torch.stack(columns)],
        "barrier": [],
        "message": [firsts[rank - 1]],
    }
    return results[kind]


def outcome(several: list[tuple[str, int, int]], rank: int, size: int) -> list[list[Seen]]:
    return [[seen(tensor) for tensor in filled_by(*one, rank, size)] for one in several]


def mixture(seed: int, rounds: int) -> list[tuple[str, int, int]]:
    """Kind, number and size of some operations, every kind so many times among them."""
    source = random.Random(seed)
    kinds = KINDS * rounds
    source.shuffle(kinds)
    return [(kind, number, source.choice(COUNTS)) for number, kind in enumerate(kinds)]


# -- many at once ----------------------------------------------------------------------------------------------------


def wait_in_own_order(rank: int, size: int, several: list[tuple[str, int, int]], how: str) -> list[list[Seen]]:
    begun = [begin(*one) for one in several]
    works = [work for group, _ in begun for work in group]
    random.Random(rank).shuffle(works)
    if how == "polled":
        wait_until(lambda: all(work.is_completed() for work in works), 10.0, "all to be completed")
    elif how == "futures":
        for work in works:
            work.get_future().wait()
    else:
        for work in works:
            assert work.wait()
    assert all(work.is_completed() and work.is_success() for work in works)
    return [[seen(tensor) for tensor in filled] for _, filled in begun]


@pytest.mark.parametrize("how", ["waited", "polled", "futures"])
@pytest.mark.parametrize("size", SIZES)
def test_many_operations_are_awaited_in_another_order_on_each_rank(pools: Pools, size: int, how: str) -> None:
    several = mixture(size, 1 if size > 4 else 2)
    told = pools.run(size, wait_in_own_order, several, how)
    assert told == [outcome(several, rank, size) for rank in range(size)]


@pytest.mark.parametrize("how", ["waited", "polled", "futures"])
def test_they_are_where_memory_cannot_be_reached(closed: Pools, how: str) -> None:
    several = mixture(9, 2)
    assert closed.run(3, wait_in_own_order, several, how) == [outcome(several, rank, 3) for rank in range(3)]


def now_and_later(rank: int, size: int, several: list[tuple[str, int, int]]) -> list[list[Seen]]:
    begun = [begin(*one, later=number % 3 > 0) for number, one in enumerate(several)]
    for works, _ in begun:
        for work in works:
            if work is not None:
                work.wait()
    return [[seen(tensor) for tensor in filled] for _, filled in begun]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_is_done_at_once_keeps_its_place_among_what_was_begun(pools: Pools, size: int) -> None:
    several = mixture(20 + size, 2)
    assert pools.run(size, now_and_later, several) == [outcome(several, rank, size) for rank in range(size)]


def chained(rank: int, size: int, steps: int) -> Seen:
    """Each operation needs the result of the one before; only the last is waited for."""
    tensor = numbers(1, rank, (500,), torch.float64)
    gathered = torch.zeros(size, 500, dtype=torch.float64)
    work: Any = None
    for _ in range(steps):
        distributed.all_reduce(tensor, ReduceOp.AVG, async_op=True)
        distributed.all_gather_single(gathered, tensor, async_op=True)
        distributed.broadcast(gathered, size - 1, async_op=True)
        work = distributed.reduce_scatter_single(tensor, gathered, async_op=True)
    work.wait()
    return seen(tensor)


def test_operations_are_done_in_the_order_in_which_they_were_begun(pools: Pools) -> None:
    parts = [numbers(1, rank, (500,), torch.float64) for rank in range(3)]
    for _ in range(10):
        parts = [fold("sum", [fold("avg", parts)] * 3)] * 3
    assert pools.run(3, chained, 10) == [seen(parts[0])] * 3


# -- before the others come ------------------------------------------------------------------------------------------


def one_comes_late(rank: int, size: int, kind: str, count: int, key: str) -> tuple[bool, list[Seen]]:
    """Whether it was complete before rank 1 had begun; what it filled."""
    if rank == 1:
        hear(f"{key}/0", f"{key}/2")
    works, filled = begin(kind, 1, count)  # of which rank 1 is the root
    complete = all(work.is_completed() for work in works)
    if rank != 1:
        tell(f"{key}/{rank}")
    for work in works:
        work.wait()
    return complete, [seen(tensor) for tensor in filled]


@pytest.mark.parametrize("count", [3, 60_000])
@pytest.mark.parametrize("kind", KINDS)
def test_an_operation_returns_before_all_have_come(pools: Pools, kind: str, count: int) -> None:
    told = pools.run(3, one_comes_late, kind, count, token())
    for rank, (_, filled) in enumerate(told):
        assert filled == outcome([(kind, 1, count)], rank, 3)[0]
    assert not told[2][0]
    # A small message is sent once it is in its envelope, and that from rank 2 has come.
    assert not told[0][0] or (kind == "message" and count == 3)


def in_limited_time(rank: int, size: int, key: str) -> tuple[bool, bool, Seen]:
    """Whether time was up; whether it was complete then; what came of it in the end."""
    if rank == 1:
        hear(f"{key}/0", f"{key}/2")
    tensor = torch.full((10,), float(rank))
    work = distributed.all_reduce(tensor, async_op=True)
    late = before = False
    if rank != 1:
        try:
            work.wait(datetime.timedelta(seconds=0.05))
        except TeamTimeout:
            late = True
        before = work.is_completed()
        tell(f"{key}/{rank}")
    work.wait()
    return late, before, seen(tensor)


def test_whoever_waits_for_a_limited_time_can_wait_again(pools: Pools) -> None:
    done = seen(torch.full((10,), 3.0))
    told = pools.run(3, in_limited_time, token())
    assert told == [(True, False, done), (False, False, done), (True, False, done)]


# -- futures ---------------------------------------------------------------------------------------------------------


def with_callbacks(rank: int, size: int, late: int, key: str) -> tuple[list[float], list[str], str]:
    """What callbacks saw, in which order, and in which thread the last one ran."""
    if rank == late:
        hear(*(f"{key}/{peer}" for peer in range(size) if peer != late))
    order: list[str] = []
    tensors = [torch.full((4,), float(number + rank)) for number in range(3)]
    works = [distributed.all_reduce(tensor, async_op=True) for tensor in tensors]
    threads = []

    def halve(future: Any) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        (tensor,) = future.value()
        return tensor / 2

    def note(future: Any) -> torch.Tensor:
        order.append("noted")
        return future.value()

    halves = [work.get_future().then(halve).then(note) for work in works]
    order.append("asked")
    if rank != late:
        tell(f"{key}/{rank}")
    results = [float(half.wait()[0]) for half in halves]
    for work in works:
        assert work.get_future() is work.get_future()
        assert work.get_future().done()
    return results, order, threads[-1]


@pytest.mark.parametrize("late", [0, 1, 2])
def test_callbacks_get_the_tensors_once_they_are_filled(pools: Pools, late: int) -> None:
    expected = [(3 * number + 3) / 2 for number in range(3)]
    told = pools.run(3, with_callbacks, late, token())
    assert [results for results, _, _ in told] == [expected] * 3
    for rank, (_, order, thread) in enumerate(told):
        assert sorted(order) == ["asked", "noted", "noted", "noted"]
        if rank != late:  # nothing was done when callbacks were given
            assert order[0] == "asked"
            assert thread != "MainThread"


def futures_of_every_kind(rank: int, size: int) -> dict[str, int]:
    lengths = {}
    for number, kind in enumerate(KINDS):
        (work, *_), filled = begin(kind, number, 10)
        value = work.get_future().wait()
        work.wait()
        flat = [tensor for item in value for tensor in (item if isinstance(item, list) else [item])]
        assert {tensor.data_ptr() for tensor in filled} <= {tensor.data_ptr() for tensor in flat}, kind
        lengths[kind] = len(filled)
        distributed.barrier()
    return lengths


def test_the_future_of_every_kind_holds_what_was_filled(pools: Pools) -> None:
    told = pools.run(3, futures_of_every_kind)
    assert [set(lengths) for lengths in told] == [set(KINDS)] * 3
    assert all(lengths["all_gather"] == 3 and lengths["all_reduce"] == 1 for lengths in told)


def next_from_callback(rank: int, size: int, how: str, key: str) -> float:
    """A callback that itself needs an operation, as hooks that compress gradients have it."""

    def again(future: Any) -> torch.Tensor:
        (tensor,) = future.value()
        if how == "now":
            distributed.all_reduce(tensor)
        else:
            work = distributed.all_reduce(tensor, async_op=True)
            work.wait() if how == "work" else work.get_future().wait()
        return tensor

    if rank == 0:
        hear(f"{key}/1", f"{key}/2")
    first = distributed.all_reduce(torch.ones(5), async_op=True).get_future().then(again)
    tell(f"{key}/{rank}")
    return float(first.wait()[0])


@pytest.mark.parametrize("how", ["now", "work", "future"])
def test_a_callback_may_do_the_next_operation(pools: Pools, how: str) -> None:
    assert pools.run(3, next_from_callback, how, token(), timeout=6.0) == [9.0] * 3


def refused_later(rank: int, size: int) -> tuple[list[str], bool, Seen]:
    """An operation that can not be done, between two that can."""
    before, after = torch.full((3,), float(rank)), torch.full((3,), float(rank))
    first = distributed.all_reduce(before, async_op=True)
    wrong = distributed.all_reduce(torch.ones(3, dtype=torch.bool), ReduceOp.AVG, async_op=True)
    last = distributed.all_reduce(after, async_op=True)
    last.wait()
    first.wait()
    messages = []
    for wait in (wrong.wait, wrong.get_future().wait):
        try:
            wait()
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    assert isinstance(wrong.exception(), ValueError)
    return messages, wrong.is_completed() and not wrong.is_success(), seen(torch.stack([before, after]))


def test_what_cannot_be_done_is_told_to_whoever_waits_for_it_and_to_nobody_else(pools: Pools) -> None:
    for messages, failed, sums in pools.run(3, refused_later):
        assert len(messages) == 2
        assert all("avg is not defined for bool" in message for message in messages)
        assert failed
        assert sums == seen(torch.full((2, 3), 3.0))


def forget_operations(rank: int, size: int) -> Seen:
    """Nobody keeps the work, nor the tensors that are given."""
    outs = [torch.zeros(size, 60_000, dtype=torch.int32) for _ in range(10)]
    for number, out in enumerate(outs):
        distributed.all_gather_single(out, anything(number, rank, (60_000,), torch.int32), async_op=True)
        torch.empty(60_000, dtype=torch.int32).fill_(-1)
    distributed.barrier()
    return seen(torch.stack(outs))


def test_what_was_begun_is_done_even_if_nobody_holds_it(pools: Pools) -> None:
    every = [torch.stack([anything(number, rank, (60_000,), torch.int32) for rank in range(3)]) for number in range(10)]
    assert pools.run(3, forget_operations) == [seen(torch.stack(every))] * 3


# -- groups beside groups --------------------------------------------------------------------------------------------


def overlapping(rank: int, size: int, sets: list[list[int]]) -> list[Any]:
    groups = [distributed.new_group(ranks, timeout=datetime.timedelta(seconds=5)) for ranks in sets]
    results: list[Any] = []
    for ranks, group in zip(sets, groups, strict=True):
        if rank not in ranks:
            results.append(None)
            continue
        total = numbers(1, rank, (40_000,), torch.float32)
        distributed.all_reduce(total, group=group)
        news = anything(2, rank, (10,), torch.int32)
        distributed.broadcast(news, ranks[-1], group=group)
        everything: list[Any] = [None] * len(ranks)
        distributed.all_gather_object(everything, rank, group=group)
        after = ranks[(ranks.index(rank) + 1) % len(ranks)]
        got = torch.zeros(20_000, dtype=torch.int32)
        receiving = distributed.irecv(got, group=group)
        sending = distributed.isend(anything(3, rank, (20_000,), torch.int32), after, group=group)
        receiving.wait()
        sending.wait()
        source = distributed.get_global_rank(group, receiving._source_rank())
        assert distributed.get_group_rank(group, rank) == ranks.index(rank)
        results.append([seen(total), seen(news), everything, source, seen(got)])
    distributed.barrier()
    for ranks, group in zip(sets, groups, strict=True):
        if rank in ranks:
            distributed.destroy_process_group(group)
    return results


def test_groups_that_overlap_work_each_for_itself(pools: Pools) -> None:
    sets = [[0, 1, 2], [1, 2, 3], [0, 3], [2], [0, 1, 2, 3]]
    told = pools.run(4, overlapping, sets)
    for number, ranks in enumerate(sets):
        total = seen(fold("sum", [numbers(1, rank, (40_000,), torch.float32) for rank in ranks]))
        news = seen(anything(2, ranks[-1], (10,), torch.int32))
        for rank in range(4):
            if rank not in ranks:
                assert told[rank][number] is None
                continue
            before = ranks[ranks.index(rank) - 1]
            sent = seen(anything(3, before, (20_000,), torch.int32))
            assert told[rank][number] == [total, news, ranks, before, sent]


def in_subgroups(rank: int, size: int) -> tuple[list[int], Seen, Seen]:
    own, _ = distributed.new_subgroups(2, timeout=datetime.timedelta(seconds=5))
    ranks = distributed.get_process_group_ranks(own)
    inner, outer = (torch.tensor([float(2**rank)]) for _ in range(2))
    works = [distributed.all_reduce(inner, group=own, async_op=True), distributed.all_reduce(outer, async_op=True)]
    for work in works if rank % 2 else reversed(works):
        work.wait()
    distributed.barrier()
    distributed.destroy_process_group(own)
    return ranks, seen(inner), seen(outer)


def test_subgroups_of_equal_size_work_beside_the_whole(pools: Pools) -> None:
    lower, upper = ([0, 1], seen(torch.tensor([3.0]))), ([2, 3], seen(torch.tensor([12.0])))
    expected = [(*half, seen(torch.tensor([15.0]))) for half in (lower, lower, upper, upper)]
    assert pools.run(4, in_subgroups) == expected


def groups_in_threads(rank: int, size: int) -> list[float]:
    """Two groups of the same members, each used by a thread of its own."""
    groups = [distributed.new_group(timeout=datetime.timedelta(seconds=5)) for _ in range(2)]
    results = [0.0, 0.0]

    def work(number: int) -> None:
        for step in range(60):
            tensor = torch.full((COUNTS[step % 3],), float(rank + number))
            distributed.all_reduce(tensor, group=groups[number])
            results[number] += float(tensor[-1])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    distributed.barrier()
    for group in groups:
        distributed.destroy_process_group(group)
    return results


def test_threads_can_each_use_a_group_of_their_own(pools: Pools) -> None:
    assert pools.run(3, groups_in_threads) == [[60.0 * 3, 60.0 * 6]] * 3


def one_group_in_threads(rank: int, size: int) -> list[float]:
    """Threads that begin operations on one group one after the other, and wait for them at the same time."""
    tensors = [torch.full((COUNTS[number % 3],), float(number)) for number in range(30)]
    works = [distributed.all_reduce(tensor, async_op=True) for tensor in tensors]
    threads = [
        threading.Thread(target=lambda first=first: [work.wait() for work in works[first::3]]) for first in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [float(tensor[-1]) for tensor in tensors]


def test_threads_can_wait_for_operations_of_one_group(pools: Pools) -> None:
    assert pools.run(3, one_group_in_threads) == [[3.0 * number for number in range(30)]] * 3
