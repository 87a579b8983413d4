"""On processors that reorder writes, data is published behind a fence and read behind another one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers.groups import Pool
from torch import distributed

from paceline.config import Timeouts
from paceline.transport import Barrier, BarrierKind, Memory, fence
from paceline.transport.futex import FutexArray


@pytest.fixture
def weak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "WEAK", True)


def test_a_word_changes_after_the_fence(weak: None, monkeypatch: pytest.MonkeyPatch) -> None:
    words = FutexArray(Memory.create(FutexArray.STRIDE).bytes(0, FutexArray.STRIDE), 1)
    seen: list[int] = []
    monkeypatch.setattr(fence, "fence", lambda: seen.append(words.values[0]))
    words.write(0, 7)
    assert seen == [0]
    assert words.values[0] == 7


def test_a_step_has_a_fence_before_its_word_and_one_after_the_others(
    weak: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory.create(Barrier.memory_size(2))
    members = [Barrier(memory, rank, 2, Timeouts(barrier=60.0), lambda _: None) for rank in (0, 1)]
    for member in members:
        member.sign_in()
    words = FutexArray(memory.bytes(0, 2 * FutexArray.STRIDE), 2)
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(fence, "fence", lambda: seen.append((words.values[0], words.values[words.step])))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda member: member.wait(BarrierKind.BARRIER), members))
    assert len(seen) == 4
    assert seen.count((1, 1)) >= 2  # after both have come
    assert seen[0] == (0, 0)  # before either has


def exchanged(rank: int) -> list[Any]:
    results = []
    for count in (3, 100_000):  # in slots and envelopes, and in place
        total, parts = torch.full((count,), rank + 1.0), [torch.zeros(count) for _ in range(2)]
        distributed.all_gather(parts, total)
        distributed.all_reduce(total)
        for _ in range(40):  # more than a ring has envelopes
            got = torch.zeros(count)
            receiving = distributed.irecv(got, 1 - rank)
            distributed.send(torch.full((count,), rank + 1.0), 1 - rank)
            receiving.wait()
            total += got
        results.append([total.unique().tolist(), [part.unique().tolist() for part in parts]])
    return results


def test_results_are_the_same_with_fences(weak: None) -> None:
    with Pool(2) as pool:
        for rank, got in enumerate(pool.run(exchanged)):
            assert got == [[[3.0 + 40 * (2 - rank)], [[1.0], [2.0]]]] * 2
