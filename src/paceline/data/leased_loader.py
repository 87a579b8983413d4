"""A DataLoader whose samples are leased: a worker gets the next minibatch when it needs one.

Datasets, collate functions, loader processes and pinned memory are the user's own: only the batch sampler is replaced
by one that asks for leases. An epoch that is only evaluated is not leased: every worker gets the user's own loader;
workers that share one model get it in the order that the first of them draws.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch.utils.data import DataLoader

from paceline.data.drawing import OrderDrawing
from paceline.data.epochs import EpochLeft
from paceline.data.fetched_batches import fetched
from paceline.data.keys import pack, pack_for_all, restored, unpack
from paceline.data.ledger import Lease
from paceline.data.loader import announced, check_divisible, global_batch_of, undivided, with_batches_from
from paceline.data.place import LoaderPlace
from paceline.data.shares import check_suffices, has_batch_sampler, rounds_of
from paceline.data.split import divided, even
from paceline.data.stream_epoch import StreamPlan
from paceline.data.user_loader import UserLoader
from paceline.errors import TeamError, UsageError


class LeasedEpoch(msgspec.Struct, frozen=True):
    """The samples of an epoch, to be leased."""

    order: bytes
    """Keys of samples, or of whole batches, as msgpack."""
    sizes: list[int]
    """Sizes of the minibatches, in turn; empty for whole batches."""
    drop_last: bool = False
    stream: StreamPlan | None = None
    """How a stream is given out, which has no order."""


class Lender(Protocol):
    """The source of leases."""

    size: int
    in_turns: bool
    """True if the workers take samples in the order of their ranks."""
    steps: int
    """Steps of the optimizer so far."""
    lengths: tuple[int, Sequence[tuple[int, int]]]
    """Of the stream whose epoch was over last: how often it was begun before, and the samples of its sources."""

    @property
    def evaluates(self) -> bool:
        """True if the script evaluates the model now, instead of training it."""

    @property
    def splits(self) -> bool:
        """True if several workers share one model, and call it together."""

    def from_first(self, draw: Callable[[], bytes]) -> bytes:
        """What the first worker that shares this model draws."""

    def ask_batch(self) -> None:
        """Notes that the script asks for its next batch."""

    def enter(self, loader: int, epoch: int, draw: Callable[[], LeasedEpoch], shards: int = 0) -> bytes:
        """Begins an epoch, and waits until it is open; `draw` is called on one worker.

        shards: the digest of a stream's shards. Returns the note of the worker that has drawn.
        """

    def ask(self, loader: int, epoch: int, *, ahead: bool, lane: int = 0, most: int = 0) -> Lease | None:
        """The next lease; None if the epoch is over or, if fetched `ahead`, there is none for now.

        lane, most: of a stream, the process that would read the samples, and how many are needed if not a minibatch.
        """

    def keeps(self, lease: Lease, last: bool) -> bool:
        """True if a lease that was fetched ahead is still this worker's, which begins it now.

        last: no more leases are fetched ahead.
        """

    def begin(self, minibatch: Minibatch) -> None:
        """Notes that a minibatch goes to the script now."""

    def skip(self, lease: Lease) -> None:
        """Notes that a lease has turned out to have no samples."""

    def report(
        self,
        loader: int,
        turn: int,
        marks: Sequence[tuple[int, int, int]] = (),
        ends: Sequence[tuple[int, int]] = (),
        lost: int = 0,
    ) -> None:
        """Tells what was found in a stream, as `StreamRead` does."""

    def from_replica(self, payload: bytes) -> list[bytes]:
        """The payloads of all workers that share this model."""

    def quit(self, loader: int, epoch: int) -> None:
        """Notes that the script has left the epoch before its end."""


class Minibatch(NamedTuple):
    """The samples that a script trains on at once."""

    leases: Sequence[Lease]
    samples: int
    share: float | None = None
    """Their share of the batch that they are a part of; None if that is not known."""
    batch: int = -1
    """That batch, counted over all epochs; -1 if it is not known."""


class _Leases:
    """A batch sampler that asks for leases, and keeps them until their batches are used."""

    def __init__(self, lender: Lender, loader: int, length: int, *, ahead: bool) -> None:
        self._lender, self._loader, self._length, self._ahead = lender, loader, length, ahead
        self.epoch = 0
        self.given: deque[Lease] = deque()
        self.enter: Callable[[], None] = lambda: None
        """Called before the first lease is asked for."""
        self._over = False
        """True if there was no more to ask for."""

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[Any]]:
        self.enter()
        self._over = False
        while (lease := self._lender.ask(self._loader, self.epoch, ahead=self._ahead)) is not None:
            self.given.append(lease)
            yield restored(lease.keys)
        self._over = True

    def take(self) -> Lease | None:
        """The lease of the next batch; None if another worker has got it."""
        lease = self.given.popleft()
        return lease if not self._ahead or self._lender.keeps(lease, self._over) else None


class LeasedLoader(UserLoader):
    """The minibatches of a DataLoader that are leased to this worker; iterated like the DataLoader itself."""

    def __init__(
        self,
        loader: DataLoader[Any],
        lender: Lender,
        number: int,
        *,
        global_batch: int | None = None,
        per_worker: bool = False,
    ) -> None:
        """per_worker: the loader's batch is one worker's minibatch."""
        super().__init__(loader)
        self._lender, self._number, self._asked, self._per_worker = lender, number, global_batch, per_worker
        self.global_batch = global_batch_of(loader, lender.size, global_batch, per_worker=per_worker)
        """Samples in one minibatch of every worker together."""
        self._sizes = even(self.global_batch, lender.size)
        self._custom = has_batch_sampler(loader)
        self._drawing = OrderDrawing(loader)
        self._undivided = undivided(loader, self._order)
        self._epoch = 0
        self._entered: int | None = None
        """The epoch that this worker is in."""
        self._resumed: LoaderPlace | None = None
        """Where another run was, until this one goes on from there."""
        self._left: list[Any] | None = None
        """Of the current epoch, what another run had left of it."""
        self._batch_of: dict[int, list[int]] = {}
        """Of the last epochs that this worker has drawn: by index of a minibatch, the batch that it is a part of."""
        here = _Leases(lender, number, self._length(), ahead=False)
        self._parts = [(here, with_batches_from(loader, here, workers=0))]
        if loader.num_workers:
            # The loader's own processes fetch ahead; samples returned at the end of an epoch are loaded here.
            ahead = _Leases(lender, number, self._length(), ahead=True)
            # Loading here must not draw from the user's random numbers: in plain torch only one loader does.
            self._parts[0][1].generator = torch.Generator()
            self._parts.insert(0, (ahead, with_batches_from(loader, ahead, workers=loader.num_workers)))

    def place(self, left: EpochLeft | None) -> LoaderPlace | None:
        if left is None:
            return self._resumed or LoaderPlace(0, None, self._custom)
        if left.stream:
            return None
        parts = sorted(left.parts, key=lambda part: (part[0] < 0, part[0]))
        kept: list[Any] = [key for _, keys in parts for key in restored(keys)]
        if self._custom:
            batches: dict[tuple[bool, int], list[Any]] = {}
            batch_of = self._batch_of.get(left.number, [])
            for place, (first, keys) in enumerate(parts):
                whole = first < 0 or self._per_worker or first >= len(batch_of)
                where = (True, place) if whole else (False, batch_of[first])
                batches.setdefault(where, []).extend(restored(keys))
            kept = list(batches.values())
        return LoaderPlace(left.number + (not kept), kept or None, self._custom)

    def _continue(self, place: LoaderPlace) -> None:
        self._resumed, self._epoch = place, place.epoch

    def _minibatch(self, lease: Lease) -> Minibatch:
        if self._custom:
            return Minibatch([lease], lease.samples)
        number, count = self._batch_in_epoch(lease), self._count
        whole = count - number * self.global_batch
        if not self._in_rounds or number < self._rounds_in(count) - 1 or self._drops:
            whole = min(self.global_batch, whole)
        return Minibatch([lease], lease.samples, lease.samples / whole, lease.epoch * self._length() + number)

    def _batch_in_epoch(self, lease: Lease) -> int:
        return lease.first // (self._lender.size if self._in_rounds else self.global_batch)

    @property
    def _in_rounds(self) -> bool:
        """True if every worker has a minibatch of each batch, and a batch is one of each worker."""
        return self._per_worker and self._lender.in_turns

    @property
    def _count(self) -> int:
        """Samples of the current epoch, or of what is left of it."""
        return len(self._loader.sampler) if self._left is None else len(self._left)  # type: ignore[arg-type]

    @property
    def _drops(self) -> bool:
        """True if a last batch that is too small is left out; what is left of an epoch has none."""
        return bool(self._loader.drop_last) and self._left is None

    def _length(self) -> int:
        """Minibatches in an epoch for each worker, if all are equally fast."""
        per_worker = self._in_rounds or (self._custom and self._per_worker)
        return rounds_of(self._loader, self.global_batch, self._lender.size, per_worker=per_worker)

    def _rounds_in(self, count: int) -> int:
        """As `_length`, of an epoch of so many samples, or batches of a batch sampler."""
        if self._left is None:
            return self._length()
        each = self._lender.size if self._custom else self.global_batch
        rounds, rest = divmod(count, each)
        return rounds + (rest > 0 and not (self._in_rounds and rounds and rest < self._lender.size))

    def _whole(self) -> Iterable[Any]:
        return self._undivided if self._lender.splits else self._loader

    def _order(self, sampler: Any, *, batches: bool) -> list[Any]:
        return unpack(self._lender.from_first(lambda: pack_for_all(sampler, batches=batches)))

    def _evaluates(self) -> bool:
        return self._lender.evaluates

    def _steps(self) -> int | None:
        return self._lender.steps if self._lender.size > 1 else None

    def _train(self) -> Iterator[Any]:
        check_divisible(self._loader, self.global_batch, self._lender.size, self._asked)
        self._quit(self._entered)  # by the script, which begins the next epoch
        epoch = self._epoch
        self._epoch += 1
        resumed, self._resumed = self._resumed, None
        self._left = None if resumed is None else resumed.left

        def enter() -> None:
            self._lender.enter(self._number, epoch, self._draw)
            self._entered = epoch

        (leases, inner), *_ = self._parts
        leases.epoch = epoch
        leases.given.clear()
        # After the loader has drawn its own seed, so that the order is plain torch's for the same seed.
        leases.enter = enter
        self._drawing.begin()
        return self._take(epoch, fetched(iter(inner)))

    def _take(self, epoch: int, first: Iterator[Any]) -> Iterator[Any]:
        """Leases samples for each batch that the script gets; first: the batches of the first part."""
        try:
            for number, (leases, inner) in enumerate(self._parts):
                if number:
                    leases.epoch = epoch
                    leases.given.clear()
                for batch in announced(fetched(iter(inner)) if number else first, functools.partial(self._ask, epoch)):
                    if (lease := leases.take()) is not None:
                        self._lender.begin(self._minibatch(lease))
                        yield batch
            self._entered = None
        except TeamError:
            self._entered = None  # there is no server left to return samples to
            raise
        finally:
            self._quit(epoch)

    def _ask(self, epoch: int) -> None:
        """The script asks for its next batch of an epoch."""
        if epoch != self._epoch - 1:
            raise UsageError(
                "the loader is iterated twice at the same time, but a server leases one epoch after the other; "
                "give setup another DataLoader for the second iteration"
            )
        self._lender.ask_batch()

    def _quit(self, epoch: int | None) -> None:
        """Leaves an epoch, if this worker is in it."""
        if epoch is not None and epoch == self._entered:
            self._entered = None
            self._lender.quit(self._number, epoch)

    def _draw(self) -> LeasedEpoch:
        """Draws the order of an epoch with the user's own sampler, unless another run has begun it."""
        drawn: list[Any]
        if self._left is not None:
            drawn = self._left
        elif self._custom:
            drawn = [list(batch) for batch in self._drawing]
        else:
            drawn = list(self._drawing)
        if self._in_rounds:
            return LeasedEpoch(pack(self._rounds(drawn), batches=True), [], False)
        if not self._custom:
            return LeasedEpoch(pack(drawn, batches=False), self._sizes, self._drops)
        if self._per_worker:
            return LeasedEpoch(pack(drawn, batches=True), [], False)
        least = min(map(len, drawn[:-1]), default=self._lender.size)
        if self._lender.in_turns and least < self._lender.size:
            # An update would have parts of different batches.
            raise UsageError(
                f"a batch of the loader's batch sampler has {least} samples, which cannot be divided among "
                f"{self._lender.size} workers; only the last one of an epoch may have so few"
            )
        parts = [divided(batch, self._lender.size) for batch in drawn]
        epoch = self._epoch - 1
        self._batch_of = {number: known for number, known in self._batch_of.items() if number == epoch - 1}
        self._batch_of[epoch] = [number for number, some in enumerate(parts) for _ in some]
        return LeasedEpoch(pack((part for some in parts for part in some), batches=True), [], False)

    def _rounds(self, order: list[Any]) -> Iterator[Sequence[Any]]:
        """The minibatches of an epoch, one of each worker in turn."""
        size, rounds = self._lender.size, self._rounds_in(len(order))
        each = size if self._custom else self.global_batch
        for number in range(rounds):
            rest = number == rounds - 1 and not self._drops
            batch = order[number * each : None if rest else (number + 1) * each]
            if self._custom and len(batch) == size:
                yield from batch
                continue
            samples = [key for one in batch for key in one] if self._custom else batch
            check_suffices(len(samples), size)
            yield from divided(samples, size)
