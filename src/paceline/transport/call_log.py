"""The calls of a split model, which all workers of a replica must make together, in shared memory.

Each worker writes down its calls, and that it waits. So a call by one worker alone (`if team.is_lead: evaluate()`) is
found as soon as another one makes another call in its place, or once all workers of the replica wait for each other.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.errors import Mismatch
from paceline.transport.barrier import BarrierNotes
from paceline.transport.memory import Memory
from paceline.transport.step_counter import StepCounter

_LINE = 128
_CALLS, _WAITS, _VERDICT, _RECORDS, _TURNS = 0, 1, 2, 4, 8
"""Words of a worker: its calls, its looks while it waited, the mismatch that it has found, its last calls and turns."""
_KEPT = 4
"""Calls of which there are records."""
COLLECTIVES, UPDATES = 0, 1
"""Turns that workers take together: none begins the turn after the next before all have come to the next."""
_STUCK = 1.0
"""Seconds for which all workers wait before it is said that they wait for each other."""
_LOOKS = 3
"""Looks of another worker in that time by which it is known that it waits."""


class CallLog:
    """One worker's view of the calls of its replica's model."""

    def __init__(self, memory: Memory, rank: int, size: int, replica: Sequence[int]) -> None:
        """replica: the ranks of the workers that share the model."""
        self._words = [memory.bytes(_LINE * other, _LINE).cast("q") for other in range(size)]
        self._rank, self._own = rank, self._words[rank]
        self._others = [other for other in replica if other != rank]
        self._watched: list[tuple[StepCounter | BarrierNotes, str]] = []
        """What looks are taken at, and by which attribute."""
        self._turns = [0, 0]
        self._since = 0.0
        self._seen: list[tuple[int, int]] = []
        """Calls and looks of the others when this worker began to wait in its last call."""

    @staticmethod
    def memory_size(size: int) -> int:
        return _LINE * size

    def begin(self, arguments: Iterable[Any], *, evaluates: bool) -> None:
        """The script calls the model with these arguments, whose shapes must be the same on all workers."""
        number = self._own[_CALLS] + 1
        digest = zlib.crc32(repr([tuple(getattr(one, "shape", ())) for one in arguments]).encode())
        self._own[_RECORDS + number % _KEPT] = number << 33 | evaluates << 32 | digest
        self._own[_CALLS] = number
        self._seen = []  # that the others waited before this call says nothing about it

    def check(self) -> None:
        """Raises Mismatch if another worker has made another call in place of one of this worker's."""
        for other in self._others:
            words = self._words[other]
            for place in range(_RECORDS, _RECORDS + _KEPT):
                own, theirs = self._own[place], words[place]
                if own != theirs and own >> 33 == theirs >> 33:
                    alone = self._rank if own >> 32 & 1 else other
                    self._refuse(alone, other if alone == self._rank else self._rank, own >> 32 != theirs >> 32)

    def check_counts(self) -> None:
        """Raises Mismatch if workers have made unlike numbers of calls; none of them can go on."""
        self.check()
        self._compare({other: self._words[other][_CALLS] for other in (self._rank, *self._others)})

    def begin_turn(self, kind: int) -> None:
        """This worker takes a turn with others, which must have made as many calls."""
        self._turns[kind] += 1
        turn = self._turns[kind]
        self._own[_TURNS + 2 * kind + turn % 2] = turn << 32 | self._own[_CALLS]

    def check_turn(self, kind: int, ranks: Sequence[int] = ()) -> None:
        """Raises Mismatch if one of those that took this turn has made another number of calls.

        ranks: of the workers that take such turns together; by default all of the replica.
        """
        self.check()
        turn = self._turns[kind]
        place, others = _TURNS + 2 * kind + turn % 2, ranks or self._others
        taken = {rank: self._words[rank][place] for rank in (self._rank, *others)}
        self._compare({rank: number & 0xFFFFFFFF for rank, number in taken.items() if number >> 32 == turn})

    def _compare(self, calls: dict[int, int]) -> None:
        """calls: the number of calls of each worker."""
        most, least = max(calls, key=lambda rank: calls[rank]), min(calls, key=lambda rank: calls[rank])
        if calls[most] != calls[least]:
            self._refuse(most, least, self._evaluates(most))

    def watch(self, steps: StepCounter | BarrierNotes) -> None:
        """Looks for mismatches, until `close`, while this worker waits for others to take these steps."""
        if isinstance(steps, StepCounter):
            steps.look = self._look
            self._watched.append((steps, "look"))
        if isinstance(steps, BarrierNotes):
            steps.explain = self.check_counts
            self._watched.append((steps, "explain"))

    def close(self) -> None:
        for steps, name in self._watched:
            delattr(steps, name)
        self._watched.clear()

    def _look(self) -> None:
        """This worker waits for another one, and looks again whether that can come."""
        if threading.current_thread().name.startswith("paceline"):
            return  # a thread that only attends to messages
        self._own[_WAITS] += 1
        for words in self._words:
            if words[_VERDICT]:
                raise _mismatch(words[_VERDICT])
        self.check()
        now = time.monotonic()
        seen = [(words[_CALLS], words[_WAITS]) for words in (self._words[other] for other in self._others)]
        if [calls for calls, _ in seen] != [calls for calls, _ in self._seen] or now - self._since > 2 * _STUCK:
            self._since, self._seen = now, seen
        elif now - self._since >= _STUCK:
            wait = all(looks - before >= _LOOKS for (_, looks), (_, before) in zip(seen, self._seen, strict=True))
            if wait and any(calls != self._own[_CALLS] for calls, _ in seen):
                self.check_counts()

    def _evaluates(self, rank: int) -> bool:
        words = self._words[rank]
        return bool(words[_RECORDS + words[_CALLS] % _KEPT] >> 32 & 1)

    def _refuse(self, alone: int, other: int, evaluates: bool) -> None:
        # All workers raise the same, also those that would find out later.
        self._own[_VERDICT] = verdict = 1 << 60 | evaluates << 50 | alone << 25 | other
        raise _mismatch(verdict)


def _mismatch(verdict: int) -> Mismatch:
    alone, other = verdict >> 25 & 0x1FFFFFF, verdict & 0x1FFFFFF
    how = "to evaluate it, which" if verdict >> 50 & 1 else "in a way that"
    return Mismatch(
        f"rank {alone} calls the model {how} rank {other} does not: the workers of one replica must call a split model "
        "together and with the same batches, so evaluate on all of them, not under `if team.is_lead:`",
        [alone],
    )
