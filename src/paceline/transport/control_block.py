"""A board on which the members of a group write before each step, and which all read after it.

A member has two places on it, used in turns: a row of numbers that say what it does and offers, and a slot for data
that is small enough to be copied there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.config import Timeouts
from paceline.errors import TeamError
from paceline.transport.memory import Memory
from paceline.transport.step_counter import StepCounter, Topic


class ControlBlock(StepCounter):
    """One member's view of the board."""

    SLOT = 128 * 1024
    """Bytes that fit into a slot. Larger data is quicker read where it lies."""

    def __init__(self, memory: Memory, rank: int, size: int, timeouts: Timeouts, say: Callable[[str], None]) -> None:
        super().__init__(memory, rank, size, timeouts, say)
        start, row = self.fixed_size(size), _row(size)
        self._rows = [
            [memory.bytes(start + row * (parity * size + peer), row).cast("Q") for peer in range(size)]
            for parity in (0, 1)
        ]
        self._slots_start = start + 2 * size * row
        self._memory = memory
        self.rows = self._rows[0]
        """Everybody's numbers of the last step."""

    @classmethod
    def memory_size(cls, size: int) -> int:
        return cls.fixed_size(size) + 2 * size * (_row(size) + cls.SLOT)

    @property
    def turn(self) -> int:
        """Which of the two places is this member's for the next step."""
        return (self._count + 1) & 1

    @property
    def row(self) -> memoryview:
        """Where to write this member's numbers for the next step."""
        return self._rows[(self._count + 1) & 1][self.rank]

    def slot(self, turn: int, rank: int, count: int, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """Elements in the slot of a member."""
        return self._memory.tensor(self._slots_start + self.SLOT * (turn * self.size + rank) + offset, count, dtype)

    def agree(self, signature: int, topic: Topic, spin: bool) -> bool:
        """Take the next step with a number; whether all others came with the same. Then `rows` is what all wrote."""
        rows = self.rows = self._rows[(self._count + 1) & 1]
        rows[self.rank][0] = signature
        self.come(topic, spin)
        for row in rows:  # noqa: SIM110  (a generator would take longer)
            if row[0] != signature:
                return False
        return True

    def finish(self, topic: Topic, spin: bool = True) -> None:
        """Take the last step of something in which members looked at each other's memory.

        Who has given up may have used its memory for something else by the time that others looked at it.
        """
        self.come(topic, spin)
        for rank in self._peers:
            if self.failed(rank):
                raise TeamError(
                    f"{self.called([rank])} {self.gone(rank)} in the middle of {topic.spoken}", [self.ranks[rank]]
                )


def _row(size: int) -> int:
    """Bytes of a member's numbers: a few for all, and some for each member."""
    return -(-8 * (8 + 5 * size) // 4096) * 4096
