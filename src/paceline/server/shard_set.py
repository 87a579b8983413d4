"""The shards of all servers, as the first server calls them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from typing import Any

from paceline.errors import ServerLost, TeamTimeout
from paceline.parameters.kept_version import KeptVersion
from paceline.server import messages
from paceline.server.journal import Journal
from paceline.server.record import ServerRecord
from paceline.server.shard import Shard
from paceline.transport.unix_connection import Closed, UnixConnection

_LOOK = 0.1
"""Seconds between looks whether a server that was killed is back."""
_MARGIN = 3.0
"""Seconds by which the first server waits longer than relays do, which can say that a server's machine is lost."""


class ShardSet:
    """Runs one operation on all shards at once, and each operation once, whichever of the servers is killed.

    Operations are numbered. A shard's record says how many it has done, so one that is requested again, by a
    coordinator that was started again or from a shard that was, is done by those that have not. The record of a shard
    on another machine is there: it says so when it connects again.
    """

    def __init__(
        self,
        own: Shard,
        others: dict[int, UnixConnection[Any]],
        patience: float,
        journal: Journal,
        back: float,
        remote: Collection[int],
    ) -> None:
        """back: seconds in which a server that was killed is back; remote: numbers of those on other machines."""
        self._own, self._others, self._patience, self._journal, self._back = own, others, patience, journal, back
        self._remote = dict.fromkeys(remote, (0, 0.0))
        """The operations that each of them has done, as far as it has said, and its last answer."""
        self.operations = 0
        """How many there were."""
        self.meet: Callable[[float], None] = lambda _seconds: None
        """Lets a server connect that was started again, for so many seconds."""

    @property
    def size(self) -> int:
        """Bytes of an uncompressed gradient."""
        return self._own.size

    @property
    def collected(self) -> int:
        """Number of the buffer that stands for the sum of the added gradients."""
        return self._own.collected

    @property
    def kept(self) -> KeptVersion:
        """The copy of a version that the shards have made."""
        return self._own.kept

    @property
    def run(self) -> ServerRecord:
        return self._own.run

    def close(self) -> None:
        """Ends the other servers."""
        self.run.state.live = False
        for connection in self._others.values():
            connection.close()

    def attach(self, hello: messages.ShardHello, connection: UnixConnection[Any]) -> None:
        """Takes the connection of another server that was started again, or has lost the first one or its relay."""
        before = self._others.get(hello.index)
        if before is not None:
            before.close()
        self._others[hello.index] = connection
        if hello.index in self._remote:
            self._remote[hello.index] = hello.done, hello.value

    def _done(self, index: int) -> int:
        """The operations that a shard has done."""
        return self._remote[index][0] if index in self._remote else self.run.shards[index].done

    def _value(self, index: int) -> float:
        """Its answer to the last of them."""
        return self._remote[index][1] if index in self._remote else self.run.shards[index].read().value

    def handle(self, request: messages.ShardRequest) -> list[float]:
        """The answers of all shards, this server's first."""
        number, find = 0, isinstance(request, messages.MeasureDistance)
        if not find:
            self.operations = number = self.operations + 1
            find = isinstance(request, messages.ApplyUpdate) and request.norm is not None
        values: list[float] = (
            self._journal.value(lambda: self._run(request, number)) if find else self._run(request, number)
        )
        return values

    def _run(self, request: messages.ShardRequest, operation: int) -> list[float]:
        """Runs an operation on the shards that have not done it; a request that is none has no number."""
        shards = range(len(self.run.shards))
        if self._journal.replaying:
            for index in self._remote:
                self._expect(index)  # it says how much it has done
        if operation and operation <= min(map(self._done, shards)):
            return [self._value(index) for index in shards]
        if operation and self._journal.peek() is not None:
            raise ServerLost("the record of what the server had done is not complete")
        asked = {index: self._ask(index, request, operation) for index in shards[1:]}
        done = operation and self._done(0) >= operation
        values = [self._own.answer() if done else self._own.handle(request)]
        for index, waits in asked.items():
            values.append(self._answer(index, request, operation) if waits else self._value(index))
        return values

    def _ask(self, index: int, request: messages.ShardRequest, operation: int) -> bool:
        """Sends a request to another server, unless it has done it; True if it will answer."""
        if operation and self._done(index) >= operation:
            return False
        try:
            self._others[index].send(request)
        except (KeyError, Closed):  # it has not connected since this server was started again, or was killed itself
            self._raise_reason(index)
            return self._again(index, request, operation)
        return True

    def _raise_reason(self, index: int) -> None:
        """Raises what a relay has said about the loss of a server's machine, before it closed the connection."""
        with contextlib.suppress(KeyError, Closed):
            said = self._others[index].receive_within(0)
            if isinstance(said, messages.RunFailed):
                raise ServerLost(said.message)

    def _again(self, index: int, request: messages.ShardRequest, operation: int) -> bool:
        """Waits until another server is back, and sends it the request if it has not done it."""
        while True:
            before = self._others.pop(index, None)
            if before is not None:
                before.close()
            self._expect(index)
            if operation and self._done(index) >= operation:
                return False
            with contextlib.suppress(Closed):
                self._others[index].send(request)
                return True

    def _expect(self, index: int) -> None:
        """Waits until another server is back."""
        until, comes = time.monotonic() + self._back, self.run.state
        while index not in self._others:
            if time.monotonic() > until or not (comes.relayed if index in self._remote else comes.live):
                raise ServerLost(f"server {index}, which holds a shard of the parameters, died")
            self.meet(_LOOK)

    def _answer(self, index: int, request: messages.ShardRequest, operation: int) -> float:
        while True:
            try:
                answer = self._others[index].receive_within(self._patience + _MARGIN)
            except Closed:
                if not self._again(index, request, operation):
                    return self._value(index)
                continue
            if answer is None:
                raise TeamTimeout(f"server {index} did not answer in {self._patience:g} s")
            if isinstance(answer, messages.RunFailed):
                raise ServerLost(answer.message if answer.ranks else f"server {index} failed: {answer.message}")
            assert isinstance(answer, messages.ShardAnswer)
            if operation and index in self._remote:
                self._remote[index] = operation, answer.value
            return answer.value
