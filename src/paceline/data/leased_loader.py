"""A DataLoader whose samples are leased: a worker gets the next minibatch when it needs one.

Datasets, collate functions, loader processes and pinned memory are the user's own: only the batch sampler is replaced
by one that asks for leases. An epoch that is only evaluated is not leased: every worker gets the user's own loader;
workers that share one model get it in the order that the first of them draws.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import msgspec
import torch
from torch.utils.data import DataLoader

from paceline.data.keys import pack, pack_for_all, restored, unpack
from paceline.data.ledger import Lease
from paceline.data.loader import (
    UserLoader,
    announced,
    check_divisible,
    global_batch_of,
    has_batch_sampler,
    undivided,
    with_batches_from,
)
from paceline.data.split import divided, even
from paceline.errors import TeamError, UsageError


class LeasedEpoch(msgspec.Struct, frozen=True):
    """The samples of an epoch, to be leased."""

    order: bytes
    """Keys of samples, or of whole batches, as msgpack."""
    sizes: list[int]
    """Sizes of the minibatches, in turn; empty for whole batches."""
    drop_last: bool


class Lender(Protocol):
    """The source of leases."""

    size: int
    in_turns: bool
    """True if the workers take samples in the order of their ranks."""
    steps: int
    """Steps of the optimizer so far."""

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

    def enter(self, loader: int, epoch: int, draw: Callable[[], LeasedEpoch]) -> None:
        """Begins an epoch, and waits until it is open; `draw` is called on one worker."""

    def ask(self, loader: int, epoch: int, *, ahead: bool) -> Lease | None:
        """The next lease; None if the epoch is over or, if fetched `ahead`, there is none for now."""

    def begin(self, lease: Lease) -> None:
        """Notes that the lease's samples go to the script now."""

    def quit(self, loader: int, epoch: int) -> None:
        """Notes that the script has left the epoch before its end."""


class _Leases:
    """A batch sampler that asks for leases, and keeps them until their batches are used."""

    def __init__(self, lender: Lender, loader: int, length: int, *, ahead: bool) -> None:
        self._lender, self._loader, self._length, self._ahead = lender, loader, length, ahead
        self.epoch = 0
        self.given: deque[Lease] = deque()
        self.enter: Callable[[], None] = lambda: None
        """Called before the first lease is asked for."""

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[Any]]:
        self.enter()
        while (lease := self._lender.ask(self._loader, self.epoch, ahead=self._ahead)) is not None:
            self.given.append(lease)
            yield restored(lease.keys)


class LeasedLoader(UserLoader):
    """The minibatches of a DataLoader that are leased to this worker; iterated like the DataLoader itself."""

    def __init__(
        self, loader: DataLoader[Any], lender: Lender, number: int, *, global_batch: int | None = None
    ) -> None:
        super().__init__(loader)
        self._lender, self._number, self._asked = lender, number, global_batch
        self.global_batch = global_batch_of(loader, lender.size, global_batch)
        """Samples in one minibatch of every worker together."""
        self._sizes = even(self.global_batch, lender.size)
        self._custom = has_batch_sampler(loader)
        self._undivided = undivided(loader, self._order)
        self._epoch = 0
        here = _Leases(lender, number, self._length(), ahead=False)
        self._parts = [(here, with_batches_from(loader, here, workers=0))]
        if loader.num_workers:
            # The loader's own processes fetch ahead; samples returned at the end of an epoch are loaded here.
            ahead = _Leases(lender, number, self._length(), ahead=True)
            # Loading here must not draw from the user's random numbers: in plain torch only one loader does.
            self._parts[0][1].generator = torch.Generator()
            self._parts.insert(0, (ahead, with_batches_from(loader, ahead, workers=loader.num_workers)))

    def batch_of(self, lease: Lease) -> int:
        """The batch that a lease is a part of, counted over all epochs; -1 if that is not known."""
        return -1 if self._custom else lease.epoch * self._length() + lease.first // self.global_batch

    def share_of(self, lease: Lease) -> float | None:
        """A lease's share of the batch that it is a part of; None if that is not known."""
        if self._custom:
            return None
        left = len(self._loader.sampler) - lease.first // self.global_batch * self.global_batch  # type: ignore[arg-type]
        return len(lease.keys) / min(self.global_batch, left)

    def _length(self) -> int:
        """Minibatches in an epoch for each worker, if all are equally fast."""
        if self._custom:
            return len(self._loader.batch_sampler)  # type: ignore[arg-type]
        count = len(self._loader.sampler) / self.global_batch  # type: ignore[arg-type]
        return math.floor(count) if self._loader.drop_last else math.ceil(count)

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
        epoch = self._epoch
        self._epoch += 1
        entered = over = False

        def enter() -> None:
            nonlocal entered
            self._lender.enter(self._number, epoch, self._draw)
            entered = True

        # After the loader has drawn its own seed, so that the order is plain torch's for the same seed.
        self._parts[0][0].enter = enter
        try:
            for leases, inner in self._parts:
                leases.epoch = epoch
                leases.given.clear()
                for batch in announced(inner, self._lender.ask_batch):
                    self._lender.begin(leases.given.popleft())
                    yield batch
            over = True
        except TeamError:
            over = True  # there is no server left to return samples to
            raise
        finally:
            if entered and not over:
                self._lender.quit(self._number, epoch)

    def _draw(self) -> LeasedEpoch:
        """Draws the order of an epoch with the user's own sampler."""
        if not self._custom:
            return LeasedEpoch(pack(self._loader.sampler, batches=False), self._sizes, bool(self._loader.drop_last))
        batches = [list(batch) for batch in self._loader.batch_sampler or ()]
        least = min(map(len, batches[:-1]), default=self._lender.size)
        if self._lender.in_turns and least < self._lender.size:
            # An update would have parts of different batches.
            raise UsageError(
                f"a batch of the loader's batch sampler has {least} samples, which cannot be divided among "
                f"{self._lender.size} workers; only the last one of an epoch may have so few"
            )
        parts = (part for batch in batches for part in divided(batch, self._lender.size))
        return LeasedEpoch(pack(parts, batches=True), [], False)
