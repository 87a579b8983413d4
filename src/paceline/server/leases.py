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
from paceline.server.messages import (
    BeginEpoch,
    DrawOrder,
    EpochOrder,
    EpochOver,
    LeaseDone,
    LeaseGranted,
    LeaveEpoch,
    Proceed,
    RequestLease,
    receive_parts,
)
from paceline.server.sessions import Session, Sessions, SessionState
from paceline.server.updates import Updates


class LeaseService:
    """The samples of a run, from the first server's side."""

    def __init__(
        self,
        sessions: Sessions,
        policy: Policy,
        updates: Updates,
        recorder: Recorder,
        patience: float,
        execute: Callable[[Decision, int], None],
    ) -> None:
        """execute: do what the policy has decided after something that a worker did."""
        self._sessions, self._policy, self._updates, self._recorder = sessions, policy, updates, recorder
        self._patience, self._execute = patience, execute
        self._ledger = Ledger(sessions, in_turns=policy.lockstep)
        self._training: dict[int, bool] = {}
        """By loader, whether its running epoch is trained on, and not only evaluated."""

    # -- what workers say --------------------------------------------------------------------------------------------

    def enter(self, session: Session, message: BeginEpoch) -> None:
        session.into(SessionState.ENTERING)
        session.request = message
        self.settle()

    def drawn(self, session: Session, message: EpochOrder) -> None:
        data = receive_parts(session.connection, self._patience)
        if data is None:
            raise Mismatch(f"rank {session.rank} did not tell the order of the epoch", [session.rank])
        loader, epoch, training = message.loader, message.epoch, message.training
        order, now = msgspec.msgpack.decode(data), time.perf_counter()
        self._training[loader] = training
        samples = self._ledger.open(loader, epoch, order, message.sizes, drop_last=message.drop_last, turns=training)
        self._recorder.add(events.Epoch(-1, now, loader, epoch, samples))
        if training:
            for rank in self._sessions.trained:
                self._policy.wake(rank)  # also whoever has not got there yet: it will
        session.into(SessionState.ENTERING)
        self.settle()

    def ask(self, session: Session, message: RequestLease) -> None:
        if message.renew and not message.ahead and self._sessions.pool.newest != session.buffer:
            self._sessions.renew(session)
        is_open = self._ledger.is_open(message.loader, message.epoch)
        lease = self.lease(session, message.loader, ahead=message.ahead) if is_open else None
        if lease is not None or message.ahead:
            self._sessions.tell(session, LeaseGranted(lease, session.version, session.buffer))
        elif not is_open or self._ledger.is_over(message.loader):
            self._over(session, message)  # it waits for nobody, so nobody must take it for one who rests
        else:
            session.request = message
            session.into(SessionState.ASKING)
            if not message.renew:
                self._ledger.carry(session.rank, message.loader)
            self._execute(self._policy.rest(session.rank), session.rank)
            self.settle()

    def seen(self, session: Session, message: LeaseDone) -> None:
        self._ledger.done(message.leases)
        self._recorder.add(events.Seen(session.rank, time.perf_counter(), message.leases))
        self.settle()

    def quit(self, session: Session, message: LeaveEpoch) -> None:
        is_open = self._ledger.is_open(message.loader, message.epoch)
        pushed = self._updates.leases_of(session.rank)
        leases = self._ledger.quit(session.rank, message.loader, message.epoch, pushed)
        self._write_down(session.rank, [lease.number for lease in leases], "abandoned")
        if is_open and self._training[message.loader]:
            self._execute(self._policy.rest(session.rank), session.rank)
        self.settle()

    # -- what becomes of leases --------------------------------------------------------------------------------------

    def lease(self, session: Session, loader: int, *, ahead: bool = False) -> Lease | None:
        """The next samples for a worker, if there are some for it now."""
        lease = self._ledger.lease(session.rank, loader, ahead=ahead)
        if lease is not None:
            session.fresh = False
            self._policy.wake(session.rank)
            now, samples = time.perf_counter(), len(lease.keys)
            self._recorder.add(
                events.LeaseGiven(session.rank, now, lease.number, loader, lease.epoch, lease.first, samples)
            )
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
        for session in list(self._sessions.values()):
            request = session.request
            if session.state is SessionState.ASKING and isinstance(request, RequestLease):
                self._answer(session, request)
            elif session.state is SessionState.ENTERING and isinstance(request, BeginEpoch):
                self._admit(session, request)

    def _answer(self, session: Session, request: RequestLease) -> None:
        is_open = self._ledger.is_open(request.loader, request.epoch)
        lease = self.lease(session, request.loader) if is_open else None
        if lease is not None:
            if request.renew:
                self._sessions.renew(session)
            self._sessions.answer(session, LeaseGranted(lease, session.version, session.buffer))
        elif not is_open or self._ledger.is_over(request.loader):
            self._over(session, request)

    def _over(self, session: Session, request: RequestLease) -> None:
        """Tell a worker that the epoch is over for all; what it does next may be to compute."""
        is_open = self._ledger.is_open(request.loader, request.epoch)
        if is_open and self._ledger.close(request.loader):
            now = time.perf_counter()
            self._recorder.add(events.Epoch(-1, now, request.loader, request.epoch, 0, over=True))
        if request.renew:
            self._sessions.renew(session)
        self._sessions.answer(session, EpochOver(session.version, session.buffer))
        if is_open and self._training[request.loader] and self._somebody_is_ahead():
            self._execute(self._policy.rest(session.rank), session.rank)
        elif not session.fresh:
            self._policy.wake(session.rank)

    def _somebody_is_ahead(self) -> bool:
        """Whether a worker, its gradient used, waits for others to get further, which in this epoch they will not."""
        return any(
            session.state is SessionState.PUSHED and not self._updates.holds(session.rank)
            for session in self._sessions.values()
        )

    def _admit(self, session: Session, request: BeginEpoch) -> None:
        loader, epoch = request.loader, request.epoch
        is_open = self._ledger.is_open(loader, epoch)
        if is_open or self._ledger.is_past(loader, epoch):  # it will be told that it is over when it asks
            if is_open:
                self._ledger.join(session.rank)
                self._ledger.enter(session.rank, loader)
            if not session.fresh:
                self._policy.wake(session.rank)
            if request.renew:
                self._sessions.renew(session)
            self._sessions.answer(session, Proceed(session.version, session.buffer))
        elif self._ledger.may_open(loader, epoch) and self._draws(session, request):
            self._let_draw(session)

    def _draws(self, session: Session, request: BeginEpoch) -> bool:
        """Whether it is for this worker to draw the order of the next epoch; a worker may evaluate by itself."""
        drawing = [other.request for other in self._sessions.values() if other.state is SessionState.DRAWING]
        if any(isinstance(other, BeginEpoch) and other.loader == request.loader for other in drawing):
            return False
        alone = not request.training and not self._policy.lockstep
        return alone or session.rank == min(self._sessions.trained or self._sessions)

    def _let_draw(self, session: Session) -> None:
        session.into(SessionState.DRAWING)
        self._sessions.tell(session, DrawOrder())

    def unstick(self) -> bool:
        """All workers wait. Let one go on with samples that, as it turns out, no other will come for, if there is one.

        So a script in which some evaluate, or train, by themselves does not wait for ever.
        """
        for session in sorted(
            self._sessions.values(), key=lambda session: (session.state is not SessionState.ASKING, session.rank)
        ):
            request = session.request
            if session.state is SessionState.ASKING and isinstance(request, RequestLease):
                self._ledger.spread(request.loader)
                self._answer(session, request)
            elif session.state is SessionState.ENTERING and isinstance(request, BeginEpoch):
                if not self._ledger.may_open(request.loader, request.epoch):
                    continue
                self._let_draw(session)
            if session.state in (SessionState.COMPUTING, SessionState.DRAWING):
                return True
        return False
