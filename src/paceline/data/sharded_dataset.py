"""A dataset in shards, each of which is read from its beginning to its end: files, tables, ranges of keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info


class ShardedDataset(IterableDataset[Any]):
    """The samples of all shards, one shard after the other; the processes of a DataLoader divide the shards.

    In a team every shard is read by one worker, and read again from its beginning if that worker is lost.
    """

    def __init__(self, shards: Sequence[Any], open: Callable[[Any], Iterable[Any]]) -> None:
        """shards: what `open` takes, such as the names of files; the same on all workers.

        open: the samples of one shard, always the same ones in the same order.
        """
        self.shards = shards
        self.open = open

    def __iter__(self) -> Iterator[Any]:
        process = get_worker_info()
        first, step = (0, 1) if process is None else (process.id, process.num_workers)
        for shard in list(self.shards)[first::step]:
            yield from self.open(shard)
