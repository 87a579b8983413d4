"""Words of shared memory in which the server says what must overtake its messages."""

from __future__ import annotations

from paceline.transport import Memory
from paceline.transport.futex import FutexArray


class SharedFlags:
    """For each worker the oldest version whose gradients can still be used, and whether it shall leave; for all, how
    many there are."""

    def __init__(self, memory: Memory, capacity: int) -> None:
        size = FutexArray.STRIDE * capacity
        self.floors = FutexArray(memory.bytes(0, size), capacity)
        self._leaving = FutexArray(memory.bytes(size, size), capacity)
        self._present = FutexArray(memory.bytes(2 * size, FutexArray.STRIDE), 1)

    @staticmethod
    def memory_size(capacity: int) -> int:
        return FutexArray.STRIDE * (2 * capacity + 1)

    @property
    def present(self) -> int:
        return int(self._present.values[0])

    @present.setter
    def present(self, count: int) -> None:
        self._present.values[0] = count

    def dismiss(self, rank: int) -> None:
        """It shall leave, or as soon as it has come."""
        if 0 <= rank < len(self._leaving.values) // self._leaving.step:
            self._leaving.values[rank * self._leaving.step] = 1

    def stay(self, rank: int) -> None:
        """Whoever has this rank next need not leave."""
        self._leaving.values[rank * self._leaving.step] = 0

    def dismissed(self, rank: int) -> bool:
        return bool(self._leaving.values[rank * self._leaving.step])
