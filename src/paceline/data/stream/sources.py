"""The sources of a stream: iterators that are each read from the beginning to the end.

A plain `IterableDataset` is read by every worker, with one source per process of its loader, as `get_worker_info` may
divide it among those. A dataset in shards has a source per shard, or per chain of shards, which one worker reads.
"""

from __future__ import annotations

import inspect
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from paceline.errors import UsageError


class Sources(Protocol):
    """What is read, by number."""

    dataset: Any
    """The user's object that they are made of."""
    shared: bool
    """True if every worker reads all of them, and so may not be able to read one of them again."""

    @property
    def count(self) -> int: ...

    def open(self, source: int) -> Iterator[Any]: ...


class WholeStream:
    """The whole dataset, as each process of a loader sees it; or all keys of a sampler."""

    shared = True

    def __init__(self, dataset: Any, processes: int) -> None:
        self.dataset, self.count = dataset, max(1, processes)

    def open(self, _source: int) -> Iterator[Any]:
        return iter(self.dataset)


class Shards(Protocol):
    """The shards of a dataset, by number; each can be opened again, and gives the same samples."""

    dataset: Any

    @property
    def count(self) -> int: ...

    def shard(self, number: int) -> Iterable[Any]: ...

    def digest(self) -> int:
        """Equal for equal lists of shards."""


class _Listed:
    """A dataset with a list of `shards`, and a method that opens one of them."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    @property
    def count(self) -> int:
        return len(self.dataset.shards)

    def shard(self, number: int) -> Iterable[Any]:
        found: Iterable[Any] = self.dataset.open(self.dataset.shards[number])
        return found

    def digest(self) -> int:
        return zlib.crc32(re.sub(r" at 0x[0-9a-f]+", "", repr(list(self.dataset.shards))).encode())


class _Divided:
    """A dataset with a method `shard`, which returns one of several parts of it."""

    def __init__(self, dataset: Any, parts: int) -> None:
        """parts: their number, if the dataset does not say it."""
        self.dataset = dataset
        named = getattr(dataset, "num_shards", None) or getattr(dataset, "n_shards", None)
        self.count = named if isinstance(named, int) else parts
        self._named = "num_shards" in inspect.signature(dataset.shard).parameters

    def shard(self, number: int) -> Iterable[Any]:
        found: Iterable[Any]
        if self._named:  # as Hugging Face's datasets have it
            found = self.dataset.shard(num_shards=self.count, index=number)
        else:
            found = self.dataset.shard(number, self.count)
        return found

    def digest(self) -> int:
        return self.count


def shards_of(dataset: Any, parts: int) -> Shards | None:
    """The shards of a dataset; None if it has none. parts: their number, if any will do."""
    if isinstance(getattr(dataset, "shards", None), Sequence) and callable(getattr(dataset, "open", None)):
        return _Listed(dataset)
    if callable(getattr(dataset, "shard", None)):
        return _Divided(dataset, parts)
    return None


class ShardSources:
    """The shards of a dataset: one source each."""

    shared = False

    def __init__(self, shards: Shards) -> None:
        self.shards, self.dataset = shards, shards.dataset

    @property
    def count(self) -> int:
        return self.shards.count

    def open(self, source: int) -> Iterator[Any]:
        return _iterated(self.shards.shard(source))


class ShardChains:
    """Chains of shards: one for every process of every replica's loader, of which each reads its own."""

    shared = False

    def __init__(self, shards: Shards, replica: int, replicas: int, processes: int) -> None:
        self.shards, self.dataset, self.count = shards, shards.dataset, max(1, processes)
        self._first, self._step = replica, replicas

    def open(self, source: int) -> Iterator[Any]:
        for number in range(self._first, self.shards.count, self._step)[source :: self.count]:
            yield from _iterated(self.shards.shard(number))


def _iterated(shard: Iterable[Any]) -> Iterator[Any]:
    try:
        return iter(shard)
    except TypeError:
        raise UsageError(
            f"a shard of the loader's dataset is a {type(shard).__name__}; it must be an iterable of samples"
        ) from None
