"""Streams that tests divide among workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch.utils.data import IterableDataset, Sampler, get_worker_info


class Count(IterableDataset[int]):
    """Numbers from 0 on, which the processes of a loader divide if they are told to."""

    def __init__(self, count: int | None, *, divides: bool = False) -> None:
        self.count, self.divides, self.start = count, divides, 0

    def __iter__(self) -> Iterator[int]:
        process = get_worker_info()
        first, step = (0, 1) if process is None or not self.divides else (process.id, process.num_workers)
        numbers = itertools.count(self.start) if self.count is None else iter(range(self.start, self.count))
        return itertools.islice(numbers, first, None, step)


def ranges(sizes: list[int]) -> list[tuple[int, int]]:
    """Shards of such sizes, as numbers from 0 on."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return list(itertools.pairwise(ends))


class Cut(IterableDataset[int]):
    """A dataset that can be cut into any number of parts, each of which divides itself among processes."""

    def __init__(self, count: int, part: tuple[int, int] = (0, 1)) -> None:
        self.count, self.part = count, part

    def shard(self, index: int, count: int) -> Cut:
        return Cut(self.count, (index, count))

    def __iter__(self) -> Iterator[int]:
        process = get_worker_info()
        first, step = (0, 1) if process is None else (process.id, process.num_workers)
        return itertools.islice(range(self.part[0], self.count, self.part[1]), first, None, step)


class Forever(Sampler[int]):
    """Keys without an end."""

    def __iter__(self) -> Iterator[int]:
        return (number % 5 for number in itertools.count())
