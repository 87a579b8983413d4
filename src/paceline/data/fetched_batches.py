"""The batches of a DataLoader without processes, fetched by the DataLoader's own fetcher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

_profiling = torch._C._autograd._profiler_enabled


class FetchedBatches:
    """An iterator over them without torch's event for each batch, which takes as long as all that a team does for one.

    Under a profiler it is torch's own iterator, with its events.
    """

    def __init__(self, batches: Any) -> None:
        self._batches, self._keys, self._fetch = batches, batches._sampler_iter, batches._dataset_fetcher.fetch

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches) if _profiling() else self._fetch(next(self._keys))


def fetched(batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches, without torch's bookkeeping where they are loaded in this process."""
    if isinstance(batches, _SingleProcessDataLoaderIter) and not batches._pin_memory:
        return FetchedBatches(batches)
    return batches
