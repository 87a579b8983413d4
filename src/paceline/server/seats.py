"""Where the workers sit at a server, and which version each of them holds."""

from __future__ import annotations

import dataclasses
import time
from enum import Enum
from typing import Any

from paceline.server.messages import Ask, Cancelled, Enter, Push
from paceline.transport.wire import Wire


class State(Enum):
    """What a worker does, as far as the server knows."""

    COMPUTING = "computing"
    PUSHED = "an update"
    ASKING = "the end of an epoch"
    ENTERING = "the start of an epoch"
    DRAWING = "drawing the order of an epoch"


@dataclasses.dataclass(slots=True)
class Seat:
    """One worker."""

    rank: int
    pid: int
    wire: Wire[Any]
    version: int = 0
    buffer: int = 0
    state: State = State.COMPUTING
    since: float = 0.0
    """When it got into this state."""
    request: Push | Cancelled | Ask | Enter | None = None
    """What it waits for an answer to."""
    outcome: str = ""
    """Of its last push."""

    def into(self, state: State) -> None:
        self.state, self.since = state, time.monotonic()


class Shelf:
    """The buffers of versions: which are held, by how many, and which is free."""

    def __init__(self, buffers: int) -> None:
        self._holders = [0] * buffers
        self.newest = 0
        self.most = 1
        """How many buffers were ever in use at once."""

    def hold(self, buffer: int) -> None:
        self._holders[buffer] += 1

    def release(self, buffer: int) -> None:
        self._holders[buffer] -= 1

    def free(self) -> int:
        """A buffer that nobody holds, and that is not the newest version."""
        for buffer, holders in enumerate(self._holders):
            if not holders and buffer != self.newest:
                self.most = max(self.most, 2 + sum(h > 0 and b != self.newest for b, h in enumerate(self._holders)))
                return buffer
        raise RuntimeError("all buffers of versions are held")  # one more than can be held at once exists
