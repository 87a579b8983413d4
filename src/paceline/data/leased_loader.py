"""A DataLoader whose samples are leased: a worker gets the next minibatch when it needs one.

Datasets, collate functions, loader processes and pinned memory are the user's own: only the batch sampler is replaced
by one that asks for leases.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec
import torch
from torch.utils.data import DataLoader

from paceline.data.keys import pack, restored
from paceline.data.ledger import Lease
from paceline.data.loader import UserLoader, announced, global_batch_of, with_batches_from
from paceline.data.split import even
from paceline.errors import TeamError


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
        self._lender, self._number = lender, number
        self.global_batch = global_batch_of(loader, lender.size, global_batch)
        """Samples in one minibatch of every worker together."""
        self._sizes = even(self.global_batch, lender.size)
        # A loader that was given a batch sampler has no batch size: not even with torch's own BatchSampler.
        self._custom = loader.batch_sampler is not None and loader.batch_size is None
        self._epoch = 0
        here = _Leases(lender, number, len(self), ahead=False)
        self._parts = [(here, with_batches_from(loader, here, workers=0))]
        if loader.num_workers:
            # The loader's own processes fetch ahead; samples returned at the end of an epoch are loaded here.
            ahead = _Leases(lender, number, len(self), ahead=True)
            # Loading here must not draw from the user's random numbers: in plain torch only one loader does.
            self._parts[0][1].generator = torch.Generator()
            self._parts.insert(0, (ahead, with_batches_from(loader, ahead, workers=loader.num_workers)))

    def __len__(self) -> int:
        """Minibatches in an epoch for each worker, if all are equally fast."""
        if self._custom:
            count: float = len(self._loader.batch_sampler) / self._lender.size  # type: ignore[arg-type]
        else:
            count = len(self._loader.sampler) / self.global_batch  # type: ignore[arg-type]
        return math.floor(count) if self._loader.drop_last else math.ceil(count)

    def __iter__(self) -> Iterator[Any]:
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
        sampler: Any = self._loader.batch_sampler if self._custom else self._loader.sampler
        order = pack(sampler, batches=self._custom)
        return LeasedEpoch(order, [] if self._custom else self._sizes, bool(self._loader.drop_last))
