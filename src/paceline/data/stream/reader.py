"""Reads stretches of a stream's sources, in a loader's process or in the worker itself.

A DataLoader has one of these objects as its dataset, and a sampler of requests. So processes, prefetching, timeouts and
pinned memory are torch's own, as for any other dataset.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils import worker as loader_process

from paceline.data.split import scaled
from paceline.data.stream.marks import Mark, Marker
from paceline.data.stream.sources import Sources

_FEW = 2
"""Sources that have ended and are kept, as samples at their ends may be asked for again."""


class Request(NamedTuple):
    """Samples that a loader shall read."""

    source: int
    start: int
    """The first sample, counted from the beginning of the source."""
    size: int
    """Samples from there on."""
    turn: int
    """How often the stream was begun; a source is opened anew in each turn."""
    sizes: Sequence[int] = ()
    """The samples of each replica's part; empty if they are not divided."""
    part: int = 0
    """The part that is wanted."""
    full: bool = False
    """True if fewer samples are worth nothing."""
    least: int = 0
    """Fewer samples are returned as they are, to be put together with others."""


class Reading(NamedTuple):
    """The answer to a request."""

    request: Request | None
    samples: int = 0
    """Samples of the part; 0 with a batch if that is a copy of another part, as this one has none."""
    whole: int = 0
    """Samples of all parts."""
    length: int = -1
    """Samples of the source, if it has ended; else -1."""
    marks: Sequence[Mark] = ()
    lost: bool = False
    """True if the samples have gone by, and the stream cannot be read again."""
    batch: Any = None
    """The collated samples; a list of them, if there are fewer than the request needs."""


class _Open:
    """A source that is being read."""

    def __init__(self, source: int, samples: Iterator[Any], turn: int, window: deque[Any], marker: Marker) -> None:
        self.source, self.turn, self.marker = source, turn, marker
        self._samples, self._window = samples, window
        self.position = 0
        self.ended = False

    @property
    def oldest(self) -> int:
        """The first sample that can be had."""
        return self.position - len(self._window)

    def read(self, start: int, count: int, keep: Callable[[Any], Any]) -> list[Any]:
        """The samples from `start` on, fewer at the end of the source. keep: returns what is kept of a sample."""
        found = [self._window[place - self.oldest] for place in range(start, min(start + count, self.position))]
        while len(found) < count and not self.ended:
            try:
                sample = next(self._samples)
            except StopIteration:
                self.ended = True
                break
            self.marker.add(sample)
            if self._window.maxlen:
                self._window.append(keep(sample))
            self.position += 1
            if self.position > start:
                found.append(sample)
        return found


class StreamReader:
    """Reads the sources of a stream."""

    def __init__(self, sources: Sources, *, stride: int, window: int = 0, copies: bool = False) -> None:
        """stride: of the samples that are compared between workers; 0 if they do not read the same ones.

        window: samples that are kept, as they may be asked for again; copies: True to keep copies.
        """
        self.sources, self._stride, self._window, self._copies = sources, stride, window, copies
        self._open: dict[int, _Open] = {}

    def read(self, request: Request) -> Reading:
        """Reads the samples of a request; its answer has a list of them in place of a batch."""
        source, start = request.source, request.start
        opened = self._open.get(source)
        lost = False
        with _process_of(self.sources):
            if opened is not None and (opened.turn != request.turn or start < opened.oldest):
                lost = opened.turn == request.turn and self.sources.shared
                opened = opened if lost else None
            if opened is None:
                opened = self._open[source] = self._opened(source, request.turn)
            samples = [] if lost else opened.read(start, request.size, self._kept)
        length = opened.position if opened.ended else -1
        return self._divided(request, samples, Reading(request, 0, 0, length, opened.marker.take(), lost))

    def _opened(self, source: int, turn: int) -> _Open:
        for number, other in list(self._open.items()):
            if other.turn != turn or (other.ended and len(self._open) > _FEW):
                del self._open[number]
        marker = Marker(source, self._stride)
        return _Open(source, self.sources.open(source), turn, deque(maxlen=self._window), marker)

    def _kept(self, sample: Any) -> Any:
        if self._copies:
            with contextlib.suppress(Exception):  # then it is hoped that nobody changes it
                return copy.deepcopy(sample)
        return sample

    def _divided(self, request: Request, samples: list[Any], reading: Reading) -> Reading:
        if not samples or (request.full and len(samples) < request.size):
            return reading
        whole = len(samples)
        if not request.sizes:
            return reading._replace(samples=whole, whole=whole, batch=samples)
        shares = scaled(request.sizes, whole)
        start = sum(shares[: request.part])
        part = samples[start : start + shares[request.part]]
        copied = part or samples[: next(share for share in shares if share)]
        return reading._replace(samples=len(part), whole=whole, batch=copied)


@contextlib.contextmanager
def _process_of(sources: Sources) -> Iterator[None]:
    """Shows the user's dataset the loader's process that it is in.

    A shard is read by one process, and must not be divided among all of them by `get_worker_info` as well.
    """
    process = get_worker_info()
    if process is None:
        yield
        return
    shown = dataclasses.replace(process, dataset=sources.dataset)
    loader_process._worker_info = shown if sources.shared else dataclasses.replace(shown, id=0, num_workers=1)
    try:
        yield
    finally:
        loader_process._worker_info = process


class BatchMaker:
    """Makes batches of samples, as the user's loader does."""

    def __init__(self, collate: Callable[[Any], Any], *, batched: bool) -> None:
        """batched: True if `collate` takes a list of samples, False if it takes one."""
        self._collate, self._batched = collate, batched

    @property
    def copies(self) -> bool:
        """True if a batch may share memory with its samples."""
        return not self._batched or self._collate is not default_collate

    def __call__(self, samples: list[Any]) -> Any:
        return self._collate(samples) if self._batched else self._collate(samples[0])

    def finish(self, reading: Reading) -> Reading:
        """A reading with its batch; with the samples as they are, if they are too few."""
        if reading.request is None or reading.batch is None or reading.samples < reading.request.least:
            return reading
        return reading._replace(batch=self(reading.batch))


class StreamDataset:
    """The dataset of a loader's processes, which answers requests."""

    def __init__(self, reader: StreamReader, maker: BatchMaker) -> None:
        self.reader, self._maker = reader, maker
        self.dataset = reader.sources.dataset

    def __getitem__(self, request: Request | None) -> Reading:
        return Reading(None) if request is None else self._maker.finish(self.reader.read(request))


class KeyedDataset:
    """As `StreamDataset`, if the stream is one of keys: the worker reads those itself, and the processes the samples.

    The samples are those of a map-style dataset.
    """

    def __init__(self, dataset: Any, maker: BatchMaker) -> None:
        self.dataset, self._maker = dataset, maker

    def __getitem__(self, reading: Reading) -> Reading:
        if reading.batch is None:
            return reading
        return self._maker.finish(reading._replace(batch=self._samples(reading.batch)))

    def _samples(self, keys: list[Any]) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(keys))
        return [self.dataset[key] for key in keys]


class ProcessStart:
    """The `worker_init_fn` of a loader of requests: shows the user's own one the user's dataset."""

    def __init__(self, user: Callable[[int], Any] | None) -> None:
        self._user = user

    def __call__(self, number: int) -> None:
        process = get_worker_info()
        assert process is not None
        dataset: Any = process.dataset
        loader_process._worker_info = dataclasses.replace(process, dataset=dataset.dataset)
        if self._user is not None:
            self._user(number)


def unchanged(reading: Any) -> Any:
    """The collate function of a loader of requests."""
    return reading
