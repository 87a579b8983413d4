"""A worker's leases of samples: requests them from the server, and returns those that lead to no gradient."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from paceline.data.leased_loader import LeasedEpoch, LeasedLoader
from paceline.data.ledger import Lease
from paceline.errors import TeamError
from paceline.events.stopwatch import Stopwatch
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


class LeaseClient:
    """One worker's leases."""

    def __init__(
        self,
        client: ServerClient,
        stopwatch: Stopwatch,
        gradients: Gradients,
        size: int,
        adopt: Callable[[Any], None],
        *,
        evaluates: Callable[[], bool],
        in_turns: bool,
        counts: bool = True,
    ) -> None:
        """size: workers; adopt: takes the version of a server's answer.

        evaluates: returns True while the script evaluates the model instead of training it.
        in_turns: True if the workers take samples in the order of their ranks.
        counts: True if this worker counts the samples of its leases, as the first worker of a replica does.
        """
        self._client, self._stopwatch, self._gradients, self._adopt = client, stopwatch, gradients, adopt
        self.size, self.in_turns, self._counts, self._evaluates = size, in_turns, counts, evaluates
        self._open: dict[int, Lease] = {}
        """Leases whose samples are, or will be, part of the next gradient."""
        self.granted: Lease | None = None
        """A lease that came with the answer to a push."""
        self._want: int | None = None
        """The loader whose next lease should come with the next answer."""
        self._entered: set[int] = set()
        """Loaders in whose current epoch this worker is."""
        self._shared: list[LeasedLoader] = []
        self.steps = 0
        self.on_enter: Callable[[], None] = lambda: None
        """Called before an epoch begins."""
        self.on_ask: Callable[[], None] = lambda: None
        """Called before a lease is requested while none is open."""

    def share_loader(self, loader: DataLoader[Any], global_batch: int | None) -> LeasedLoader:
        self._shared.append(LeasedLoader(loader, self, len(self._shared), global_batch=global_batch))
        return self._shared[-1]

    # -- leases of a gradient ----------------------------------------------------------------------------------------

    @property
    def open(self) -> int:
        """The number of leases of the next gradient so far."""
        return len(self._open)

    @property
    def samples(self) -> int:
        """Samples of the newest lease of the next gradient; 0 if it has none."""
        return len(next(reversed(self._open.values())).keys) if self._open else 0

    @property
    def batch(self) -> int:
        """The loader's batch that the newest lease is a part of, counted over all epochs; -1 if that is not known."""
        if not self._open:
            return -1
        lease = next(reversed(self._open.values()))
        return self._shared[lease.loader].batch_of(lease)

    @property
    def share(self) -> float | None:
        """The newest lease's share of the batch that it is a part of; None if that is not known."""
        if not self._open:
            return None
        lease = next(reversed(self._open.values()))
        return self._shared[lease.loader].share_of(lease)

    def take(self) -> list[int]:
        """Close and return the leases of the gradient that is pushed or cancelled now."""
        leases, self._open = list(self._open), {}
        self.steps += 1
        return leases

    def wanted(self) -> int | None:
        """The loader whose next lease should come with an answer; None while a granted lease is not used yet.

        None, too, with several loaders at once: two workers could each wait for the end of one loader's epoch while
        they hold a lease of the other loader that they do not need yet.
        """
        return self._want if self.granted is None and len(self._entered) == 1 else None

    # -- requests of loaders ------------------------------------------------------------------------------------------

    @property
    def evaluates(self) -> bool:
        return self._evaluates()

    @property
    def splits(self) -> bool:
        return self._client.shared

    def from_first(self, draw: Callable[[], bytes]) -> bytes:
        return self._client.from_first(draw() if self._counts else b"")

    def ask_batch(self) -> None:
        self._stopwatch.ask()

    def enter(self, loader: int, epoch: int, draw: Callable[[], LeasedEpoch]) -> None:
        self.on_enter()
        start = time.perf_counter()
        self._entered.add(loader)
        answer = self._client.call(BeginEpoch(loader, epoch, not self._open))
        if isinstance(answer, DrawOrder):
            order = draw()
            self._client.send(EpochOrder(loader, epoch, order.sizes, order.drop_last))
            answer = self._client.call_in_parts(order.order)
        self._adopt(answer)
        self._stopwatch.away(time.perf_counter() - start)

    def ask(self, loader: int, epoch: int, *, ahead: bool) -> Lease | None:
        granted = self.granted
        if granted is not None and (granted.loader, granted.epoch) == (loader, epoch):
            self.granted = None
            return granted
        if not self._open and not ahead:
            self.on_ask()
        if not ahead and not self._computed and (passed := self._forget(loader)):
            self._client.send(LeaseDone(passed))  # the script has skipped them
        start = time.perf_counter()
        answer = self._client.call(RequestLease(loader, epoch, ahead, not self._open and not ahead))
        self._stopwatch.away(time.perf_counter() - start)
        if isinstance(answer, LeaseGranted):
            self._want = None if ahead else loader
            self._adopt(answer)
            return answer.lease
        self._want = None
        self._entered.discard(loader)
        self._adopt(answer)
        return None

    @property
    def _computed(self) -> bool:
        """True if the open leases have a gradient; `.grad` may still hold one that was pushed."""
        return self._gradients.any and self._stopwatch.turned

    def _forget(self, loader: int) -> list[int]:
        """Close the open leases of a loader, whose samples lead to no gradient; returns them."""
        passed = [lease for lease in self._open.values() if lease.loader == loader]
        if passed:
            self._stopwatch.pass_over(sum(map(self._counted, passed)), len(passed))
        for lease in passed:
            del self._open[lease.number]
        return [lease.number for lease in passed]

    def _counted(self, lease: Lease) -> int:
        return len(lease.keys) if self._counts else 0

    def begin(self, lease: Lease) -> None:
        self._open[lease.number] = lease
        self._stopwatch.start(self._counted(lease))

    def quit(self, loader: int, epoch: int) -> None:
        if self.granted is not None and self.granted.loader == loader:
            self.granted = None
        self._want = None
        self._entered.discard(loader)
        self._forget(loader)
        with contextlib.suppress(TeamError):
            self._client.send(LeaveEpoch(loader, epoch))
