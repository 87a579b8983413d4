"""A DataLoader of which each worker gets its share.

The lead draws the order of an epoch with the user's own sampler and sends it to the others. The order is cut into
rounds, one batch of the user's loader each unless the script asks for another size, and a round into one part per
worker. Datasets, collate functions, loader processes and pinned memory are the user's own: only the batch sampler is
replaced.

An epoch that is only evaluated (under `torch.no_grad`, or with the model in evaluation mode) is not divided: every
worker that iterates gets the user's own loader. Workers of one replica call its model together, so one of them draws
the order for all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.config import positive
from paceline.data.balance import Balancer
from paceline.data.keys import pack_for_all, unpack
from paceline.data.orphaned_samples import OrphanedSamples
from paceline.data.split import even, scaled
from paceline.errors import UsageError


class TeamView(Protocol):
    """The part of a team that a loader uses."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def lead(self) -> int:
        """The rank that draws the order of an epoch."""

    @property
    def replica(self) -> int:
        """The worker's replica of the model; workers of one replica get the same batches."""

    @property
    def replicas(self) -> int: ...

    @property
    def lockstep(self) -> bool:
        """True if every worker needs a batch in every round, if only one of weight 0."""

    @property
    def evaluates(self) -> bool:
        """True if the script evaluates the model now, instead of training it."""

    @property
    def steps(self) -> int:
        """Steps of the optimizer so far."""

    def ask_batch(self) -> None:
        """Notes that the script asks for its next batch."""

    def from_lead(self, payload: bytes) -> bytes:
        """The lead's payload, on every worker."""

    def take_batch(self, samples: int, weight: float, loader: TeamLoader, round_number: int) -> None:
        """Notes that a batch goes to the script now."""

    def finish_epoch(self) -> None:
        """Notes that this worker has no more batches in this epoch."""


class _Shares:
    """A batch sampler of this worker's part of every round, which keeps the size of each part until it is used."""

    def __init__(self, loader: DataLoader[Any], team: TeamView, balancer: Balancer, total: int) -> None:
        self._loader, self._team, self._balancer, self._total = loader, team, balancer, total
        self.orphans = OrphanedSamples(team.replicas)
        self._custom = has_batch_sampler(loader)
        self.first = 0
        """The number of this epoch's first round, counted over all epochs."""
        self.given: deque[tuple[int, float, int]] = deque()
        """Samples, weight and round of each part that the loader has and the script has not."""

    def __len__(self) -> int:
        """Rounds in an epoch, with or without a part for this worker."""
        if self._custom:
            return len(self._loader.batch_sampler)  # type: ignore[arg-type]
        count = len(self._loader.sampler)  # type: ignore[arg-type]
        return count // self._total if self._loader.drop_last else math.ceil(count / self._total)

    def __iter__(self) -> Iterator[list[Any]]:
        number = self.first
        for parts in self._rounds():
            mine = parts[self._team.replica]
            if mine:
                whole = sum(len(part) for part in parts)
                self.given.append((len(mine), len(mine) / whole, number))
                yield mine
            elif self._team.lockstep or self._custom:  # a batch sampler's next batch may be larger
                self.given.append((0, 0.0, number))
                yield next(part for part in parts if part)
            number += 1

    def _rounds(self) -> Iterator[list[list[Any]]]:
        """Per round, one list of indices per replica."""
        order = self.order(self._loader.batch_sampler if self._custom else self._loader.sampler, batches=self._custom)
        number, start, orphans = self.first, 0, self.orphans
        while True:
            ranks = orphans.sharers(number)
            if len(order) - start < self._whole(ranks):
                if start >= len(order):
                    ranks = orphans.takers
                # The samples of lost workers follow here: only the last round may be short, since a worker without a
                # part in it is done with the epoch.
                left = orphans.take()
                order += left if self._custom else [key for part in left for key in part]
            if start >= len(order):
                return
            parts, start = self._cut(order, start, number, ranks)
            if not parts:
                return
            yield orphans.note(number, parts)
            number += 1

    def _whole(self, ranks: list[int]) -> int:
        """Samples, or batches of a batch sampler, in a round of these workers."""
        if self._custom:
            return 1
        return len(ranks) if self._loader.batch_sampler is None else self._total

    def _cut(self, order: list[Any], start: int, number: int, ranks: list[int]) -> tuple[list[list[Any]], int]:
        """The next round: a batch, or a part of one, for each of these ranks, and the next start; empty if dropped."""
        parts: list[list[Any]] = [[] for _ in range(self._team.replicas)]
        total = self._whole(ranks)
        end = min(start + total, len(order))
        drawn = order[start] if self._custom else order[start:end]
        if end - start < total and self._loader.drop_last:
            return [], start
        shares = self._balancer.shares(number) if len(ranks) == len(parts) else even(total, len(ranks))
        first = 0
        for rank, share in zip(ranks, scaled(shares, len(drawn)), strict=True):
            parts[rank] = drawn[first : first + share]
            first += share
        return parts, end

    def order(self, sampler: Any, *, batches: bool) -> list[Any]:
        """The order drawn by the lead's sampler, on every worker."""
        if self._team.size == 1:
            return list(sampler)
        payload = b""
        while True:
            if self._team.rank == self._team.lead:
                payload = pack_for_all(sampler, batches=batches)
            # The lead may be lost before it draws; then the next one does.
            if payload_of_lead := self._team.from_lead(payload):
                break
        return unpack(payload_of_lead)


class Batches(Protocol):
    """A batch sampler."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[list[Any]]: ...


class _Order(Protocol):
    """Draws the output of a sampler on one worker, for all."""

    def __call__(self, sampler: Any, *, batches: bool) -> list[Any]:
        """batches: True if each item is a whole batch."""


class _Undivided:
    """A batch sampler of the user's own batches, in an order that one worker draws."""

    def __init__(self, loader: DataLoader[Any], order: _Order) -> None:
        self._loader, self._order = loader, order

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[Any]]:
        if self._loader.batch_sampler is None:
            yield from ([key] for key in self._order(self._loader.sampler, batches=False))
        else:
            yield from self._order(self._loader.batch_sampler, batches=True)


class _Singles:
    """A sampler for a loader without batches: one sample at a time."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            yield batch[0]


def with_batches_from(loader: DataLoader[Any], batches: Batches, *, workers: int) -> DataLoader[Any]:
    """The user's loader with `workers` processes and another batch sampler, and everything else as it is."""
    sampler: dict[str, Any] = {"batch_sampler": batches}
    if loader.batch_sampler is None:
        sampler = {"batch_size": None, "sampler": _Singles(batches)}
    processes: dict[str, Any] = {}
    if workers:
        processes = {
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
        }
    return DataLoader(
        loader.dataset,
        **sampler,
        **processes,
        num_workers=workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        generator=loader.generator,
    )


def undivided(loader: DataLoader[Any], order: _Order) -> DataLoader[Any]:
    """The user's loader, with its samples in an order that one worker draws for all."""
    return with_batches_from(loader, _Undivided(loader, order), workers=loader.num_workers)


def has_batch_sampler(loader: DataLoader[Any]) -> bool:
    """True if the loader was given a batch sampler. Then it has no batch size: not even with torch's BatchSampler."""
    return loader.batch_sampler is not None and loader.batch_size is None


class UserLoader:
    """Base of loaders that take the place of the user's own."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._evaluated = False
        """True if the last epoch was only evaluated."""

    def __len__(self) -> int:
        return len(self._loader) if self._evaluated else self._length()

    def _length(self) -> int:
        """Batches in an epoch of training."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        self._evaluated = self._evaluates()
        yield from self._evaluate() if self._evaluated else self._train()

    def _evaluate(self) -> Iterator[Any]:
        """The batches of an epoch that is only evaluated; refuses to go on if the script trains on them."""
        made = self._steps() if torch.is_grad_enabled() else None
        for batch in self._whole():
            yield batch
            if made is not None and self._steps() != made:
                raise UsageError(
                    "the model is trained in evaluation mode, in which every worker gets the whole loader; call "
                    "model.train(), and eval() on layers that are to keep their statistics"
                )

    def _steps(self) -> int | None:
        """Steps of the optimizer so far; None where training does not divide batches either."""
        raise NotImplementedError

    def _whole(self) -> Iterable[Any]:
        """The batches of an epoch that is only evaluated."""
        return self._loader

    def _evaluates(self) -> bool:
        """True if the script evaluates the model now, instead of training it."""
        raise NotImplementedError

    def _train(self) -> Iterator[Any]:
        """This worker's batches of an epoch of training."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Other attributes are those of the user's loader: dataset, collate_fn, batch_size, …"""
        if name.startswith("__") or "_loader" not in vars(self):
            raise AttributeError(name)
        return getattr(self._loader, name)


class TeamLoader(UserLoader):
    """This worker's share of a DataLoader; iterated like the DataLoader itself."""

    def __init__(
        self,
        loader: DataLoader[Any],
        team: TeamView,
        *,
        global_batch: int | None = None,
        balance: bool = False,
        changed: Callable[[int, list[int]], None] = lambda _start, _shares: None,
    ) -> None:
        super().__init__(loader)
        self._team, self._asked = team, global_batch
        self.global_batch = global_batch_of(loader, team.replicas, global_batch)
        """Samples in a round, all workers together."""
        self._balancer = Balancer(team.replicas, self.global_batch, on=balance, changed=changed)
        self._shares = _Shares(loader, team, self._balancer, self.global_batch)
        self._inner = with_batches_from(loader, self._shares, workers=loader.num_workers)
        self._undivided = undivided(loader, self._shares.order)
        self._rounds = 0

    def _whole(self) -> Iterable[Any]:
        return self._loader if self._team.replicas == self._team.size else self._undivided

    def _length(self) -> int:
        return len(self._shares)

    def _evaluates(self) -> bool:
        return self._team.evaluates

    def _steps(self) -> int | None:
        return self._team.steps if self._team.replicas > 1 else None

    def _train(self) -> Iterator[Any]:
        check_divisible(self._loader, self.global_batch, self._team.replicas, self._asked)
        self._shares.given.clear()
        self._shares.first = self._rounds
        self._shares.orphans.begin(self._rounds)
        self._rounds += len(self._shares)
        for batch in announced(self._inner, self._team.ask_batch):
            samples, weight, number = self._shares.given.popleft()
            self._team.take_batch(samples, weight, self, number)
            yield batch
        self._team.finish_epoch()

    def lose(self, ranks: set[int], round_number: int, counted: bool, takers: list[int]) -> None:
        """Removes workers that were lost in this round; `counted` if their parts of it were trained on.

        takers: the ranks that still take part in the epoch, and get the samples of the lost ones.
        """
        self._shares.orphans.lose(ranks, round_number + counted, round_number + self._ahead, takers)

    @property
    def _ahead(self) -> int:
        """The most rounds that the loader's processes fetch ahead."""
        return 1 + self._loader.num_workers * (self._loader.prefetch_factor or 0)

    def measure(self, paces: Sequence[tuple[float, int]], round_number: int) -> None:
        """Adds each worker's seconds and samples of a round, by which a balanced loader splits later ones."""
        self._balancer.measure(paces, round_number, self._ahead)


def announced(batches: Iterable[Any], announce: Callable[[], None]) -> Iterator[Any]:
    """The same batches, with a call of `announce` before each is requested."""
    iterator = iter(batches)
    announce()
    for batch in iterator:
        yield batch
        announce()


def global_batch_of(loader: DataLoader[Any], workers: int, global_batch: int | None) -> int:
    """Samples in a round, all workers together: the loader's own batch, unless another size is given."""
    if global_batch is not None and positive("global_batch", global_batch) < workers:
        raise UsageError(f"global_batch is {global_batch}; it must be at least the number of workers, {workers}")
    return (loader.batch_size and global_batch) or loader.batch_size or workers


def batch_growth(loaders: Sequence[DataLoader[Any]], global_batch: int | None) -> float | None:
    """Samples of the global batch, relative to the first loader's own; None if no loader has a batch size."""
    sizes = [loader.batch_size for loader in loaders if loader.batch_size is not None]
    if not sizes:
        return None
    return 1.0 if global_batch is None else global_batch / sizes[0]


def check_divisible(loader: DataLoader[Any], global_batch: int, workers: int, asked: int | None) -> None:
    """Raises a UsageError if an epoch cannot be divided among the workers; asked: the script's own `global_batch`."""
    if loader.batch_size is None and asked not in (None, workers):
        raise UsageError(
            f"global_batch is {asked}, but the loader has no batch size to change: its batches come from a batch "
            "sampler, or it has none; leave global_batch out"
        )
    if loader.batch_size is not None and global_batch < workers:
        raise UsageError(
            f"the loader's batches of {global_batch} samples cannot be divided among {workers} workers; "
            f"give setup a global_batch of at least {workers}, or use fewer workers"
        )


def check_loader(loader: Any) -> None:
    """Raises a UsageError for a loader that cannot be shared out."""
    if not isinstance(loader, DataLoader):
        raise UsageError(f"setup takes torch.utils.data.DataLoader objects last; it got a {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            "the loader has no length (its dataset is an IterableDataset), so it cannot be shared out; "
            "use a map-style dataset"
        )
    try:
        len(loader)
    except TypeError:
        raise UsageError(
            "the loader has no length, so it cannot be shared out; give its dataset and sampler a __len__"
        ) from None
