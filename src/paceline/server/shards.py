"""All shards of a run, seen from the first server: its own, and those of further servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.errors import ServerLost, TeamTimeout
from paceline.server.messages import Add, Answer, Apply, Distance, Failed, Ready, Reload
from paceline.server.shard import Shard
from paceline.transport.wire import Closed, Wire


class Shards:
    """Does the same on every shard at once."""

    def __init__(self, own: Shard, others: dict[int, Wire[Any]], patience: float) -> None:
        self._own, self._others, self._patience = own, others, patience

    @property
    def size(self) -> int:
        """Bytes of a gradient as it is."""
        return self._own.size

    @property
    def collected(self) -> int:
        """The source that stands for what was added."""
        return self._own.collected

    def add(self, message: Add) -> None:
        self._all(message, lambda: self._own.add(message))

    def apply(self, message: Apply) -> list[float]:
        if not self._others:
            return [self._own.apply(message)]
        return self._all(message, lambda: self._own.apply(message))

    def distance(self, message: Distance) -> float:
        return sum(self._all(message, lambda: self._own.distance(message)))

    def reload(self) -> None:
        self._all(Reload(), self._own.reload)

    def ready(self) -> None:
        for wire in self._others.values():
            wire.send(Ready())

    def close(self) -> None:
        """The run is over for all of them."""
        for wire in self._others.values():
            wire.close()

    def _all(self, message: Add | Apply | Distance | Reload, own: Callable[[], float | None]) -> list[float]:
        for index, wire in self._others.items():
            self._try(index, lambda wire=wire: wire.send(message))  # type: ignore[misc]
        values = [own() or 0.0]
        for index, wire in self._others.items():
            answer = self._try(index, lambda wire=wire: wire.receive_within(self._patience))  # type: ignore[misc]
            if answer is None:
                raise TeamTimeout(f"server {index} did not answer in {self._patience:g} s")
            if isinstance(answer, Failed):
                raise ServerLost(f"server {index} failed: {answer.message}")
            assert isinstance(answer, Answer)
            values.append(answer.value)
        return values

    def _try(self, index: int, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Closed:
            raise ServerLost(f"server {index}, which holds a shard of the parameters, died") from None
