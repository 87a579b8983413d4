"""Transfers that are under way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from paceline.relay.chunks import GradientUpload
from paceline.relay.messages import Chunk, Span, TransferEnd

_encode = msgspec.msgpack.Encoder().encode

Done = Callable[[], None]


@dataclasses.dataclass(slots=True)
class GradientTransfer:
    """The push of one worker's gradient to the machines that need it."""

    uploads: dict[int, GradientUpload]
    """By machine."""
    turn: int = 1
    waits: set[int] = dataclasses.field(default_factory=set)
    """Machines that have not confirmed."""
    done: Done | None = None
    start: float = 0.0
    """When its first chunk was sent."""
    bytes: int = 0


@dataclasses.dataclass(slots=True)
class FetchTransfer:
    """A version, state or rest that is being fetched from the machines that own its parts."""

    what: str
    buffer: int
    version: int
    waits: set[int]
    done: list[Done]
    parameters: tuple[int, ...] | None = None
    """Of a version; None for all."""


def chunks(what: str, number: int, spans: list[Span], memory: memoryview, buffer: int) -> Iterator[tuple[bytes, Any]]:
    """The messages and payloads by which these spans of a memory are sent, and their end."""
    for start, stop in spans:
        yield _encode(Chunk(what, number, start, 0, buffer)), memory[start:stop]
    yield _encode(TransferEnd(what, number, 0)), None
