"""What travels in bulk: which chunks a machine needs of a gradient, and which of them are ready while it is made."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator

from paceline.relay.messages import Span
from paceline.transport.zmq_links import CHUNK


def cut(spans: Iterable[Span]) -> list[Span]:
    """In pieces that go in one frame; neighbours are joined first."""
    joined: list[Span] = []
    for start, stop in sorted(span for span in spans if span[1] > span[0]):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return [(begin, min(begin + CHUNK, stop)) for start, stop in joined for begin in range(start, stop, CHUNK)]


class ChunkMap:
    """The chunks of a gradient that one machine needs, and the parameters that each is made of."""

    def __init__(self, spans: Iterable[Span], parameters: list[Span]) -> None:
        self.chunks = cut(spans)
        self.places = dict(self.chunks)
        self.bytes = sum(stop - start for start, stop in self.chunks)
        self.needs = [0] * len(self.chunks)
        """How many parameters each has a part of."""
        self.of: list[list[int]] = [[] for _ in parameters]
        """By parameter, the chunks that it has a part in."""
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
    """One worker's gradient on its way to one machine."""

    def __init__(self, grid: ChunkMap, memory: memoryview) -> None:
        """memory: where the worker's gradient lies."""
        self._grid, self._memory = grid, memory
        self.restart()

    def restart(self) -> None:
        """A new gradient begins."""
        self._missing = list(self._grid.needs)
        self._made: set[int] = set()
        self._queue: deque[int] = deque()
        self._sent: dict[int, int] = {}
        """Chunks that went already, with what they were then."""
        self.closing = False
        """Whether the gradient is final."""
        self.ended = False
        """Whether its end has been sent."""

    def made(self, parameter: int) -> None:
        """The backward pass has made the gradient of a parameter. It may be changed later: see `close`."""
        if parameter in self._made:
            return
        self._made.add(parameter)
        for index in self._grid.of[parameter]:
            self._missing[index] -= 1
            if self._missing[index] == 0:
                self._queue.append(index)

    def close(self) -> None:
        """The gradient is final: what has not been sent, or was changed since, is to be sent."""
        self._queue.clear()
        self.closing = True
        self._queue.extend(range(len(self._grid.chunks)))

    def next(self) -> tuple[int, bytes, int] | None:
        """The next chunk to send, if there is one: its place, its bytes, and their checksum."""
        while self._queue:
            index = self._queue.popleft()
            start, stop = self._grid.chunks[index]
            sent = self._sent.get(index)
            if sent is not None and sent == zlib.crc32(self._memory[start:stop]):
                continue
            # What is sent must be what is remembered, though the worker may be writing it anew.
            data = bytes(self._memory[start:stop])
            self._sent[index] = check = zlib.crc32(data)
            return start, data, check
        return None

    @property
    def complete(self) -> bool:
        """Whether nothing is left to send."""
        return self.closing and not self._queue
