"""Many operations at once, of many threads and of more ranks than cores; and that nothing is left of any of it."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.faults import (
    KINDS,
    LARGE,
    SMALL,
    SOON,
    answers,
    assert_all_are_told,
    band,
    have_answered,
    in_operation,
    prepared,
)
from helpers.groups import run_group
from helpers.load import allowed
from helpers.support import left_behind, shared_files, state_of, wait_until
from torch import distributed

from paceline import collectives
from paceline.transport import segments


def ones(count: int) -> torch.Tensor:
    return torch.ones(count)


# -- many at once ------------------------------------------------------------------------------------------------------


def in_threads(count: int, work: Callable[[int], None]) -> list[str]:
    """What went wrong in so many threads."""
    wrong: list[str] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            wrong.append(f"{number}: {error!r}")

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for number, thread in enumerate(threads):
        thread.join(50)
        if thread.is_alive():
            wrong.append(f"{number}: hangs")
    return wrong


def twenty_groups(rank: int) -> list[str]:
    size = distributed.get_world_size()
    groups = [distributed.new_group(list(range(size))) for _ in range(20)]

    def work(number: int) -> None:
        group, chance = groups[number], random.Random(number)
        begun = []
        for _ in range(25):
            count = chance.choice((1, 50, 3000, 40_000))
            tensor = torch.full((count,), float(rank + number))
            begun.append((tensor, distributed.all_reduce(tensor, group=group, async_op=True)))
        for tensor, operation in begun:
            operation.wait()
            assert tensor.eq(sum(range(size)) + size * number).all()

    return in_threads(len(groups), work)


@pytest.mark.parametrize("closed", [False, True])
def test_twenty_threads_use_twenty_groups(closed: bool) -> None:
    with band(2, closed=closed) as pool:
        assert pool.run(twenty_groups) == [[], []]


def two_threads(rank: int) -> list[str]:
    size, rounds = distributed.get_world_size(), 150

    def collect() -> None:
        chance = random.Random(1)
        for _ in range(rounds):
            case = prepared(chance.choice(KINDS), rank, size, chance.choice((7, SMALL, LARGE // 2)))
            case.do(chance.choice(("now", "async")))
            assert case.right

    def converse() -> None:
        chance = random.Random(2)
        for number in range(rounds):
            count = chance.choice((1, 100, 20_000))
            given, taken = torch.full((count,), float(1000 * rank + number)), torch.empty(count)
            sending = distributed.isend(given, (rank + 1) % size, tag=number % 5)
            distributed.recv(taken, (rank - 1) % size, tag=number % 5)
            sending.wait()  # type: ignore[union-attr]
            assert taken.eq(1000 * ((rank - 1) % size) + number).all()

    return in_threads(2, lambda number: (collect, converse)[number]())


def test_collectives_and_messages_of_two_threads_do_not_mix() -> None:
    assert run_group(two_threads, 3) == [[], [], []]


def hundreds(rank: int) -> str:
    size, chance = distributed.get_world_size(), random.Random(3)
    cases = [prepared(chance.choice(KINDS), rank, size, chance.choice((7, SMALL, LARGE // 2))) for _ in range(200)]
    begun = [case.call(True) for case in cases]
    for work in reversed(begun):
        work.wait()
    assert all(case.right for case in cases)
    peer = rank ^ 1
    counts = [chance.choice((1, 100, 20_000)) for _ in range(200)]
    taken = [torch.empty(count) for count in counts]
    receiving = [distributed.irecv(tensor, peer) for tensor in taken]
    sending = [distributed.isend(torch.full((count,), float(number)), peer) for number, count in enumerate(counts)]
    for transfer in reversed([*sending, *receiving]):
        transfer.wait()  # type: ignore[union-attr]
    assert all(tensor.eq(number).all() for number, tensor in enumerate(taken))
    return "right"


@pytest.mark.parametrize("closed", [False, True])
def test_hundreds_of_operations_are_outstanding(closed: bool) -> None:
    with band(2, closed=closed) as pool:
        assert pool.run(hundreds) == ["right", "right"]


def backwards(rank: int, count: int) -> str:
    tags = range(100)
    if rank == 0:
        for sending in [distributed.isend(torch.full((count,), float(tag)), 1, tag=tag) for tag in tags]:
            sending.wait()  # type: ignore[union-attr]
        return "right"
    for tag in reversed(tags):
        tensor = torch.empty(count)
        distributed.recv(tensor, 0, tag=tag)
        assert tensor.eq(tag).all()
    return "right"


@pytest.mark.parametrize("count", [10, 20_000], ids=["small", "large"])
def test_messages_may_be_asked_for_in_any_order(count: int) -> None:
    with band(2) as pool:
        assert pool.run(backwards, count) == ["right", "right"]


def from_a_callback(rank: int, blocking: bool) -> float:
    """As communication hooks do it: what is done with one result is another operation."""

    def then(_: Any) -> torch.Tensor:
        tensor = ones(10)
        if blocking:
            distributed.all_reduce(tensor)
            return tensor
        begun: Any = distributed.all_reduce(tensor, async_op=True)
        return begun.get_future().wait()[0]

    begun: Any = distributed.all_reduce(ones(10), async_op=True)
    chained = begun.get_future().then(then)
    return float(chained.wait()[0])


@pytest.mark.parametrize("blocking", [True, False])
def test_an_operation_may_be_done_in_the_callback_of_another(blocking: bool) -> None:
    with band(2) as pool:
        pool.begin(from_a_callback, blocking)
        assert answers(pool) == [2.0, 2.0]


def every_kind(rank: int, rounds: int, seed: int) -> list[str]:
    size, chance = distributed.get_world_size(), random.Random(seed)
    wrong = []
    for number in range(rounds):
        kind, root = chance.choice([*KINDS, "barrier"]), chance.randrange(size)
        case = prepared(kind, rank, size, chance.randrange(1, 50), root)
        case.do("async" if chance.random() < 0.1 else "now")
        if not case.right:
            wrong.append(f"{number}: {kind}")
    return wrong


def test_eight_ranks_on_few_cores_do_thousands_of_collectives() -> None:
    with band(8) as pool:
        start = time.monotonic()
        assert pool.run(every_kind, 1000, 4, timeout=100) == [[]] * 8
        assert time.monotonic() - start < allowed(60)


def test_three_ranks_do_hundreds_of_collectives_where_memory_is_closed() -> None:
    with band(3, closed=True) as pool:
        assert pool.run(every_kind, 500, 5) == [[]] * 3


def restless(rank: int, rounds: int) -> list[str]:
    size, chance = distributed.get_world_size(), random.Random(6)
    wrong = []
    for number in range(rounds):
        kind, count = chance.choice(KINDS), chance.choice((5, SMALL, LARGE // 2))
        case = prepared(kind, rank, size, count, chance.randrange(size))
        given, taken = torch.full((count,), float(rank + number)), torch.empty(count)
        sending = distributed.isend(given, (rank + 1) % size)
        case.do(chance.choice(("now", "async", "future")))
        distributed.recv(taken, (rank - 1) % size)
        sending.wait()  # type: ignore[union-attr]
        if not case.right or not taken.eq((rank - 1) % size + number).all():
            wrong.append(f"{number}: {kind}")
    return wrong


@pytest.mark.parametrize("closed", [False, True])
def test_pauses_at_any_time_change_no_result(closed: bool) -> None:
    chance, pauses = random.Random(7), 0
    with band(3, closed=closed) as pool:
        pool.begin(restless, 300)
        while not have_answered(pool):
            pid = chance.choice(pool.pids)
            os.kill(pid, signal.SIGSTOP)
            pauses += 1
            time.sleep(chance.uniform(0, 0.02))
            os.kill(pid, signal.SIGCONT)
            time.sleep(chance.uniform(0, 0.01))
        assert answers(pool) == [[], [], []]
        assert pauses > 20


# -- nothing is left ---------------------------------------------------------------------------------------------------


def test_nothing_is_left_of_a_group_that_failed(tmp_path: Path) -> None:
    before = shared_files()
    with band(3) as pool:
        pids = pool.pids
        pool.begin(in_operation, tmp_path, 1, "all_reduce", True, "async", "told", "kill")
        assert_all_are_told(pool, tmp_path, 1)
        start = time.monotonic()
    assert time.monotonic() - start < allowed(SOON)
    assert all(state_of(pid) == "" for pid in pids)
    wait_until(lambda: not left_behind(before), 30, "/dev/shm to be as it was")


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def held() -> tuple[int, int]:
    """Descriptors, and mapped segments, of this process."""
    maps = Path("/proc/self/maps").read_text()
    return descriptors(), maps.count("memfd:paceline")


def makes_groups(rank: int, count: int) -> list[tuple[int, int]]:
    seen = []
    for _ in range(count):
        group = distributed.new_group([0, 1])
        distributed.all_reduce(ones(LARGE), group=group)
        distributed.all_reduce(ones(10), group=group, async_op=True).wait()  # type: ignore[union-attr]
        if rank:
            distributed.isend(ones(LARGE), 0, group=group).wait()  # type: ignore[union-attr]
        else:
            distributed.irecv(ones(LARGE), 1, group=group).wait()  # type: ignore[union-attr]
        distributed.destroy_process_group(group)
        del group
        seen.append(held())
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and threading.active_count() > 1:
        time.sleep(0.02)  # threads of the last group are about to end
    gc.collect()
    return [seen[0], held()]


def test_groups_that_were_destroyed_hold_nothing() -> None:
    for first, last in run_group(makes_groups, 2, 30):
        assert last[0] <= first[0] + 4, f"{last[0] - first[0]} more descriptors after 30 groups"
        assert last[1] <= first[1] + 4, f"{last[1] - first[1]} more mapped segments after 30 groups"


def makes_tensors(rank: int, count: int) -> dict[str, int]:
    most = {"descriptors": 0, "segments": 0, "megabytes": 0}
    before, _ = held()
    for number in range(count):
        tensor = collectives.empty(500_000)
        tensor.fill_(rank + 1)
        distributed.all_reduce(tensor)
        assert tensor[number] == 3
        if number > count // 4:
            opened, segments = held()
            status = Path("/proc/self/status").read_text()
            resident = int(re.findall(r"RssShmem:\s+(\d+)", status)[0]) // 1024
            now = {"descriptors": opened - before, "segments": segments, "megabytes": resident}
            most = {key: max(most[key], now[key]) for key in most}
    return most


def test_segments_that_their_owner_let_go_are_dropped_by_all() -> None:
    for most in run_group(makes_tensors, 2, 120):
        assert most["segments"] < 12
        assert most["megabytes"] < 40, "each tensor has 2"
        assert most["descriptors"] < 40, "more than there were"


def begins_and_forgets(rank: int) -> int:
    """Megabytes that 40 operations of 8 MB leave behind."""
    gc.collect()
    gc.disable()  # or it depends on chance when garbage is found
    distributed.all_reduce(torch.ones(2_000_000), async_op=True).wait()  # type: ignore[union-attr]
    before = resident_megabytes()
    for _ in range(40):
        distributed.all_reduce(torch.ones(2_000_000), async_op=True).wait()  # type: ignore[union-attr]
    return resident_megabytes() - before


def resident_megabytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 2**20


def test_an_operation_that_is_done_holds_no_tensors() -> None:
    for grown in run_group(begins_and_forgets, 2):
        assert grown < 80, f"{grown} MB of tensors are kept by operations that are done"


def makes_nothing(rank: int) -> int:
    before = descriptors()
    for _ in range(50):
        collectives.empty(0)
        collectives.empty(3, 0, 2)
    gc.collect()
    return descriptors() - before


def test_empty_tensors_hold_no_descriptors() -> None:
    (grown,) = run_group(makes_nothing, 1)
    assert grown < 10


def collects_inside(rank: int) -> str:
    """From Python 3.12 on, garbage may be collected after any call: also while the list of segments is changed."""
    insort = segments.bisect.insort

    def collecting(*arguments: Any) -> None:
        insort(*arguments)
        cycle: list[Any] = [kept.pop()] if kept else []
        cycle.append(cycle)
        del cycle
        gc.collect()

    kept = [collectives.empty(10) for _ in range(3)]
    segments.bisect = types.SimpleNamespace(insort=collecting, bisect_right=segments.bisect.bisect_right)  # type: ignore[assignment]
    for _ in range(5):
        collectives.empty(10)
    return "went on"


def test_garbage_may_be_collected_at_any_time() -> None:
    with band(1) as pool:
        pool.begin(collects_inside)
        assert answers(pool, seconds=SOON) == ["went on"]
