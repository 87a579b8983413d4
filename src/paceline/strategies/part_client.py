"""The connection of one worker of a replica that is on several machines to the relay of its machine."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.config import Timeouts
from paceline.errors import ServerLost, TeamTimeout, error_from
from paceline.relay.part_messages import HoldParameters, PartDone, PartHello, PullPart, PushPart
from paceline.server.messages import RunFailed
from paceline.transport.unix_connection import Closed, UnixConnection, connect

_MARGIN = 5.0
"""Seconds by which a worker waits longer than the server, which can name the worker that is late."""


class PartClient:
    """Sends this worker's part of gradients, and gets its part of versions."""

    def __init__(self, address: str, rank: int, timeouts: Timeouts) -> None:
        self._rank, self._patience = rank, timeouts.barrier + _MARGIN
        self._connection: UnixConnection[Any] = connect(address, PartDone | RunFailed, timeouts.join)
        self._connection.patience(self._patience)
        self._connection.send(PartHello(rank))

    def hold(self, parameters: Sequence[int]) -> None:
        """This worker computes with these parameters from now on."""
        self._call(HoldParameters(tuple(parameters)))

    def push(self, parameters: Sequence[int]) -> None:
        """Sends these parameters' gradients; all servers have them when it returns."""
        self._call(PushPart(tuple(parameters)))

    def pull(self, buffer: int, version: int) -> None:
        """Waits until this worker's part of a version is here."""
        self._call(PullPart(buffer, version))

    def _call(self, message: msgspec.Struct) -> None:
        try:
            self._connection.send(message)
            answer = self._connection.receive()
        except TimeoutError:
            raise TeamTimeout(f"the servers did not answer rank {self._rank} in {self._patience:g} s") from None
        except Closed:
            raise ServerLost(
                f"the relay of its machine, through which rank {self._rank} reaches the server, died"
            ) from None
        if isinstance(answer, RunFailed):
            raise error_from(answer.kind, answer.message, answer.ranks)

    def close(self) -> None:
        with contextlib.suppress(Closed):
            self._connection.close()
