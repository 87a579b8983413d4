"""The shards of all servers, as the first server calls them."""

from __future__ import annotations

from typing import Any

from paceline.errors import ServerLost, TeamTimeout
from paceline.server.messages import RunFailed, ShardAnswer, ShardRequest
from paceline.server.shard import Shard
from paceline.transport.unix_connection import Closed, UnixConnection


class ShardSet:
    """Runs one operation on all shards at once."""

    def __init__(self, own: Shard, others: dict[int, UnixConnection[Any]], patience: float) -> None:
        self._own, self._others, self._patience = own, others, patience

    @property
    def size(self) -> int:
        """Bytes of an uncompressed gradient."""
        return self._own.size

    @property
    def collected(self) -> int:
        """Number of the buffer that stands for the sum of the added gradients."""
        return self._own.collected

    def close(self) -> None:
        """Ends the other servers."""
        for connection in self._others.values():
            connection.close()

    def handle(self, request: ShardRequest) -> list[float]:
        """The answers of all shards, this server's first."""
        try:
            for index, connection in self._others.items():  # noqa: B007  (an error names it)
                connection.send(request)
            values = [self._own.handle(request)]
            for index, connection in self._others.items():
                answer = connection.receive_within(self._patience)
                if answer is None:
                    raise TeamTimeout(f"server {index} did not answer in {self._patience:g} s")
                if isinstance(answer, RunFailed):
                    raise ServerLost(f"server {index} failed: {answer.message}")
                assert isinstance(answer, ShardAnswer)
                values.append(answer.value)
        except Closed:
            raise ServerLost(f"server {index}, which holds a shard of the parameters, died") from None
        return values
