"""Operations of process groups, as one worker sees them: its call, the waits for them, their end."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

import torch

from paceline.events import Collective, Peers
from paceline.events.recorder import Recorder
from paceline.observation.steps import ScriptSteps


class Operation:
    """One operation, from its call. As a context it is a wait for its end."""

    __slots__ = ("_since", "blocked", "bytes", "channel", "end", "future", "name", "number", "start", "steps")

    def __init__(self, steps: ScriptSteps, name: str, channel: str, number: int, size: int) -> None:
        """size: bytes."""
        self.steps, self.name, self.channel, self.number, self.bytes = steps, name, channel, number, size
        self.start = self._since = time.perf_counter()
        self.end: float | None = None
        self.blocked = 0.0
        self.future = False
        """True if somebody waits for its future, of which we are not told."""

    def finish(self) -> None:
        """It is done."""
        if self.end is None:
            self.end = time.perf_counter()

    def block(self, since: float) -> None:
        """The worker could only wait, from then until it was done."""
        assert self.end is not None
        since = max(since, self.start)
        if self.end > since and not self.blocked:
            self.blocked = self.end - since
            self.steps.left_out(since, self.end)

    def __enter__(self) -> Self:
        self._since = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()
        self.block(self._since)


class Operations:
    """Numbers the operations of each channel, and records them when they are over."""

    def __init__(self, recorder: Recorder, steps: ScriptSteps, rank: int) -> None:
        self._recorder, self._steps, self._rank = recorder, steps, rank
        self._numbers: Counter[str] = Counter()
        self._open: list[Operation] = []
        self._lock = threading.Lock()
        steps.after_backward = self._after_backward

    def begin(self, name: str, channel: str, ranks: Sequence[int], size: int) -> Operation:
        """The worker calls an operation of a channel between these workers; size: bytes."""
        with self._lock:
            number = self._numbers[channel]
            self._numbers[channel] = number + 1
            operation = Operation(self._steps, name, channel, number, size)
            self._open.append(operation)
        if not number:  # without the lock, which `settle` takes where this is written at once
            self._recorder.add(Peers(self._rank, operation.start, channel, list(ranks)))
            self._steps.watch_pipelines()
        return operation

    def _after_backward(self, since: float) -> None:
        """A backward pass that began then has returned: it waited for the last operation that it began itself."""
        for one in reversed(self._open):
            if one.start < since:
                return
            if one.future and one.end is not None:
                one.block(one.start)
                return

    def settle(self, everything: bool = False) -> None:
        """Records the operations that are over; `everything`: also those of which no end was seen."""
        with self._lock:
            over = [one for one in self._open if everything or one.end is not None]
            self._open = [one for one in self._open if not everything and one.end is None]
        for one in over:
            seconds = 0.0 if one.end is None else one.end - one.start
            self._recorder.add(
                Collective(self._rank, one.start, seconds, one.name, one.channel, one.number, one.bytes, one.blocked)
            )


def size_of(arguments: Sequence[Any]) -> int:
    """Bytes of an operation's tensors: of its inputs or its outputs, whichever are more."""
    most = 0
    for argument in arguments:
        if isinstance(argument, torch.Tensor | list | tuple):
            most = max(most, _size(argument))
    return most


def _size(argument: Any) -> int:
    if isinstance(argument, torch.Tensor):
        return argument.nbytes
    size = 0
    if isinstance(argument, list | tuple):
        for one in argument:
            size += _size(one)
    return size
