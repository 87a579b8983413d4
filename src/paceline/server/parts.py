"""Texts that are longer than a message, sent in parts."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from paceline.server.messages import MessagePart

PART = 1 << 16
"""Bytes of a part."""


class _Sender(Protocol):
    def send(self, message: msgspec.Struct) -> None: ...


class _Receiver(Protocol):
    def receive_within(self, seconds: float) -> Any: ...


def send_parts(connection: _Sender, data: bytes) -> None:
    """Sends a text that may be longer than a message."""
    for start in range(0, max(1, len(data)), PART):
        connection.send(MessagePart(data[start : start + PART], start + PART < len(data)))


def receive_parts(connection: _Receiver, seconds: float) -> bytes | None:
    """Receives such a text; None if another message came, or none in time."""
    data = bytearray()
    while isinstance(part := connection.receive_within(seconds), MessagePart):
        data += part.data
        if not part.more:
            return bytes(data)
    return None
