"""What the kernel counts of a thread while it computes: time on a core, time in the queue for one, faults, reads."""

from __future__ import annotations

import gc
import os
import resource
import threading
import time
import weakref

import msgspec

_APART = 4e-3
"""Seconds between two readings, at least: each costs some 3 µs, and a step may take 200."""


class KernelCounts(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Counts of one thread over a span of time."""

    seconds: float = 0.0
    """Length of the span. Short steps share one: it began where the last one of the same worker ended."""
    running: float = 0.0
    """Seconds on a core."""
    queued: float = 0.0
    """Seconds in which it could run, but waited for a core."""
    system: float = 0.0
    """Seconds of `running` in the kernel."""
    collecting: float = 0.0
    """Seconds of Python's garbage collection, of all threads of the process."""
    faults: int = 0
    """Page faults that needed no reading: memory that was mapped anew."""
    major: int = 0
    """Page faults that read from storage."""
    read: int = 0
    """Bytes read from storage."""
    voluntary: int = 0
    """Times that it gave its core up, to wait or to sleep."""
    involuntary: int = 0
    """Times that its core was given to another thread."""


class KernelMeter:
    """Reads the counts of the thread that calls it. Where the system does not count something, it is 0."""

    def __init__(self) -> None:
        self._thread = -1
        self._file: int | None = None
        """Of the scheduler's times of this thread."""
        self._close: weakref.finalize[..., KernelMeter] | None = None
        self._collections: _Collections | None = None
        self._moment = 0.0
        """The time of the last reading."""
        self._running = self._queued = 0
        """Nanoseconds."""
        self._usage: resource.struct_rusage
        self._collected = 0.0

    def begin(self) -> None:
        """A span begins, unless the last reading is so fresh that it can go on from there."""
        now = time.perf_counter()
        if now - self._moment >= _APART:
            self._read(now)

    def counts(self) -> KernelCounts | None:
        """The counts since the last span's end, or a later `begin`; None if that is so short that the span goes on."""
        now = time.perf_counter()
        if now - self._moment < _APART or threading.get_ident() != self._thread:
            return None
        moment, running, queued = self._moment, self._running, self._queued
        usage, collected = self._usage, self._collected
        self._read(now)
        new = self._usage
        return KernelCounts(
            round(now - moment, 6),
            (self._running - running) // 1000 / 1e6,
            (self._queued - queued) // 1000 / 1e6,
            round(new.ru_stime - usage.ru_stime, 6),
            round(self._collected - collected, 6),
            new.ru_minflt - usage.ru_minflt,
            new.ru_majflt - usage.ru_majflt,
            (new.ru_inblock - usage.ru_inblock) * 512,
            new.ru_nvcsw - usage.ru_nvcsw,
            new.ru_nivcsw - usage.ru_nivcsw,
        )

    def _read(self, now: float) -> None:
        if threading.get_ident() != self._thread:
            self._open()
        self._moment = now
        self._running = time.thread_time_ns()
        if self._file is not None:
            self._queued = int(os.pread(self._file, 96, 0).split()[1])  # the first one is only exact at a tick
        self._usage = resource.getrusage(resource.RUSAGE_THREAD)
        if self._collections is not None:
            self._collected = self._collections.seconds

    def _open(self) -> None:
        """Begins to read the counts of this thread."""
        self._thread = threading.get_ident()
        if self._close is not None:
            self._close()
        self._file = self._close = None
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            pass
        else:
            self._close = weakref.finalize(self, os.close, self._file)
        if self._collections is None:
            self._collections = _Collections()
            gc.callbacks.append(self._collections)
            weakref.finalize(self, gc.callbacks.remove, self._collections)


class _Collections:
    """Measures garbage collections."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._began
