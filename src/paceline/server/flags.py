"""Flags in shared memory that reach a worker before the server's messages do."""

from __future__ import annotations

from paceline.transport import Memory
from paceline.transport.futex import FutexArray


class SharedFlags:
    """Each worker's oldest usable version and its dismissal, the number of workers, and the versions marked
    and gathered last."""

    def __init__(self, memory: Memory, capacity: int) -> None:
        size = FutexArray.STRIDE * capacity
        self.min_version = FutexArray(memory.bytes(0, size), capacity)
        """Per worker, the oldest version whose gradients can still be used."""
        self._dismissed = FutexArray(memory.bytes(size, size), capacity)
        self._present = FutexArray(memory.bytes(2 * size, FutexArray.STRIDE), 1)
        self._marked = FutexArray(memory.bytes(2 * size + FutexArray.STRIDE, FutexArray.STRIDE), 1)
        self._left = FutexArray(memory.bytes(2 * (size + FutexArray.STRIDE), size), capacity)
        self._gathered = FutexArray(memory.bytes(3 * size + 2 * FutexArray.STRIDE, FutexArray.STRIDE), 1)

    @staticmethod
    def memory_size(capacity: int) -> int:
        return FutexArray.STRIDE * (3 * capacity + 3)

    @property
    def marked(self) -> int:
        """One more than the version that was last marked for a snapshot; 0 before the first."""
        return int(self._marked.values[0])

    @marked.setter
    def marked(self, number: int) -> None:
        self._marked.values[0] = number

    @property
    def gathered(self) -> int:
        """The number of the last snapshot whose copy the relay has fetched from all machines."""
        return int(self._gathered.values[0])

    @gathered.setter
    def gathered(self, number: int) -> None:
        self._gathered.values[0] = number

    @property
    def present(self) -> int:
        """Workers that are present."""
        return int(self._present.values[0])

    @present.setter
    def present(self, count: int) -> None:
        self._present.values[0] = count

    def cancel(self, rank: int, version: int, now: float) -> None:
        """Cancels a worker's step if it computes on a version older than this one."""
        before = int(self.min_version.values[rank * self.min_version.step])
        if (before - version) & 0xFFFFFFFF < 1 << 31 and before:
            return  # it was cancelled before the server was killed, which does the same again
        self.min_version.stamp(rank, now)
        self.min_version.write(rank, version & 0xFFFFFFFF)

    def dismiss(self, rank: int) -> None:
        """Asks a worker to leave; one that is not there yet, as soon as it has joined."""
        if 0 <= rank < len(self._dismissed.values) // self._dismissed.step:
            self._dismissed.values[rank * self._dismissed.step] = 1

    def clear_dismissal(self, rank: int) -> None:
        """Lets the next worker of this rank stay."""
        self._dismissed.values[rank * self._dismissed.step] = 0

    def leave(self, rank: int, pid: int) -> None:
        """A worker leaves on purpose; the server may be away, and cannot be told."""
        self._left.values[rank * self._left.step] = pid

    def has_left(self, rank: int, pid: int) -> bool:
        """True if the worker of this rank that is this process has left on purpose."""
        return int(self._left.values[rank * self._left.step]) == pid

    def dismissed(self, rank: int) -> bool:
        return bool(self._dismissed.values[rank * self._dismissed.step])
