"""A worker's leases of samples: requests them from the server, and returns those that lead to no gradient."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader

from paceline.data.leased_loader import LeasedEpoch, LeasedLoader, Minibatch
from paceline.data.ledger import Lease
from paceline.data.stream.kinds import is_stream
from paceline.data.stream.leased_stream import LeasedStream
from paceline.data.user_loader import UserLoader
from paceline.errors import TeamError
from paceline.events.stopwatch import Stopwatch
from paceline.parameters.gradients import Gradients
from paceline.server.client import ServerClient
from paceline.server.messages import (
    BeginEpoch,
    BeginLease,
    DrawOrder,
    EpochOrder,
    LeaseDone,
    LeaseGranted,
    LeaveEpoch,
    RequestLease,
    StreamRead,
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
        self._open: dict[int, tuple[Lease, int, int]] = {}
        """Leases whose samples are, or will be, part of the next gradient; with their samples and minibatches."""
        self.minibatch = Minibatch([], 0)
        """The minibatch that the script has; several optimizers may push a gradient of it."""
        self.several = False
        """True if several optimizers push gradients."""
        self._pushed = False
        """True if one of several optimizers has pushed a gradient of the open leases."""
        self.granted: Lease | None = None
        """A lease that came with the answer to a push."""
        self.recalled: set[int] = set()
        """Leases that were fetched ahead, and that others have got."""
        self._want: int | None = None
        """The loader whose next lease should come with the next answer."""
        self._entered: set[int] = set()
        """Loaders in whose current epoch this worker is."""
        self._shared = 0
        """Loaders that were shared out."""
        self.steps = 0
        self.lengths: tuple[int, Sequence[tuple[int, int]]] = (0, ())
        self.on_enter: Callable[[], None] = lambda: None
        """Called before an epoch begins."""
        self.on_ask: Callable[[], None] = lambda: None
        """Called before a lease is requested while none is open."""
        self.on_ask_batch: Callable[[], None] = lambda: None
        """Called when the script asks for its next batch."""
        self.on_batch: Callable[[], None] = lambda: None
        """Called when it gets that."""

    def share_loader(
        self, loader: DataLoader[Any], *, steps: int | None, say: Callable[[str], None], **options: Any
    ) -> UserLoader:
        """steps: after which an epoch of a stream ends; say: prints a line, on the lead only."""
        number, self._shared = self._shared, self._shared + 1
        if is_stream(loader):
            return LeasedStream(loader, self, number, steps=steps, say=say, **options)
        return LeasedLoader(loader, self, number, **options)

    # -- leases of a gradient ----------------------------------------------------------------------------------------

    @property
    def open(self) -> int:
        """The number of leases of the next gradient so far."""
        return len(self._open)

    @property
    def position(self) -> tuple[int, int, float]:
        """The batch that the next gradient is of, its loader, and the share of that batch, as `PushGradient` says."""
        taken = self.minibatch
        if not self._open or taken.batch < 0:
            return -1, -1, 1.0
        return taken.batch, taken.leases[0].loader, 1.0 if taken.share is None else taken.share

    def take(self) -> list[int]:
        """Close and return the leases of the gradient that is pushed or cancelled now.

        With several optimizers they stay open until the script asks for its next minibatch: another optimizer may push
        a gradient of this one.
        """
        self.steps += 1
        if self.several:
            self._pushed = True
            return []
        leases, self._open = list(self._open), {}
        return leases

    def cancel(self) -> list[int]:
        """Close the leases of a step that is cancelled; returns those that led to no gradient."""
        leases, self._open = list(self._open), {}
        if not self._pushed:
            return leases
        self._pushed = False
        self._client.send(LeaseDone(leases))
        return []

    def _finish(self) -> None:
        """The script goes on to its next minibatch: close the leases of which several optimizers pushed gradients."""
        if self._pushed:
            self.cancel()

    def wanted(self) -> int | None:
        """The loader whose next lease should come with an answer; None while a granted lease is not used yet.

        None, too, with several loaders at once: two workers could each wait for the end of one loader's epoch while
        they hold a lease of the other loader that they do not need yet.
        """
        return self._want if self.granted is None and len(self._entered) == 1 and not self.several else None

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
        self.on_ask_batch()

    def from_replica(self, payload: bytes) -> list[bytes]:
        return self._client.from_replica(payload)

    def enter(self, loader: int, epoch: int, draw: Callable[[], LeasedEpoch], shards: int = 0) -> bytes:
        self.on_enter()
        start = time.perf_counter()
        self._entered.add(loader)
        answer = self._client.call(BeginEpoch(loader, epoch, not self._open, shards))
        if isinstance(answer, DrawOrder):
            order = draw()
            self._client.send(EpochOrder(loader, epoch, order.sizes, order.drop_last, order.stream))
            answer = self._client.call_in_parts(order.order)
        self._adopt(answer)
        self._stopwatch.away(time.perf_counter() - start)
        note: bytes = answer.note
        return note

    def ask(self, loader: int, epoch: int, *, ahead: bool, lane: int = 0, most: int = 0) -> Lease | None:
        granted = self.granted
        if granted is not None and (granted.loader, granted.epoch) == (loader, epoch):
            self.granted = None
            return granted
        if not self._open and not ahead:
            self.on_ask()
        if not ahead:
            self._finish()
        if not ahead and not self._computed and (passed := self._forget(loader)):
            self._client.send(LeaseDone(passed))  # the script has skipped them
        start = time.perf_counter()
        answer = self._client.call(RequestLease(loader, epoch, ahead, not self._open and not ahead, lane, most))
        self._stopwatch.away(time.perf_counter() - start)
        if isinstance(answer, LeaseGranted):
            self._want = None if ahead else loader
            self._adopt(answer)
            return answer.lease
        self._want = None
        self._entered.discard(loader)
        self._adopt(answer)
        self.lengths = (answer.turn, answer.lengths)
        return None

    @property
    def _computed(self) -> bool:
        """True if the open leases have a gradient; `.grad` may still hold one that was pushed."""
        return self._gradients.any and self._stopwatch.turned

    def _forget(self, loader: int) -> list[int]:
        """Close the open leases of a loader, whose samples lead to no gradient; returns them."""
        passed = {number: one for number, one in self._open.items() if one[0].loader == loader}
        if passed:
            samples, minibatches = (sum(counts) for counts in zip(*(one[1:] for one in passed.values()), strict=True))
            self._stopwatch.pass_over(samples, minibatches)
        for number in passed:
            del self._open[number]
        return list(passed)

    def keeps(self, lease: Lease, last: bool) -> bool:
        # While leases are requested, every answer says which were recalled; the first one never is without a word.
        if lease.number not in self.recalled and (last or self._open):
            self._adopt(self._client.call(BeginLease(lease.number)))
        if lease.number not in self.recalled:
            return True
        self.recalled.discard(lease.number)
        return False

    def begin(self, minibatch: Minibatch) -> None:
        self.on_batch()
        self.minibatch = minibatch
        counted = minibatch.samples if self._counts else 0
        for place, lease in enumerate(minibatch.leases):  # what they have together is counted with the first
            self._open[lease.number] = (lease, 0, 0) if place else (lease, counted, 1)
        self._stopwatch.start(counted)

    def skip(self, lease: Lease) -> None:
        self._client.send(LeaseDone([lease.number]))

    def report(
        self,
        loader: int,
        turn: int,
        marks: Sequence[tuple[int, int, int]] = (),
        ends: Sequence[tuple[int, int]] = (),
        lost: int = 0,
    ) -> None:
        self._client.send(StreamRead(loader, turn, list(marks), list(ends), lost))

    def quit(self, loader: int, epoch: int) -> None:
        if self.granted is not None and self.granted.loader == loader:
            self.granted = None
        self._want = None
        self._entered.discard(loader)
        self._finish()
        self._forget(loader)
        with contextlib.suppress(TeamError):
            self._client.send(LeaveEpoch(loader, epoch))
