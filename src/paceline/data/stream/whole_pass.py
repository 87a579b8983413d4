"""A pass over a whole stream by workers that share one model, and so must all see the same batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from paceline.data.stream.kinds import batch_maker, is_keyed, whole_stream
from paceline.data.stream.marks import Mark
from paceline.data.stream.reader import Reading, Request, StreamReader
from paceline.data.stream.requests import request_loader


class TurnRequests:
    """Requests to the sources of a stream in turn; None for one that has ended."""

    def __init__(self, make: Callable[[int, int], Request], sources: int) -> None:
        """make: makes a request from its number and its source."""
        self._make, self._sources = make, sources
        self.ended: set[int] = set()
        """Sources without further samples."""
        self.first = 0
        """The number of the first request of the next pass."""

    def __iter__(self) -> Iterator[Request | None]:
        self.ended.clear()
        first, self.first = self.first, 0
        for number in itertools.count(first):
            source = number % self._sources
            if len(self.ended) == self._sources:
                return
            yield None if source in self.ended else self._make(number, source)

    def following(self, readings: Iterator[Reading], compare: Callable[[Sequence[Mark]], object]) -> Reading | None:
        """The next reading that has samples; None at the end of the stream."""
        for reading in readings:
            if reading.request is None:
                continue
            if reading.length >= 0:
                self.ended.add(reading.request.source)
            if reading.marks:
                compare(reading.marks)
            if reading.batch is not None:
                return reading
        return None


def whole_batches(
    loader: DataLoader[Any], begin: Callable[[DataLoader[Any]], object], compare: Callable[[Sequence[Mark]], object]
) -> Iterator[Any]:
    """The batches of the user's loader.

    begin: called with the loader that reads, to seed its processes alike; compare: compares marks with other workers'.
    """
    sources, batch = whole_stream(loader), loader.batch_size or 1

    def whole(number: int, source: int) -> Request:
        return Request(source, number // sources.count * batch, batch, 0, full=bool(loader.drop_last))

    requests = TurnRequests(whole, sources.count)
    reader = StreamReader(sources, stride=batch)
    inner = request_loader(loader, reader, requests, batch_maker(loader), keyed=is_keyed(loader))
    begin(inner)
    readings = iter(inner)
    while (reading := requests.following(readings, compare)) is not None:
        yield reading.batch
