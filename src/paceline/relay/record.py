"""What a relay must know to go on with the work of one that was killed, in memory that outlives it.

It is little, because a conversation belongs to its ends: a worker and the coordinator count their messages, and repeat
what the other has not received, and a transfer that is not confirmed is begun again.
"""

from __future__ import annotations

import mmap

import msgspec

from paceline.relay.messages import RelayAddress

_HALF = 1 << 20
"""Bytes of each of the two places of the state, at most."""


class RelayState(msgspec.Struct):
    """All that a relay must know beside the run's spec and memory."""

    members: dict[int, int] = {}
    """The workers (and below 0, servers) of this machine that are connected, with their processes."""
    gone: dict[int, bool] = {}
    """Those that have ended; True if on purpose."""
    sessions: list[int] = []
    """On the coordinator's machine, all members that it has a session with."""
    moved: dict[int, int] = {}
    """By worker that has joined later, its machine."""
    joined: dict[int, RelayAddress] = {}
    """By machine that has joined later, its relay."""
    bases: dict[str, int] = {}
    left: dict[str, int] = {}
    """As of `StreamForwarder`."""
    places: int = 0
    """Machines that were given places."""
    finished: list[int] = []
    """Machines that have sent their last message."""


class RelayRecord:
    """The state, in memory that a relay shares with the process that starts it again."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096 + 2 * _HALF)
        self._words = memoryview(self._memory)[:64].cast("q")
        self.state = RelayState()

    def read(self) -> None:
        """Takes the state that was saved last."""
        place = self._words[0]
        size = self._words[1 + place]
        if size:
            at = 4096 + place * _HALF
            self.state = msgspec.msgpack.decode(self._memory[at : at + size], type=RelayState)

    def save(self) -> None:
        """Saves the state as it is now, as a whole."""
        data = msgspec.msgpack.encode(self.state)
        place = 1 - self._words[0]
        at = 4096 + place * _HALF
        self._memory[at : at + len(data)] = data
        self._words[1 + place] = len(data)
        self._words[0] = place
