"""Futexes: sleeping until a word of shared memory changes, by Linux's system call, which Python does not offer.

A word has one writer, so no atomic arithmetic is needed: the kernel itself compares the word with the value that the
sleeper saw, so a change between looking and sleeping cannot be missed.
"""

from __future__ import annotations

import ctypes
import platform
import sys

from paceline.errors import JoinError
from paceline.transport import fence

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE = ctypes.c_long(0), ctypes.c_long(1)
_EVERYBODY = ctypes.c_long(2**31 - 1)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class FutexArray:
    """32-bit words, one per member, a cache line apart; each is written by its own member only."""

    STRIDE = 64

    def __init__(self, memory: memoryview, count: int) -> None:
        number = _NUMBERS.get(platform.machine())
        if sys.platform != "linux" or number is None:
            raise JoinError(
                f"several workers on one machine need Linux on one of {', '.join(_NUMBERS)}; "
                f"this is {sys.platform} on {platform.machine()}"
            )
        self.values = memory[: self.STRIDE * count].cast("I")
        self.step = self.STRIDE // 4
        self._moments = memory[: self.STRIDE * count].cast("d")
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._addresses = [ctypes.c_void_p(base + self.STRIDE * index) for index in range(count)]
        self._number = ctypes.c_long(number)
        self._sleep = ctypes.CDLL(None).syscall  # gives the interpreter lock away while it sleeps
        self._call = ctypes.PyDLL(None).syscall  # keeps it: waking takes well under a microsecond

    def write(self, index: int, value: int) -> None:
        """Sets a word and wakes its sleepers, which see all that was written before."""
        if fence.WEAK:
            fence.fence()
        self.values[index * self.step] = value
        self._call(self._number, self._addresses[index], _WAKE, _EVERYBODY)

    def stamp(self, index: int, moment: float) -> None:
        """Records the time of a change beside a word, before the change."""
        self._moments[index * self.STRIDE // 8 + 1] = moment

    def stamped(self, index: int) -> float:
        """The time of a word's last change."""
        return float(self._moments[index * self.STRIDE // 8 + 1])

    def sleep(self, index: int, seen: int, seconds: float) -> None:
        """Sleeps while the word is `seen`, at most so many seconds. May return early: look again."""
        whole = int(seconds)
        limit = _Timespec(whole, int((seconds - whole) * 1e9))
        self._sleep(self._number, self._addresses[index], _WAIT, ctypes.c_long(seen), ctypes.byref(limit))
