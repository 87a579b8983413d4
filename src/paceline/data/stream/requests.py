"""A loader of requests: torch's DataLoader, which reads a stream where it is told to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.data.loader import loading_options
from paceline.data.stream.reader import (
    BatchMaker,
    KeyedDataset,
    ProcessStart,
    Reading,
    Request,
    StreamDataset,
    StreamReader,
    unchanged,
)


class KeyReader:
    """Requests of a stream of keys, answered by the worker itself: processes get the keys, and load their samples."""

    def __init__(self, requests: Iterable[Request | None], reader: StreamReader) -> None:
        self._requests, self._reader = requests, reader

    def __iter__(self) -> Any:
        for request in self._requests:
            yield Reading(None) if request is None else self._reader.read(request)


def request_loader(
    loader: DataLoader[Any], reader: StreamReader, requests: Iterable[Request | None], maker: BatchMaker, *, keyed: bool
) -> DataLoader[Reading]:
    """The user's loader, as one that answers requests.

    keyed: True if the stream is one of keys, of samples in a map-style dataset.
    """
    options = loading_options(loader, workers=loader.num_workers)
    dataset: Any = StreamDataset(reader, maker)
    sampler: Any = requests
    if keyed:
        dataset, sampler = KeyedDataset(loader.dataset, maker), KeyReader(requests, reader)
    if loader.num_workers:
        options["worker_init_fn"] = ProcessStart(loader.worker_init_fn)
    return DataLoader(dataset, batch_size=None, sampler=sampler, collate_fn=unchanged, **options)


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, without a reference to its object.

    A DataLoader's iterator that is part of a cycle is found too late to end its processes at once.
    """
    found = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        bound = found()
        assert bound is not None, "the loader was deleted while it was iterated"
        return bound(*arguments)

    return call


def seed_state(loader: DataLoader[Any]) -> bytes:
    """The state of the generator from which the user's loader draws the seed of its processes; empty without any."""
    generator = loader.generator or torch.default_generator
    return bytes(generator.get_state().numpy()) if loader.num_workers else b""


def seed_alike(loader: DataLoader[Any], requests: DataLoader[Any], state: bytes) -> None:
    """Lets the processes of a loader of requests have the seeds of another worker's, which has had this state."""
    if not state:
        return
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # as the other worker's loader draws
    requests.generator = torch.Generator()
    requests.generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def ahead_of(loader: DataLoader[Any]) -> int:
    """The most batches that the loader's processes fetch ahead."""
    return 1 + loader.num_workers * (loader.prefetch_factor or 0)
