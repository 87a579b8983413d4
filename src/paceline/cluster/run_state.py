"""A run's memory as its launcher keeps it, so that a server which is killed can be started again."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from paceline.cluster.process import is_alive
from paceline.transport.memory import Memory

_KEPT, _LIVE, _GIVEN_UP = range(3)
_RELAYED, _KEEPER = 5, 6
"""Places of the words; those between are the record's own."""
_ENDED = 2
_MOST = 5
"""Processes that may be started again within `_SOON`."""
_SOON = 60.0
"""Seconds in which so many deaths have one cause, which would kill the next one, too."""


class RunState:
    """Words about a run that its launcher, its servers and its workers share, at the start of the run's record."""

    def __init__(self, memory: Memory) -> None:
        self._words = memory.bytes(0, 64).cast("q")

    @property
    def kept(self) -> bool:
        """True if a server that is killed is started again."""
        return self._words[_KEPT] == 1

    def keep(self) -> None:
        """This process starts servers again that are killed."""
        self._words[_KEPT], self._words[_KEEPER] = 1, os.getpid()

    @property
    def live(self) -> bool:
        """True from when the first server serves until the run is over: then a killed one comes back."""
        keeper = self._words[_KEEPER]
        return self._words[_LIVE] == 1 and not self._words[_GIVEN_UP] and (not keeper or is_alive(keeper))

    @live.setter
    def live(self, value: bool) -> None:
        self._words[_LIVE] = int(value)

    def give_up(self) -> None:
        """No server is started again any more."""
        self._words[_GIVEN_UP] = 1

    @property
    def relayed(self) -> bool:
        """True from when this machine's relay serves until it ends: then one that is killed comes back."""
        return self._words[_RELAYED] == 1

    @relayed.setter
    def relayed(self, value: bool) -> None:
        self._words[_RELAYED] = int(value)

    def end_relay(self) -> None:
        """This machine's relay ends by itself, as the run is over."""
        self._words[_RELAYED] = _ENDED

    @property
    def relay_ended(self) -> bool:
        """True if it has; else it was killed, and does not come back."""
        return self._words[_RELAYED] == _ENDED


class Restarts:
    """How often processes were started again within a while."""

    def __init__(self) -> None:
        self._moments: list[float] = []

    def allowed(self) -> bool:
        """True if one more may be started now, which counts from then on."""
        now = time.monotonic()
        self._moments = [moment for moment in self._moments if now - moment < _SOON]
        if len(self._moments) >= _MOST:
            return False
        self._moments.append(now)
        return True


class KeptMemory:
    """The descriptors of a run's memory, and how often its servers were started again."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []
        self._state: RunState | None = None
        self._restarts = Restarts()

    def keep(self, descriptors: Sequence[int]) -> None:
        """Keeps this memory, whose last part is the run's record, instead of another."""
        self.close()
        self.descriptors, self._restarts = list(descriptors), Restarts()
        self._state = RunState(Memory(descriptors[-1], 4096))
        self._state.keep()

    def may_restart(self) -> bool:
        """True if a server that was killed can be started again; if not, nobody waits for it any more."""
        state = self._state
        if state is None or not state.live or not self._restarts.allowed():
            self.give_up()
            return False
        return True

    def give_up(self) -> None:
        if self._state is not None:
            self._state.give_up()

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors, self._state = [], None
