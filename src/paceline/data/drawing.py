"""Draws the order of an epoch with the user's own sampler, with the random numbers that plain torch would use.

A `DataLoader` takes one number for the seeds of its processes. It makes the iterator of a batch sampler, or of the
sampler of a loader without batches, before that, and the iterator of any other sampler after it. A sampler whose
`__iter__` draws at once, such as `return iter(torch.randperm(n).tolist())`, depends on it. A worker finds out whether
it is the one that draws only when the number is taken, so it goes back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader


class OrderDrawing:
    """The user's batches if the loader has a batch sampler of theirs, else the keys of samples; drawn by iterating."""

    def __init__(self, loader: DataLoader[Any], *, batches: bool | None = None) -> None:
        """batches: whether to draw whole batches, if not as the loader does."""
        self._loader = loader
        custom = loader.batch_sampler is not None and loader.batch_size is None
        self._batches = custom if batches is None else batches
        self._early = custom or loader.batch_sampler is None
        self._before: torch.Tensor | None = None

    def begin(self) -> None:
        """Call it before the loader that loads the samples takes its random number."""
        self._before = self._generator.get_state() if self._early else None

    @property
    def _generator(self) -> torch.Generator:
        return self._loader.generator or torch.default_generator

    def __iter__(self) -> Iterator[Any]:
        sampler: Any = self._loader.batch_sampler if self._batches else self._loader.sampler
        before, self._before = self._before, None
        # Processes that persist are seeded once, so a later epoch takes no number.
        if before is None or torch.equal(before, self._generator.get_state()):
            return iter(sampler)
        self._generator.set_state(before)
        drawn = iter(sampler)
        torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        return iter(sampler) if self._loader.num_workers else drawn  # with processes torch makes it twice
