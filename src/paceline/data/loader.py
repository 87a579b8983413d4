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

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from torch.utils.data import DataLoader, DistributedSampler

from paceline.config import positive
from paceline.data.balance import Balancer
from paceline.data.drawing import OrderDrawing
from paceline.data.epochs import EpochLeft
from paceline.data.fetched_batches import fetched
from paceline.data.place import LoaderPlace
from paceline.data.shares import EpochShares, Shares, check_suffices, has_batch_sampler, rounds_ahead
from paceline.data.team_view import TeamView
from paceline.data.user_loader import UserLoader
from paceline.errors import UsageError

_NEVER = 1 << 62


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
        self._drawing = OrderDrawing(loader, batches=loader.batch_sampler is not None)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[Any]]:
        self._drawing.begin()
        return self._drawn()

    def _drawn(self) -> Iterator[list[Any]]:
        batches = self._loader.batch_sampler is not None
        yield from (each if batches else [each] for each in self._order(self._drawing, batches=batches))


class _Singles:
    """A sampler for a loader without batches: one sample at a time."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return (batch[0] for batch in iter(self._batches))


def with_batches_from(loader: DataLoader[Any], batches: Batches, *, workers: int) -> DataLoader[Any]:
    """The user's loader with `workers` processes and another batch sampler, and everything else as it is."""
    sampler: dict[str, Any] = {"batch_sampler": batches}
    if loader.batch_sampler is None:
        sampler = {"batch_size": None, "sampler": _Singles(batches)}
    return DataLoader(
        loader.dataset, **sampler, **loading_options(loader, workers=workers), collate_fn=loader.collate_fn
    )


def loading_options(loader: DataLoader[Any], *, workers: int) -> dict[str, Any]:
    """The options of the user's loader that say how it loads, with `workers` processes."""
    options: dict[str, Any] = {
        "num_workers": workers,
        "pin_memory": loader.pin_memory,
        "generator": loader.generator,
    }
    if workers:
        options |= {
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
        }
    return options


def undivided(loader: DataLoader[Any], order: _Order) -> DataLoader[Any]:
    """The user's loader, with its samples in an order that one worker draws for all."""
    return with_batches_from(loader, _Undivided(loader, order), workers=loader.num_workers)


class TeamLoader(UserLoader):
    """This worker's share of a DataLoader; iterated like the DataLoader itself."""

    def __init__(
        self,
        loader: DataLoader[Any],
        team: TeamView,
        *,
        global_batch: int | None = None,
        balance: bool = False,
        per_worker: bool = False,
        number: int = 0,
        changed: Callable[[int, list[int]], None] = lambda _start, _shares: None,
    ) -> None:
        """per_worker: the loader's batch is one worker's, and all workers take equally many batches of an epoch.

        number: of the loader, among those of the team.
        """
        super().__init__(loader)
        self.number = number
        self._team, self._asked, self._per_worker = team, global_batch, per_worker
        self.global_batch = global_batch_of(loader, team.replicas, global_batch, per_worker=per_worker)
        """Samples in a round, all workers together."""
        self.balanced = balance
        self._balancer = Balancer(team.replicas, self.global_batch, on=balance, changed=changed)
        self._shares = Shares(loader, team, self._balancer, self.global_batch, number, per_worker=per_worker)
        self._inner = with_batches_from(loader, self._shares, workers=loader.num_workers)
        self._undivided = undivided(loader, functools.partial(self._shares.draw, evaluates=True))
        self._rounds = 0
        self._epochs = 0
        """Epochs of training that have begun."""
        self._running: list[EpochShares] = []
        """Those that the script is in: one, unless it iterates twice at the same time."""
        self._lost = False
        """True if a worker was lost in this epoch."""

    @property
    def has_place(self) -> bool:
        # The samples of a lost worker are not in the order any more.
        return not self._lost and len(self._running) <= 1

    def place(self, left: EpochLeft | None) -> LoaderPlace | None:
        rest = self._shares.rest(self._running[-1]) if self._running else []
        over = rest == []
        return LoaderPlace(self._epochs - (not over), rest or None, has_batch_sampler(self._loader))

    def _continue(self, place: LoaderPlace) -> None:
        self._shares.left, self._epochs = place.left, place.epoch

    def _whole(self) -> Iterable[Any]:
        return self._loader if self._team.replicas == self._team.size else self._undivided

    def _length(self) -> int:
        return len(self._shares)

    def _evaluates(self) -> bool:
        return self._team.evaluates

    def _steps(self) -> int | None:
        return self._team.steps if self._team.replicas > 1 else None

    def _before_epoch(self) -> None:
        if self._team.passes_by(self):
            self._epochs_over = 1
            self._epochs += 1

    def _train(self) -> Iterator[Any]:
        check_divisible(self._loader, self.global_batch, self._team.replicas, self._asked)
        if self._per_worker and not has_batch_sampler(self._loader):
            count = len(self._loader.sampler)  # type: ignore[arg-type]
            check_suffices(count if self._loader.batch_sampler else count % self._team.replicas, self._team.replicas)
        epoch, self._lost = self._shares.begin(self._rounds), False
        self._rounds += len(self._shares)
        return self._take(fetched(iter(self._inner)), epoch)

    def _take(self, batches: Iterator[Any], epoch: EpochShares) -> Iterator[Any]:
        """Tells the team of each batch that the script gets."""
        self._epochs += 1
        self._running.append(epoch)
        try:
            for batch in announced(batches, functools.partial(self._team.ask_batch, self)):
                samples, weight, number, epoch.start = epoch.given.popleft()
                self._team.take_batch(samples, weight, self, number)
                yield batch
        finally:
            self._running.remove(epoch)
        self._team.finish_epoch()

    def lose(self, ranks: set[int], round_number: int, counted: bool, takers: list[int]) -> None:
        """Removes workers that were lost in this round; `counted` if their parts of it were trained on.

        takers: the ranks that still take part in the epoch, and get the samples of the lost ones.
        """
        self._lost = True
        self._shares.orphans.lose(ranks, round_number + counted, round_number + rounds_ahead(self._loader), takers)

    # -- workers that join -------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The number of the epoch that the script is in, or begins."""
        return self._epochs - bool(self._running)

    @property
    def open(self) -> bool:
        """True if a worker can join in the middle of this epoch."""
        return len(self._running) == 1 and self._running[0].order is not None

    @property
    def next_round(self) -> int | None:
        """The first round that a worker which joins now can have a part of; None if all are cut."""
        return None if self._running[0].whole else self._running[0].next

    def state(self) -> dict[str, Any]:
        """The epoch, for a worker that joins in its middle."""
        return self._shares.state(self._running[0])

    def enter(self, state: dict[str, Any], round_number: int) -> None:
        """Begins with an epoch that the others are in, who have updated with this round."""
        self._shares.orphans.restore(state)
        self._shares.entered, self._rounds = {**state, "since": round_number + 1}, state["first"]

    def gain(self, rank: int, back: int | None) -> None:
        """A worker has joined, and has a part of the rounds from this one on, or from the next epoch on."""
        self._lost = True
        self._shares.orphans.gain(rank, back)
        if self._shares.entered is not None:  # it is this worker
            self._shares.entered["back"] = _NEVER if back is None else back

    def measure(self, paces: Sequence[tuple[float, int]], round_number: int) -> None:
        """Adds each worker's seconds and samples of a round, by which a balanced loader splits later ones."""
        self._balancer.measure(paces, round_number, rounds_ahead(self._loader))


def announced(batches: Iterator[Any], announce: Callable[[], None]) -> Iterator[Any]:
    """The same batches, with a call of `announce` before each is requested."""
    announce()
    for batch in batches:
        yield batch
        announce()


def global_batch_of(
    loader: DataLoader[Any], workers: int, global_batch: int | None, *, per_worker: bool = False
) -> int:
    """Samples in a round, all workers together: the loader's own batch, unless another size is given.

    per_worker: the loader's batch is one worker's.
    """
    if per_worker and loader.batch_size is not None:
        return loader.batch_size * workers
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


def users_own(loader: Any) -> Any:
    """The user's loader behind one that a team gave out for it, as where a notebook's cell is run again."""
    return loader._loader if isinstance(loader, UserLoader) else loader


def check_loader(loader: Any) -> None:
    """Raises a UsageError for what is not a loader."""
    if not isinstance(loader, DataLoader):
        raise UsageError(f"setup takes torch.utils.data.DataLoader objects last; it got a {type(loader).__name__}")
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise UsageError(
            f"the loader has a DistributedSampler, which draws one of {sampler.num_replicas} parts of the samples, and "
            "the team would divide that part once more; leave it out, and let the loader shuffle"
        )
