"""What members of a barrier over machines send to each other: notes, and errors."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from paceline.errors import TeamError, error_from

SLOT = struct.Struct("=qqq")  # intent, length of the note, whether and how its writer has departed
_FRAME = struct.Struct("!qqq")  # number of the barrier, the rank that came last, how many ranks
_RANK = struct.Struct("!qqqq")  # rank, intent, length, whether and how it has departed


class Note(NamedTuple):
    """One member's note on the network."""

    rank: int
    intent: int
    departed: int
    """0 for a member that takes part."""
    payload: memoryview

    def write(self, slot: memoryview) -> None:
        """Writes it into its slot, where the members of this machine read it."""
        length = len(self.payload)
        SLOT.pack_into(slot, 0, self.intent, length, self.departed)
        if length:
            slot[SLOT.size : SLOT.size + length] = self.payload


def pack_notes(
    number: int, last: int, ranks: Sequence[int], slots: Sequence[memoryview], departed: Mapping[int, int]
) -> list[bytes | memoryview]:
    """The notes of these ranks at one barrier. last: the rank that came last. departed: ranks without a note."""
    parts: list[bytes | memoryview] = [_FRAME.pack(number, last, len(ranks))]
    for rank in ranks:
        intent, length, state = (0, 0, departed[rank]) if rank in departed else SLOT.unpack_from(slots[rank])
        parts.append(_RANK.pack(rank, intent, length, state))
        if length:
            parts.append(slots[rank][SLOT.size : SLOT.size + length])
    return parts


def unpack_notes(payload: memoryview, capacity: int) -> tuple[int, int, list[Note]]:
    """The number of the barrier, the rank that came last, and the notes; ValueError if it is no such frame."""
    try:
        number, last, count = _FRAME.unpack_from(payload)
        offset, notes = _FRAME.size, []
        for _ in range(count):
            rank, intent, length, departed = _RANK.unpack_from(payload, offset)
            offset += _RANK.size
            if not 0 <= length <= min(capacity, len(payload) - offset):
                raise ValueError("a note of another length")
            notes.append(Note(rank, intent, departed, payload[offset : offset + length]))
            offset += length
    except struct.error as error:
        raise ValueError(str(error)) from None
    return number, last, notes


class _Failure(msgspec.Struct, frozen=True):
    kind: str
    message: str
    ranks: list[int]


def pack_error(error: TeamError) -> bytes:
    """An error, for the other members."""
    return msgspec.msgpack.encode(_Failure(type(error).__name__, str(error)[:2000], list(error.ranks)))


def unpack_error(text: bytes | memoryview) -> TeamError:
    failure = msgspec.msgpack.decode(text, type=_Failure)
    return error_from(failure.kind, failure.message, failure.ranks)
