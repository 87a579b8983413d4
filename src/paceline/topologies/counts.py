"""Messages and elements that each rank sends and receives in an all-reduce."""

from __future__ import annotations

import msgspec

from paceline.topologies.chunks import lengths


class Traffic(msgspec.Struct):
    """Messages and bytes that one rank has sent and received."""

    sent: int = 0
    """Messages."""
    bytes_sent: int = 0
    received: int = 0
    """Messages."""
    bytes_received: int = 0

    @classmethod
    def both_ways(cls, messages: int, size: int) -> Traffic:
        """As much sent as received."""
        return cls(messages, size, messages, size)

    def of_elements(self, itemsize: int) -> Traffic:
        """The traffic in bytes, if it was counted in elements of `itemsize` bytes."""
        return Traffic(self.sent, self.bytes_sent * itemsize, self.received, self.bytes_received * itemsize)


def ring(rank: int, size: int, length: int) -> Traffic:
    """A rank of the ring, in elements."""
    chunks = lengths(length, size)
    own, before, after = chunks[rank], chunks[rank - 1], chunks[(rank + 1) % size]
    # Each half of the algorithm leaves out one chunk: the one that stays here, or the one that is here already.
    return Traffic(2 * (size - 1), 2 * length - own - after, 2 * (size - 1), 2 * length - own - before)


def hub(rank: int, size: int, length: int) -> Traffic:
    """The hub, rank 0, or another rank, in elements."""
    messages = size - 1 if rank == 0 else 1
    return Traffic.both_ways(messages, messages * length)


def direct(rank: int, size: int, length: int) -> Traffic:
    """A rank of the direct exchange, in elements."""
    own = lengths(length, size)[rank]
    return Traffic.both_ways(2 * (size - 1), length - own + (size - 1) * own)
