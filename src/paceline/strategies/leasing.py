"""What a worker has leased of the samples: asks the server for more, and gives back what it leaves."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.data.leased_loader import LeasedEpoch, LeasedLoader
from paceline.data.ledger import Lease
from paceline.errors import TeamError
from paceline.parameters.gradients import Gradients
from paceline.server.client import ServerClient
from paceline.server.messages import (
    BeginEpoch,
    DrawOrder,
    EpochOrder,
    LeaseDone,
    LeaseGranted,
    LeaveEpoch,
    RequestLease,
)
from paceline.strategies.stopwatch import Stopwatch


class Leases:
    """One worker's leases."""

    def __init__(
        self, client: ServerClient, stopwatch: Stopwatch, gradients: Gradients, size: int, follow: Callable[[Any], None]
    ) -> None:
        """follow: take the version that an answer of the server's names."""
        self._client, self._stopwatch, self._gradients, self._follow = client, stopwatch, gradients, follow
        self.size = size
        self._open: dict[int, tuple[int, int]] = {}
        """Leases whose samples are, or will be, part of the next gradient, with their loaders and how many count."""
        self._riding: Lease | None = None
        """A lease that came with the answer to a push."""
        self._want: int | None = None
        """The loader whose next lease should come with the next answer."""
        self._trained: set[int] = set()
        """Loaders in whose epochs this worker is, and not only to evaluate."""
        self._loaders = 0
        self.leave: Callable[[], None] = lambda: None
        """Called where this worker may leave, if it shall."""

    def share(self, loader: DataLoader[Any], global_batch: int | None) -> LeasedLoader:
        self._loaders += 1
        return LeasedLoader(loader, self, self._loaders - 1, global_batch=global_batch)

    # -- what goes with gradients ------------------------------------------------------------------------------------

    @property
    def open(self) -> int:
        """How many leases the next gradient has so far."""
        return len(self._open)

    def take(self) -> list[int]:
        """The leases of the gradient that is pushed, or left, now."""
        leases, self._open = list(self._open), {}
        return leases

    def wanted(self) -> int | None:
        """The loader whose next lease should come with an answer; none while there is one that is not taken yet.

        Nor with several loaders at once: two workers could each wait for the end of one loader's epoch with a lease of
        the other's that they do not need yet.
        """
        return self._want if self._riding is None and len(self._trained) == 1 else None

    def ride(self, lease: Lease) -> None:
        """One has come with an answer."""
        self._riding = lease

    # -- what loaders ask for ----------------------------------------------------------------------------------------

    def ask_batch(self) -> None:
        self._stopwatch.ask()

    def enter(self, loader: int, epoch: int, draw: Callable[[], LeasedEpoch]) -> None:
        start = time.perf_counter()
        training = torch.is_grad_enabled()
        if training:
            self._trained.add(loader)
        answer = self._client.call(BeginEpoch(loader, epoch, not self._open, training))
        if isinstance(answer, DrawOrder):
            drawn = draw()
            self._client.send(EpochOrder(loader, epoch, drawn.sizes, drawn.drop_last, training))
            answer = self._client.call_in_parts(drawn.order)
        self._follow(answer)
        self._stopwatch.away(time.perf_counter() - start)

    def ask(self, loader: int, epoch: int, *, ahead: bool) -> Lease | None:
        riding = self._riding
        if riding is not None and (riding.loader, riding.epoch) == (loader, epoch):
            self._riding = None
            return riding
        if not self._open and not ahead:
            self.leave()
        training = torch.is_grad_enabled()
        if training and not ahead and not self._computed and (passed := self._forget(loader)):
            self._client.send(LeaseDone(passed))  # the script has passed over them
        start = time.perf_counter()
        answer = self._client.call(RequestLease(loader, epoch, ahead, training and not self._open and not ahead))
        self._stopwatch.away(time.perf_counter() - start)
        if isinstance(answer, LeaseGranted):
            self._want = loader if training and not ahead else None
            self._follow(answer)
            return answer.lease
        self._want = None
        self._trained.discard(loader)
        self._follow(answer)
        return None

    @property
    def _computed(self) -> bool:
        """Whether what is open has been made a gradient of; one that was pushed may still lie in `.grad`."""
        return self._gradients.any and self._stopwatch.turned

    def _forget(self, loader: int) -> list[int]:
        """What the script has got of this loader is no part of the next gradient; returns which leases that were."""
        passed = {number: samples for number, (of, samples) in self._open.items() if of == loader}
        if passed:
            self._stopwatch.pass_over(sum(passed.values()), len(passed))
        for number in passed:
            del self._open[number]
        return list(passed)

    def begin(self, lease: Lease) -> None:
        if torch.is_grad_enabled():
            self._open[lease.number] = (lease.loader, len(lease.keys))
            self._stopwatch.start(len(lease.keys))
        else:
            self._client.send(LeaseDone([lease.number]))

    def quit(self, loader: int, epoch: int) -> None:
        if self._riding is not None and self._riding.loader == loader:
            self._riding = None
        self._want = None
        self._trained.discard(loader)
        self._forget(loader)
        with contextlib.suppress(TeamError):
            self._client.send(LeaveEpoch(loader, epoch))
