"""A loader as Accelerate prepares it: divided by the team in training, and by Accelerate itself in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from accelerate.data_loader import SeedableRandomSampler, get_sampler
from accelerate.state import GradientState
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, RandomSampler

from paceline.data.loader_attributes import LoaderAttributes
from paceline.errors import UsageError
from paceline.integrations.framework_team import FrameworkTeam

_ARGUMENTS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers"),
)


class TeamDataLoader(LoaderAttributes):
    """A DataLoader in the place of Accelerate's `DataLoaderShard`.

    Accelerate fetches one batch ahead, to know the last one. A team counts a batch as taken when it is fetched, so here
    the last one is known by its number, where all workers have equally many.
    """

    remainder = -1
    """Samples of the last batch; -1 in training, where no batch is filled up with samples of another."""
    use_stateful_dataloader = False

    def __init__(
        self,
        loader: DataLoader[Any],
        workers: FrameworkTeam,
        evaluates: Callable[[], bool],
        native: Callable[[], Any],
        *,
        device: Any = None,
        seedable: bool = False,
        data_seed: int | None = None,
    ) -> None:
        """evaluates: True while the script evaluates. native: makes Accelerate's own loader, for evaluation.

        seedable: replace a random sampler by Accelerate's, which draws the same order for the same seed and epoch.
        """
        self._workers, self._evaluates, self._make_native, self._device = workers, evaluates, native, device
        self._plain, self._native = loader, None
        sampler = loader.sampler
        if seedable and isinstance(sampler, RandomSampler) and loader.batch_size is not None:
            sampler = SeedableRandomSampler(
                data_source=sampler.data_source,
                replacement=sampler.replacement,
                num_samples=sampler._num_samples,
                generator=sampler.generator,
                data_seed=data_seed,
            )
            loader = with_sampler(loader, sampler)
        self._loader = loader
        self._training = workers.loader(loader)
        self._skipped = 0
        """Batches to leave out at the beginning of the next epoch."""
        self.end_of_dataloader = False
        self.gradient_state = GradientState()
        self.iteration = 0

    @property
    def native(self) -> Any:
        """Accelerate's own loader, which divides its batches among all processes."""
        if self._native is None:
            self._native = self._make_native()
        return self._native

    def __len__(self) -> int:
        return len(self._training) - self._skipped

    def __iter__(self) -> Iterator[Any]:
        if self._evaluates():
            self._workers.begin_evaluation()
            yield from self.native
            return
        self.set_epoch(self.iteration)
        self.end_of_dataloader = False
        self.gradient_state._add_dataloader(self)
        last, skipped = len(self._training), self._skipped
        self._skipped = 0
        try:
            for number, batch in enumerate(self._training, 1):
                self.end_of_dataloader = number == last and not self._workers.unequal
                if number > skipped:
                    yield batch if self._device is None else send_to_device(batch, self._device)
            self.iteration += 1
        finally:
            self.gradient_state._remove_dataloader(self)

    def skipping(self, count: int) -> TeamDataLoader:
        """This loader, whose next epoch begins after so many batches."""
        self._skipped = count
        return self

    def set_epoch(self, epoch: int) -> None:
        self.iteration = epoch
        counted: tuple[Any, ...] = (self._loader.sampler, self._loader.batch_sampler, self._loader.dataset)
        for one in counted:
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)

    def get_sampler(self) -> Any:
        return get_sampler(self._loader) if self._loader is self._plain else self._loader.sampler

    def set_sampler(self, sampler: Any) -> None:
        """Take the state of a saved sampler; only Accelerate's own has one."""
        if not isinstance(sampler, SeedableRandomSampler):
            raise UsageError("the sampler of a loader of the team cannot be replaced")
        vars(self._loader.sampler).update(vars(sampler))

    @property
    def total_batch_size(self) -> int:
        return int(self._training.batch_size or 1) * self._workers.size

    @property
    def total_dataset_length(self) -> int:
        return len(self._loader.dataset)  # type: ignore[arg-type]


def with_sampler(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """The same loader with another sampler."""
    options = {name: getattr(loader, name) for name in _ARGUMENTS}
    if not loader.num_workers:
        options = {name: options[name] for name in ("num_workers", "collate_fn", "pin_memory", "generator")}
    return DataLoader(
        loader.dataset, batch_size=loader.batch_size, sampler=sampler, drop_last=loader.drop_last, **options
    )
