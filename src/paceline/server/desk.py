"""A worker's side of the conversation with the server."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from paceline import errors
from paceline.config import Timeouts
from paceline.errors import JoinError, ServerLost, TeamError, TeamTimeout
from paceline.server.messages import Bye, Failed, Hello, Ready, Reduce, Reduced, ToWorker, send_parts
from paceline.transport.futex import Words
from paceline.transport.wire import Closed, Wire, connect

_MARGIN = 5.0
"""Seconds by which a worker is more patient than the server, who knows better who is late."""
_LINGER = 0.0005
"""Seconds to look for an answer before sleeping until it comes."""
_LOOK = 0.5
"""Seconds between looks at whether the server lives, while a worker sleeps on purpose."""


class Desk:
    """Asks, and waits for the answer."""

    def __init__(self, address: str, rank: int, floors: Words, timeouts: Timeouts) -> None:
        self._rank, self._floors, self._timeouts = rank, floors, timeouts
        self._wire: Wire[Any] = connect(address, ToWorker, timeouts.join)
        self._wire.patience(timeouts.meeting + _MARGIN)
        self._place = rank * floors.step
        self.reduce: Callable[[Reduce], None] = lambda _message: None
        """Sums this worker's part of its group's gradient, when it is asked to."""
        self._closed = False

    def introduce(self, plan: int, descriptors: list[int]) -> Wire[Any]:
        self._wire.send(Hello(self._rank, os.getpid(), plan), descriptors)
        return self._wire

    def wait_until_ready(self) -> None:
        try:
            answer = self._wire.receive_within(self._timeouts.join)
        except Closed:
            raise ServerLost("the server died while it started") from None
        if isinstance(answer, Failed):
            raise _error(answer)
        if not isinstance(answer, Ready):
            raise JoinError(f"the server was not ready within {self._timeouts.join:g} s")

    def tell(self, message: msgspec.Struct) -> None:
        """Say something that needs no answer."""
        try:
            self._wire.send(message)
        except Closed:
            raise self._lost() from None

    def call(self, message: msgspec.Struct) -> Any:
        """Say something, and wait for the answer."""
        try:
            self._wire.send(message)
            return self._answer()
        except Closed:
            raise self._lost() from None

    def call_in_parts(self, data: bytes) -> Any:
        """Say something that may be longer than a message, and wait for the answer."""
        try:
            send_parts(self._wire, data)
            return self._answer()
        except Closed:
            raise self._lost() from None

    def _answer(self) -> Any:
        while True:
            self._wire.linger(_LINGER)
            try:
                answer = self._wire.receive()
            except TimeoutError:
                waited = self._timeouts.meeting + _MARGIN
                raise TeamTimeout(f"the server did not answer rank {self._rank} in {waited:g} s") from None
            if isinstance(answer, Reduce):
                self.reduce(answer)
                self._wire.send(Reduced())
            elif isinstance(answer, Failed):
                raise _error(answer)
            else:
                return answer

    def _lost(self) -> TeamError:
        # It may have said why before it ended.
        try:
            while (answer := self._wire.receive_within(0)) is not None:
                if isinstance(answer, Failed):
                    return _error(answer)
        except Closed:
            pass
        return ServerLost("the server, which holds the parameters, died")

    def cancelled(self, version: int) -> bool:
        """Whether a gradient of this version can no longer be used."""
        return bool(self._floors.values[self._place] > version)

    def cancelled_at(self) -> float:
        """When this worker was last cancelled, by the clock that all processes of a machine share."""
        return self._floors.stamped(self._rank)

    def sleep(self, seconds: float, version: int | None) -> bool:
        """Sleep so long, or until a gradient of this version can no longer be used; whether that was so."""
        until = time.perf_counter() + seconds
        words, place = self._floors, self._place
        while (left := until - time.perf_counter()) > 0:
            seen = words.values[place]
            if version is not None and seen > version:
                return True
            words.sleep(self._rank, seen, min(left, _LOOK))
            if left > _LOOK and not self._wire.open:
                raise self._lost()
        return version is not None and bool(words.values[place] > version)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with contextlib.suppress(Closed):
                self._wire.send(Bye())
            self._wire.close()


def _error(failed: Failed) -> TeamError:
    kind = getattr(errors, failed.kind, TeamError)
    if not (isinstance(kind, type) and issubclass(kind, TeamError)):
        kind = TeamError
    return kind(failed.message, failed.ranks)
