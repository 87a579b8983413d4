"""Workers of a replica that wait for each other are told apart from workers of which one is a little later."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import Mismatch
from paceline.transport import Memory, call_log
from paceline.transport.call_log import CallLog


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Replica:
    """Two workers, each with its view of the calls of their model."""

    def __init__(self, clock: Clock) -> None:
        memory = Memory.create(CallLog.memory_size(2))
        self._clock = clock
        self.first, self.second = (CallLog(memory, rank, 2, [0, 1]) for rank in range(2))

    def call(self, *workers: CallLog) -> None:
        for worker in workers:
            worker.begin([torch.ones(4, 2)], evaluates=False)

    def wait(self, seconds: float) -> None:
        """Both wait for so long, and look for each other ten times a second."""
        for _ in range(round(seconds * 10)):
            self._clock.now += 0.1
            self.first._look()
            self.second._look()


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Replica:
    clock = Clock()
    monkeypatch.setattr(call_log, "time", clock)
    return Replica(clock)


def test_workers_that_wait_for_each_other_at_unlike_calls_are_told(replica: Replica) -> None:
    replica.call(replica.first, replica.second)
    replica.call(replica.first)
    with pytest.raises(Mismatch, match="rank 0 calls the model in a way that rank 1 does not"):
        replica.wait(2.5)
    for worker in (replica.first, replica.second):
        with pytest.raises(Mismatch, match="rank 0 calls the model"):
            worker._look()


def test_a_worker_that_begins_its_call_after_a_long_wait_of_all_is_not_taken_for_one_that_never_does(
    replica: Replica,
) -> None:
    for _ in range(4):
        replica.call(replica.first, replica.second)
        replica.wait(1.5)  # both, for an update, say
        replica.call(replica.first)
        replica.first._look()
        replica.call(replica.second)
        replica.wait(0.5)
