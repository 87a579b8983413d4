"""A loader as a framework's loop iterates it in training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from paceline.data.loader import global_batch_of
from paceline.data.loader_attributes import LoaderAttributes
from paceline.data.shares import has_batch_sampler, rounds_of
from paceline.team import Team


class TrainingLoader(LoaderAttributes):
    """This worker's batches of a DataLoader whose batch size is one worker's.

    Frameworks prepare loaders before there is an optimizer, so it becomes a loader of the team when it is first used.
    """

    def __init__(self, loader: DataLoader[Any], team: Team, workers: int, *, leased: bool) -> None:
        """leased: True if workers take samples when they need them, each as many as it can."""
        self._loader, self._team, self._workers, self._leased = loader, team, workers, leased
        self._shared: Any = None
        self._batches: Any = None
        self._taken = 0
        self.inside = False
        """True from the first batch of an epoch to its end."""

    def __len__(self) -> int:
        """Batches of an epoch for each worker; under a policy of the server, if all are equally fast."""
        total = global_batch_of(self._loader, self._workers, None, per_worker=True)
        even = has_batch_sampler(self._loader) or not self._leased
        return rounds_of(self._loader, total, self._workers, per_worker=even)

    def __iter__(self) -> Iterator[Any]:
        if self._shared is None:
            self._shared = self._team.loader(self._loader, per_worker=True)
        batches = self._batches = iter(self._shared)
        self._taken = 0
        try:
            for batch in batches:
                self.inside = True
                self._taken += 1
                yield batch
        finally:
            if self._batches is batches:
                self.leave()

    @property
    def ended(self) -> bool:
        """True outside of an epoch, and once this worker has had as many batches as the epoch has for each."""
        return not self.inside or self._taken >= len(self)

    def leave(self) -> None:
        """End the current epoch, if there is one: the samples that are left are for the other workers."""
        if self._batches is not None:
            self._batches.close()
        self._batches, self.inside = None, False

    @property
    def worker_init_fn(self) -> Any:
        return self._loader.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self._loader.worker_init_fn = function


def joined_rest(loader: DataLoader[Any], workers: int) -> int:
    """Samples at the end of an epoch that are too few for a batch of every worker; 0 if there are none."""
    if loader.batch_size is None or loader.drop_last:
        return 0
    rounds, rest = divmod(len(loader.sampler), loader.batch_size * workers)  # type: ignore[arg-type]
    return rest if rounds and rest < workers else 0
