"""A block of shared memory that members of a group write before each step, and that all read after it.

Each member has two places in it, used in turns: a row of numbers that describe its operation, and a slot for data small
enough to be copied there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.config import Timeouts
from paceline.errors import TeamError
from paceline.transport.memory import Memory
from paceline.transport.step_counter import StepCounter, Topic


class ControlBlock(StepCounter):
    """One member's view of the block."""

    SLOT = 128 * 1024
    """Bytes of a slot. Larger data is faster to read where it lies."""

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
        """The numbers of all members at the last step."""

    @classmethod
    def memory_size(cls, size: int) -> int:
        return cls.fixed_size(size) + 2 * size * (_row(size) + cls.SLOT)

    @property
    def turn(self) -> int:
        """The index of this member's place for the next step."""
        return (self._count + 1) & 1

    @property
    def row(self) -> memoryview:
        """This member's numbers for the next step, to be written."""
        return self._rows[(self._count + 1) & 1][self.rank]

    def slot(self, turn: int, rank: int, count: int, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """Elements in the slot of a member."""
        return self._memory.tensor(self._slots_start + self.SLOT * (turn * self.size + rank) + offset, count, dtype)

    def agree(self, signature: int, topic: Topic, spin: bool) -> bool:
        """Takes the next step with a number; True if all others came with the same. `rows` then has all rows."""
        rows = self.rows = self._rows[(self._count + 1) & 1]
        rows[self.rank][0] = signature
        self.come(topic, spin)
        for row in rows:  # noqa: SIM110  (a generator would take longer)
            if row[0] != signature:
                return False
        return True

    def finish(self, topic: Topic, spin: bool = True) -> None:
        """Takes the last step of an operation in which members read each other's memory.

        A member that gave up may have reused its memory before others read it.
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
