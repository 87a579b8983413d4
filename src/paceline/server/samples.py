"""Gives out samples: what workers say to the ledger, and what they are answered."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from paceline import events
from paceline.data.ledger import Lease, Ledger
from paceline.errors import Mismatch
from paceline.events import Recorder
from paceline.policies import Decision, Policy
from paceline.server.messages import Ask, Done, Draw, Enter, Go, Leased, Order, Over, Quit, receive_parts
from paceline.server.seats import Seat, Seats, State
from paceline.server.updates import Updates


class Samples:
    """The samples of a run, from the first server's side."""

    def __init__(
        self,
        seats: Seats,
        policy: Policy,
        updates: Updates,
        recorder: Recorder,
        patience: float,
        execute: Callable[[Decision, int], None],
    ) -> None:
        """execute: do what the policy has decided after something that a worker did."""
        self._seats, self._policy, self._updates, self._recorder = seats, policy, updates, recorder
        self._patience, self._execute = patience, execute
        self._ledger = Ledger(seats, in_turns=policy.lockstep)
        self._training: dict[int, bool] = {}
        """By loader, whether its running epoch is trained on, and not only evaluated."""

    # -- what workers say --------------------------------------------------------------------------------------------

    def enter(self, seat: Seat, message: Enter) -> None:
        seat.into(State.ENTERING)
        seat.request = message
        self.settle()

    def drawn(self, seat: Seat, message: Order) -> None:
        data = receive_parts(seat.wire, self._patience)
        if data is None:
            raise Mismatch(f"rank {seat.rank} did not tell the order of the epoch", [seat.rank])
        loader, epoch, training = message.loader, message.epoch, message.training
        order, now = msgspec.msgpack.decode(data), time.perf_counter()
        self._training[loader] = training
        samples = self._ledger.open(loader, epoch, order, message.sizes, drop_last=message.drop_last, turns=training)
        self._recorder.add(events.Epoch(-1, now, loader, epoch, samples))
        if training:
            for rank in self._seats.trained:
                self._policy.wake(rank)  # also whoever has not got there yet: it will
        seat.into(State.ENTERING)
        self.settle()

    def ask(self, seat: Seat, message: Ask) -> None:
        if message.renew and not message.ahead and self._seats.shelf.newest != seat.buffer:
            self._seats.renew(seat)
        is_open = self._ledger.is_open(message.loader, message.epoch)
        lease = self.lease(seat, message.loader, ahead=message.ahead) if is_open else None
        if lease is not None or message.ahead:
            self._seats.tell(seat, Leased(lease, seat.version, seat.buffer))
        elif not is_open or self._ledger.is_over(message.loader):
            self._over(seat, message)  # it waits for nobody, so nobody must take it for one who rests
        else:
            seat.request = message
            seat.into(State.ASKING)
            if not message.renew:
                self._ledger.carry(seat.rank, message.loader)
            self._execute(self._policy.rest(seat.rank), seat.rank)
            self.settle()

    def seen(self, seat: Seat, message: Done) -> None:
        self._ledger.done(message.leases)
        self._recorder.add(events.Seen(seat.rank, time.perf_counter(), message.leases))
        self.settle()

    def quit(self, seat: Seat, message: Quit) -> None:
        is_open = self._ledger.is_open(message.loader, message.epoch)
        pushed = self._updates.leases_of(seat.rank)
        leases = self._ledger.quit(seat.rank, message.loader, message.epoch, pushed)
        self._write_down(seat.rank, [lease.number for lease in leases], "abandoned")
        if is_open and self._training[message.loader]:
            self._execute(self._policy.rest(seat.rank), seat.rank)
        self.settle()

    # -- what becomes of leases --------------------------------------------------------------------------------------

    def lease(self, seat: Seat, loader: int, *, ahead: bool = False) -> Lease | None:
        """The next samples for a worker, if there are some for it now."""
        lease = self._ledger.lease(seat.rank, loader, ahead=ahead)
        if lease is not None:
            seat.fresh = False
            self._policy.wake(seat.rank)
            now, samples = time.perf_counter(), len(lease.keys)
            self._recorder.add(events.Lease(seat.rank, now, lease.number, loader, lease.epoch, lease.first, samples))
        return lease

    def done(self, leases: list[int]) -> None:
        self._ledger.done(leases)

    def give_back(self, rank: int, leases: list[int], why: str) -> None:
        self._ledger.give_back(leases)
        self._write_down(rank, leases, why)

    def leave(self, rank: int, why: str) -> int:
        """A worker is gone: its samples are for others, but for what it has pushed. Returns how many leases go back."""
        leases = [lease.number for lease in self._ledger.leave(rank, self._updates.leases_of(rank))]
        self._write_down(rank, leases, why)
        return len(leases)

    def _write_down(self, rank: int, leases: list[int], why: str) -> None:
        if leases:
            self._recorder.add(events.Return(rank, time.perf_counter(), leases, why))

    # -- who can be answered -----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Samples or epochs have changed: answer those who can be answered now."""
        for seat in list(self._seats.values()):
            request = seat.request
            if seat.state is State.ASKING and isinstance(request, Ask):
                self._answer(seat, request)
            elif seat.state is State.ENTERING and isinstance(request, Enter):
                self._admit(seat, request)

    def _answer(self, seat: Seat, request: Ask) -> None:
        is_open = self._ledger.is_open(request.loader, request.epoch)
        lease = self.lease(seat, request.loader) if is_open else None
        if lease is not None:
            if request.renew:
                self._seats.renew(seat)
            self._seats.answer(seat, Leased(lease, seat.version, seat.buffer))
        elif not is_open or self._ledger.is_over(request.loader):
            self._over(seat, request)

    def _over(self, seat: Seat, request: Ask) -> None:
        """Tell a worker that the epoch is over for all; what it does next may be to compute."""
        is_open = self._ledger.is_open(request.loader, request.epoch)
        if is_open and self._ledger.close(request.loader):
            now = time.perf_counter()
            self._recorder.add(events.Epoch(-1, now, request.loader, request.epoch, 0, over=True))
        if request.renew:
            self._seats.renew(seat)
        self._seats.answer(seat, Over(seat.version, seat.buffer))
        if is_open and self._training[request.loader] and self._somebody_is_ahead():
            self._execute(self._policy.rest(seat.rank), seat.rank)
        elif not seat.fresh:
            self._policy.wake(seat.rank)

    def _somebody_is_ahead(self) -> bool:
        """Whether a worker, its gradient used, waits for others to get further, which in this epoch they will not."""
        return any(seat.state is State.PUSHED and not self._updates.holds(seat.rank) for seat in self._seats.values())

    def _admit(self, seat: Seat, request: Enter) -> None:
        loader, epoch = request.loader, request.epoch
        is_open = self._ledger.is_open(loader, epoch)
        if is_open or self._ledger.is_past(loader, epoch):  # it will be told that it is over when it asks
            if is_open:
                self._ledger.join(seat.rank)
                self._ledger.enter(seat.rank, loader)
            if not seat.fresh:
                self._policy.wake(seat.rank)
            if request.renew:
                self._seats.renew(seat)
            self._seats.answer(seat, Go(seat.version, seat.buffer))
        elif self._ledger.may_open(loader, epoch) and self._draws(seat, request):
            self._let_draw(seat)

    def _draws(self, seat: Seat, request: Enter) -> bool:
        """Whether it is for this worker to draw the order of the next epoch; a worker may evaluate by itself."""
        drawing = [other.request for other in self._seats.values() if other.state is State.DRAWING]
        if any(isinstance(other, Enter) and other.loader == request.loader for other in drawing):
            return False
        alone = not request.training and not self._policy.lockstep
        return alone or seat.rank == min(self._seats.trained or self._seats)

    def _let_draw(self, seat: Seat) -> None:
        seat.into(State.DRAWING)
        self._seats.tell(seat, Draw())

    def unstick(self) -> bool:
        """All workers wait. Let one go on with samples that, as it turns out, no other will come for, if there is one.

        So a script in which some evaluate, or train, by themselves does not wait for ever.
        """
        for seat in sorted(self._seats.values(), key=lambda seat: (seat.state is not State.ASKING, seat.rank)):
            request = seat.request
            if seat.state is State.ASKING and isinstance(request, Ask):
                self._ledger.spread(request.loader)
                self._answer(seat, request)
            elif seat.state is State.ENTERING and isinstance(request, Enter):
                if not self._ledger.may_open(request.loader, request.epoch):
                    continue
                self._let_draw(seat)
            if seat.state in (State.COMPUTING, State.DRAWING):
                return True
        return False
