"""A key-value store that is on no machine: every member sends its values to all others.

torch's store is hosted by one process, with whose machine it would be lost.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence

import msgspec
from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from paceline.transport import ElasticBarrier
from paceline.transport.peer_connections import FrameKind, PeerConnections

_SLICE = 0.05


class PeerStore(Store):
    """One member's end of it, over the connections of an elastic barrier."""

    def __init__(self, connections: PeerConnections, barrier: ElasticBarrier, patience: float) -> None:
        super().__init__()
        self._connections, self._barrier, self._patience = connections, barrier, patience
        self._values: dict[str, bytes] = {}
        connections.take(FrameKind.VALUE, self._take)

    def _take(self, _: int, payload: memoryview) -> None:
        key, value = msgspec.msgpack.decode(payload, type=tuple[str, bytes])
        self._values[key] = value

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value = value.encode() if isinstance(value, str) else bytes(value)
        self._connections.send_all(FrameKind.VALUE, msgspec.msgpack.encode((key, value)))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        self._connections.move()
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Waits for all keys; fails at once if a member is lost, which may be the one that would set them."""
        patience = self._patience if timeout is None else timeout.total_seconds()
        until = time.monotonic() + patience
        while not all(key in self._values for key in keys):
            lost = [rank for rank in self._connections.connections if self._is_lost(rank)]
            if lost:
                raise DistStoreError(f"{self._barrier.where(lost[0])} was lost while the machines connected")
            if time.monotonic() > until:
                raise DistStoreError(f"the machines did not connect in {patience:g} s")
            self._connections.move(_SLICE)
            self._connections.close_silent(self._barrier.timeouts.barrier)

    def _is_lost(self, rank: int) -> bool:
        return rank not in self._barrier.departed and self._barrier.gone(rank) is not None
