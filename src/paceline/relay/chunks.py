"""The chunks of a gradient: which of them a machine needs, and which are ready while the backward pass makes it."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from paceline.relay.messages import Span
from paceline.transport.links import CHUNK


def cut(spans: Iterable[Span]) -> list[Span]:
    """Cuts spans into pieces that fit into one frame; adjacent spans are joined first."""
    joined: list[Span] = []
    for start, stop in sorted(span for span in spans if span[1] > span[0]):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return [(begin, min(begin + CHUNK, stop)) for start, stop in joined for begin in range(start, stop, CHUNK)]


def overlap(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """What is in spans of both."""
    kept, found = sorted(others), list[Span]()
    for start, stop in spans:
        for first, last in kept:
            if first < stop and start < last:
                found.append((max(start, first), min(stop, last)))
    return found


def gaps(spans: Iterable[Span], size: int) -> list[Span]:
    """What of so many bytes is in none of these spans."""
    at, found = 0, list[Span]()
    for start, stop in [*sorted(spans), (size, size)]:
        if at < start:
            found.append((at, start))
        at = max(at, stop)
    return found


class ChunkMap:
    """The chunks of a gradient that one machine needs, and the parameters in each."""

    def __init__(self, spans: Iterable[Span], parameters: list[Span]) -> None:
        self.chunks = cut(spans)
        self.places = dict(self.chunks)
        self.bytes = sum(stop - start for start, stop in self.chunks)
        self.needs = [0] * len(self.chunks)
        """Per chunk, the number of parameters in it."""
        self.of: list[list[int]] = [[] for _ in parameters]
        """By parameter, its chunks."""
        for number, (start, stop) in enumerate(parameters):
            for index in _overlapping(self.chunks, start, stop):
                self.needs[index] += 1
                self.of[number].append(index)


def _overlapping(chunks: list[Span], start: int, stop: int) -> Iterator[int]:
    index = max(0, bisect_right(chunks, (start, 1 << 62)) - 1)
    while index < len(chunks) and chunks[index][0] < stop:
        if chunks[index][1] > start:
            yield index
        index += 1


class GradientUpload:
    """The upload of one worker's gradient to one machine."""

    def __init__(self, chunk_map: ChunkMap, memory: memoryview) -> None:
        """memory: the worker's gradient."""
        self._map, self._memory = chunk_map, memory
        self.restart()

    def restart(self) -> None:
        """Begins with a new gradient."""
        self._missing = list(self._map.needs)
        self._made: set[int] = set()
        self._queue: deque[int] = deque()
        self._sent: dict[int, int] = {}
        """By chunk, the checksum with which it was sent."""
        self.closing = False
        """True if the gradient is final."""
        self.ended = False
        """True if its end has been sent."""

    def made(self, parameter: int) -> None:
        """Queues chunks that are complete with the gradient of this parameter. It may change later: see `close`."""
        if parameter in self._made:
            return
        self._made.add(parameter)
        for index in self._map.of[parameter]:
            self._missing[index] -= 1
            if self._missing[index] == 0:
                self._queue.append(index)

    def repeat(self) -> None:
        """Sends everything again, as its receiver may have lost it."""
        self._sent.clear()
        self.ended = False
        self._queue = deque(index for index, missing in enumerate(self._missing) if missing == 0 or self.closing)

    def close(self) -> None:
        """Queues, for the final gradient, all chunks that were not sent or have changed since."""
        self._queue.clear()
        self.closing = True
        self._queue.extend(range(len(self._map.chunks)))

    def next(self) -> tuple[int, bytes, int] | None:
        """The next chunk to send, if there is one: its place, its bytes, and their checksum."""
        while self._queue:
            index = self._queue.popleft()
            start, stop = self._map.chunks[index]
            sent = self._sent.get(index)
            if sent is not None and sent == zlib.crc32(self._memory[start:stop]):
                continue
            # The checksum must be that of the sent bytes, though the worker may be writing them meanwhile.
            data = bytes(self._memory[start:stop])
            self._sent[index] = check = zlib.crc32(data)
            return start, data, check
        return None

    @property
    def size(self) -> int:
        """Bytes of the gradient that the machine needs."""
        return self._map.bytes

    @property
    def complete(self) -> bool:
        """True if nothing is left to send."""
        return self.closing and not self._queue


def check_place(stop: int | None, place: int, payload: Any) -> None:
    """Raises ValueError if what has come is no chunk that ends there. stop: None if none begins at its place."""
    if stop is None or len(payload) != stop - place:
        raise ValueError("a chunk that does not belong where it says")
