"""Leases samples to workers: their requests to the ledger, and the replies."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from paceline import events
from paceline.data.ledger import Lease, Ledger
from paceline.errors import Mismatch
from paceline.events.recorder import Recorder
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
    """The ledger of a run, and the workers that wait for samples."""

    def __init__(
        self,
        sessions: Sessions,
        policy: Policy,
        updates: Updates,
        recorder: Recorder,
        patience: float,
        execute: Callable[[Decision, int], None],
    ) -> None:
        """execute: executes a decision of the policy that follows from a worker's message."""
        self._sessions, self._policy, self._updates, self._recorder = sessions, policy, updates, recorder
        self._patience, self._execute = patience, execute
        self._ledger = Ledger(sessions, in_turns=policy.lockstep)

    @property
    def in_step(self) -> bool:
        """True if all workers are at the same batch."""
        return self._ledger.in_step

    # -- messages of workers -----------------------------------------------------------------------------------------

    def begin_epoch(self, session: Session, message: BeginEpoch) -> None:
        session.enter(SessionState.ENTERING)
        session.request = message
        self.answer_waiting()

    def open_epoch(self, session: Session, message: EpochOrder) -> None:
        data = receive_parts(session.connection, self._patience)
        if data is None:
            raise Mismatch(f"rank {session.rank} did not send the order of the epoch", [session.rank])
        loader, epoch = message.loader, message.epoch
        order, now = msgspec.msgpack.decode(data), time.perf_counter()
        samples = self._ledger.open(loader, epoch, order, message.sizes, drop_last=message.drop_last)
        self._recorder.add(events.Epoch(-1, now, loader, epoch, samples))
        for rank in self._sessions.trained:
            self._policy.wake(rank)  # also a worker that has not begun the epoch yet: it will
        session.enter(SessionState.ENTERING)
        self.answer_waiting()

    def request(self, session: Session, message: RequestLease) -> None:
        if message.pull and not message.ahead and self._sessions.pool.newest != session.buffer:
            self._sessions.pull(session)
        is_open = self._ledger.is_open(message.loader, message.epoch)
        lease = self.lease(session, message.loader, ahead=message.ahead) if is_open else None
        if lease is not None or message.ahead:
            self._sessions.send(session, LeaseGranted(lease, session.version, session.buffer))
        elif not is_open or self._ledger.is_over(message.loader):
            self._end_epoch(session, message)  # it does not wait, so the policy must not count it as resting
        else:
            session.request = message
            session.enter(SessionState.REQUESTING)
            if not message.pull:
                self._ledger.carry(session.rank, message.loader)
            self._execute(self._policy.rest(session.rank), session.rank)
            self.answer_waiting()

    def finish(self, session: Session, message: LeaseDone) -> None:
        self._ledger.done(message.leases)
        self._recorder.add(events.Seen(session.rank, time.perf_counter(), message.leases))
        self.answer_waiting()

    def leave_epoch(self, session: Session, message: LeaveEpoch) -> None:
        is_open = self._ledger.is_open(message.loader, message.epoch)
        pushed = self._updates.leases_of(session.rank)
        leases = self._ledger.quit(session.rank, message.loader, message.epoch, pushed)
        self._record_return(session.rank, [lease.number for lease in leases], "abandoned")
        if is_open:
            self._execute(self._policy.rest(session.rank), session.rank)
        self.answer_waiting()

    # -- leases ------------------------------------------------------------------------------------------------------

    def lease(self, session: Session, loader: int, *, ahead: bool = False) -> Lease | None:
        """The next lease for a worker, if there is one for it now."""
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
        self._record_return(rank, leases, why)

    def leave(self, rank: int, why: str) -> int:
        """Returns the leases of a worker that is gone, except those that it has pushed; their number."""
        leases = [lease.number for lease in self._ledger.leave(rank, self._updates.leases_of(rank))]
        self._record_return(rank, leases, why)
        return len(leases)

    def _record_return(self, rank: int, leases: list[int], why: str) -> None:
        if leases:
            self._recorder.add(events.Return(rank, time.perf_counter(), leases, why))

    # -- waiting workers ---------------------------------------------------------------------------------------------

    def answer_waiting(self) -> None:
        """Answers the workers that can be answered now that leases or epochs have changed."""
        for session in list(self._sessions.values()):
            request = session.request
            if session.state is SessionState.REQUESTING and isinstance(request, RequestLease):
                self._try_lease(session, request)
            elif session.state is SessionState.ENTERING and isinstance(request, BeginEpoch):
                self._try_begin(session, request)

    def _try_lease(self, session: Session, request: RequestLease) -> None:
        is_open = self._ledger.is_open(request.loader, request.epoch)
        lease = self.lease(session, request.loader) if is_open else None
        if lease is not None:
            if request.pull:
                self._sessions.pull(session)
            self._sessions.reply(session, LeaseGranted(lease, session.version, session.buffer))
        elif not is_open or self._ledger.is_over(request.loader):
            self._end_epoch(session, request)

    def _end_epoch(self, session: Session, request: RequestLease) -> None:
        """Tells a worker that the epoch is over for all; it may compute next."""
        is_open = self._ledger.is_open(request.loader, request.epoch)
        if is_open and self._ledger.close(request.loader):
            now = time.perf_counter()
            self._recorder.add(events.Epoch(-1, now, request.loader, request.epoch, 0, over=True))
        if request.pull:
            self._sessions.pull(session)
        self._sessions.reply(session, EpochOver(session.version, session.buffer))
        if is_open and self._worker_is_ahead():
            self._execute(self._policy.rest(session.rank), session.rank)
        elif not session.fresh:
            self._policy.wake(session.rank)

    def _worker_is_ahead(self) -> bool:
        """True if a worker whose gradient was used waits for others to advance, which in this epoch they will not."""
        return any(
            session.state is SessionState.PUSHED and not self._updates.holds(session.rank)
            for session in self._sessions.values()
        )

    def _try_begin(self, session: Session, request: BeginEpoch) -> None:
        loader, epoch = request.loader, request.epoch
        is_open = self._ledger.is_open(loader, epoch)
        if is_open or self._ledger.is_past(loader, epoch):  # its next request is answered with the end
            if is_open:
                self._ledger.join(session.rank)
                self._ledger.enter(session.rank, loader)
            if not session.fresh:
                self._policy.wake(session.rank)
            if request.pull:
                self._sessions.pull(session)
            self._sessions.reply(session, Proceed(session.version, session.buffer))
        elif self._ledger.may_open(loader, epoch) and self._may_draw(session, request):
            self._request_order(session)

    def _may_draw(self, session: Session, request: BeginEpoch) -> bool:
        """True if this worker shall draw the order of the next epoch."""
        drawing = [other.request for other in self._sessions.values() if other.state is SessionState.DRAWING]
        if any(isinstance(other, BeginEpoch) and other.loader == request.loader for other in drawing):
            return False
        return session.rank == min(self._sessions.trained or self._sessions)

    def _request_order(self, session: Session) -> None:
        session.enter(SessionState.DRAWING)
        self._sessions.send(session, DrawOrder())

    def resolve_deadlock(self) -> bool:
        """When all workers wait, gives one of them samples that no other will request; True if there was one.

        So a script in which some workers iterate over a loader by themselves does not wait for ever.
        """
        for session in sorted(
            self._sessions.values(), key=lambda session: (session.state is not SessionState.REQUESTING, session.rank)
        ):
            request = session.request
            if session.state is SessionState.REQUESTING and isinstance(request, RequestLease):
                self._ledger.spread(request.loader)
                self._try_lease(session, request)
            elif session.state is SessionState.ENTERING and isinstance(request, BeginEpoch):
                if not self._ledger.may_open(request.loader, request.epoch):
                    continue
                self._request_order(session)
            if session.state in (SessionState.COMPUTING, SessionState.DRAWING):
                return True
        return False
