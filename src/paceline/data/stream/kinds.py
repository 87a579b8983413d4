"""Whether a loader is one of a stream, and how its stream can be read."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, RandomSampler, SequentialSampler

from paceline.data.shares import has_batch_sampler
from paceline.data.stream.marks import digest_of
from paceline.data.stream.reader import BatchMaker
from paceline.data.stream.sources import Shards, Sources, WholeStream, shards_of
from paceline.errors import UsageError


def is_stream(loader: DataLoader[Any]) -> bool:
    """True if the loader's samples are read one after the other, as their number is not known."""
    if isinstance(loader.dataset, IterableDataset):
        return True
    try:
        len(loader)
    except TypeError:
        return True
    return False


def is_keyed(loader: DataLoader[Any]) -> bool:
    """True if the stream is one of keys: its sampler has no length, and its dataset is a map-style one."""
    return not isinstance(loader.dataset, IterableDataset)


def check_stream(loader: DataLoader[Any]) -> None:
    """Raises a UsageError for a stream that cannot be shared out."""
    if isinstance(loader.dataset, IterDataPipe):
        raise UsageError(
            "the loader's dataset is a datapipe of torch, which divides itself among processes; use an IterableDataset"
        )
    if is_keyed(loader) and has_batch_sampler(loader):
        raise UsageError(
            "the loader's batch sampler has no length, so its batches cannot be shared out; give it a __len__, or give "
            "the loader a sampler and a batch_size"
        )
    if is_keyed(loader) and isinstance(loader.sampler, SequentialSampler | RandomSampler):
        raise UsageError("the loader's dataset has no length, which its sampler needs; give the dataset a __len__")


def whole_stream(loader: DataLoader[Any]) -> Sources:
    """The stream as every worker can read it."""
    if is_keyed(loader):
        return WholeStream(loader.sampler, 1)
    return WholeStream(loader.dataset, loader.num_workers)


def shards_in(loader: DataLoader[Any], workers: int, parts: int) -> Shards | None:
    """The shards of the loader's dataset, if it has enough for so many workers; parts: as in `shards_of`."""
    shards = None if is_keyed(loader) else shards_of(loader.dataset, parts)
    return None if shards is None or shards.count < workers or workers == 1 else shards


def whole_notice(loader: DataLoader[Any], workers: int) -> str | None:
    """Says that every worker reads the whole stream, and how that could be spared; None if it costs nothing."""
    if workers == 1 or is_keyed(loader):
        return None  # of a stream of keys, a worker loads its own samples only
    shards = shards_of(loader.dataset, workers)
    if shards is None:
        return (
            "every worker reads the whole stream and keeps its part of each batch; a dataset with a method "
            "shard(index, count), or a paceline.data.ShardedDataset, is read once by all workers together"
        )
    if shards.count < workers:
        return (
            f"every worker reads all {shards.count} shards and keeps its part of each batch; with at least {workers}, "
            "one for each worker, they are read once by all workers together"
        )
    return (
        f"every worker reads all {shards.count} shards and keeps its part of each batch: here workers need equally "
        "many batches, and shards may have different lengths"
    )


def batch_maker(loader: DataLoader[Any]) -> BatchMaker:
    return BatchMaker(loader.collate_fn, batched=loader.batch_sampler is not None)


def stream_facts(loader: DataLoader[Any]) -> list[tuple[str, str]]:
    """What all workers' streams must have in common; a dataset that divides itself by rank is noticed by it."""
    facts = [("a loader of", "a stream"), ("num_workers", f"= {loader.num_workers}")]
    shards = None if is_keyed(loader) else shards_of(loader.dataset, 2)
    if shards is not None and shards.count:
        facts.append(("a stream of", f"{shards.count} shards"))
        first = next(iter(shards.shard(0)), None)
        facts.append(("as the first sample of its first shard", f"one with the digest {digest_of(first)}"))
        facts.append(("a list of shards", f"with the digest {shards.digest()}"))
    return facts
