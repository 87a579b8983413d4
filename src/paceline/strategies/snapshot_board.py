"""What workers tell each other about snapshots: in shared memory, and between machines with the notes of an update.

A snapshot is of one version. It is marked before that version is made: so all workers know, as soon as they have it,
that they have to say what belongs to it, and that the next update has to copy what it overwrites.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import torch

from paceline.cluster.membership import Members
from paceline.server.messages import Left

_HEAD = 64
_SLOT = 32 * 1024
"""Bytes for one worker."""


class Kept(NamedTuple):
    """A copy of a version, as views of shared memory that stays as it is until the next version is marked."""

    values: dict[int, torch.Tensor]
    """By `id` of a parameter, its values."""
    optimizers: list[dict[str, Any]]
    """The `state_dict` of each optimizer, with newer hyperparameters."""
    left: Left | None = None
    """By number of a loader, what is left of its epoch, if samples are leased."""
    policy: dict[str, Any] = {}  # noqa: RUF012
    """The policy's own values."""


class _News(msgspec.Struct, array_like=True):
    """What other machines must know."""

    mark: int = 0
    """Of the version that the update makes; 0 if it is not marked."""
    number: int = 0
    data: bytes = b""
    """This worker's bytes for the snapshot of this number."""


class SnapshotBoard:
    """The marked version, and by worker the bytes that belong to it."""

    def __init__(self, members: Members) -> None:
        """All workers of the team make it together."""
        self._spans = len(members.machines) > 1
        self._wanted = False
        """True if the version that the next update makes is to be marked on all machines."""
        self._sent = 0
        """The number of this worker's bytes that the other machines have."""
        self._memory = members.share(_HEAD + members.size * _SLOT)
        self._words = self._memory.bytes(0, self._memory.size).cast("q")
        self._size = members.size

    @property
    def mark(self) -> int:
        """One more than the version that is marked; 0 before the first."""
        return self._words[0]

    @mark.setter
    def mark(self, number: int) -> None:
        self._words[0] = number

    def mark_next(self, version: int) -> None:
        """Marks the version after this one; on several machines, the one after the next note of the lead."""
        if self._spans:
            self._wanted = True
        else:
            self.mark = version + 2

    def news(self, rank: int, version: int) -> bytes:
        """What the other machines must know with a worker's note for an update of this version; empty if nothing."""
        if not self._spans:
            return b""
        if self._wanted:
            self._wanted, self.mark = False, version + 2
        mark = self.mark if self.mark == version + 2 else 0
        number, data = self.unsent(rank)
        return msgspec.msgpack.encode(_News(mark, number, data)) if mark or number else b""

    def unsent(self, rank: int) -> tuple[int, bytes]:
        """This worker's bytes, with the number of their snapshot, if other machines do not have them; else 0."""
        number, data = self.read(rank)
        if number in (0, self._sent):
            return 0, b""
        self._sent = number
        return number, data

    def hear(self, rank: int, news: bytes, *, keeps: bool) -> None:
        """Takes what another machine's worker has told; keeps: this worker needs the bytes of all."""
        told = msgspec.msgpack.decode(news, type=_News)
        if told.mark:
            self.mark = told.mark
        if told.number and keeps:
            self.write(rank, told.number, told.data)

    def write(self, rank: int, number: int, data: bytes) -> None:
        """Notes a worker's bytes for the snapshot of this number; too many are left out."""
        if not 0 <= rank < self._size:
            return  # it has joined later
        start = _HEAD + rank * _SLOT
        self._words[start // 8] = 0
        if len(data) <= _SLOT - 16:
            self._words[start // 8 + 1] = len(data)
            self._memory.bytes(start + 16, len(data))[:] = data
            self._words[start // 8] = number

    def read(self, rank: int) -> tuple[int, bytes]:
        """The number of the snapshot that a worker's bytes belong to, and these."""
        start = _HEAD + rank * _SLOT
        number, size = self._words[start // 8], self._words[start // 8 + 1]
        return number, bytes(self._memory.bytes(start + 16, size)) if number else b""

    def missing(self, number: int) -> list[int]:
        """Workers that have said nothing for this snapshot yet."""
        return [rank for rank in range(self._size) if self._words[(_HEAD + rank * _SLOT) // 8] != number]
