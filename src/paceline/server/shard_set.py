"""The shards of all servers, as the first server calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.errors import ServerLost, TeamTimeout
from paceline.server.messages import (
    AddGradient,
    ApplyUpdate,
    MeasureDistance,
    ReloadState,
    RunFailed,
    ShardAnswer,
)
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

    def add(self, message: AddGradient) -> None:
        self._all(message, lambda: self._own.add(message))

    def apply(self, message: ApplyUpdate) -> list[float]:
        if not self._others:
            return [self._own.apply(message)]
        return self._all(message, lambda: self._own.apply(message))

    def distance(self, message: MeasureDistance) -> float:
        return sum(self._all(message, lambda: self._own.distance(message)))

    def reload(self) -> None:
        self._all(ReloadState(), self._own.reload)

    def close(self) -> None:
        """Ends the other servers."""
        for connection in self._others.values():
            connection.close()

    def _all(
        self, message: AddGradient | ApplyUpdate | MeasureDistance | ReloadState, own: Callable[[], float | None]
    ) -> list[float]:
        for index, connection in self._others.items():
            self._try(index, lambda connection=connection: connection.send(message))  # type: ignore[misc]
        values = [own() or 0.0]
        for index, connection in self._others.items():
            answer = self._try(index, lambda connection=connection: connection.receive_within(self._patience))  # type: ignore[misc]
            if answer is None:
                raise TeamTimeout(f"server {index} did not answer in {self._patience:g} s")
            if isinstance(answer, RunFailed):
                raise ServerLost(f"server {index} failed: {answer.message}")
            assert isinstance(answer, ShardAnswer)
            values.append(answer.value)
        return values

    def _try(self, index: int, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Closed:
            raise ServerLost(f"server {index}, which holds a shard of the parameters, died") from None
