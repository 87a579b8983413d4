"""A ring of message slots in shared memory, from one member of a group to another.

The first bytes count the messages put in and taken out; then come the receipts of large messages, by ticket; then the
slots. Only the sender writes slots and the first count, only the receiver the second count and the receipts.
"""

from __future__ import annotations

import torch

from paceline.transport.memory import Memory

SLOTS, TICKETS = 16, 2048
"""Messages in a ring at a time, and large messages without a receipt."""
INLINE = 16 * 1024
"""Bytes of a tensor that fits into its slot."""
_HEADER = 64
_SLOT = _HEADER + INLINE
_FIXED = 64 + 64 + 8 * TICKETS  # both counts, receipts
RING = -(-(_FIXED + SLOTS * _SLOT) // 4096) * 4096
"""Bytes of a ring."""
HEAD, TAIL = 0, 8
"""Places of the counts, each in a cache line of its own."""
PENDING, TAKEN, REFUSED = range(3)
"""States of a receipt."""


class MessageRing:
    """The messages from one member to another."""

    def __init__(self, memory: Memory, start: int) -> None:
        control = memory.bytes(start, _FIXED)
        self.counts = control.cast("q")
        """Messages that were ever put in, at `HEAD`, and ever taken out, at `TAIL`."""
        self.receipts = control[128:].cast("q")
        begin = start + _FIXED
        offsets = [begin + _SLOT * number for number in range(SLOTS)]
        self._headers = [memory.bytes(offset, _HEADER).cast("q") for offset in offsets]
        self._offsets, self._memory = offsets, memory

    def header(self, number: int) -> memoryview:
        return self._headers[number % SLOTS]

    def payload(self, number: int, size: int) -> torch.Tensor:
        return self._memory.tensor(self._offsets[number % SLOTS] + _HEADER, size, torch.uint8)


class IncomingMessage:
    """A message that has come, as its slot describes it."""

    __slots__ = ("content", "dtype", "size", "source", "tag", "ticket", "where")

    def __init__(self, source: int, header: memoryview) -> None:
        self.source = source
        self.tag, self.size, self.dtype, self.ticket = header[0], header[1], header[2], header[3]
        self.where = (header[4], header[5], header[6])
        self.content: torch.Tensor | None = None
