"""Leases samples to workers: their requests to the ledger, and the replies."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from paceline import events
from paceline.data.epochs import ANYTHING, Want
from paceline.data.ledger import Lease, Ledger
from paceline.errors import Mismatch, check_whole, is_whole, missed_step, unlike_streams
from paceline.events.recorder import Recorder
from paceline.policies import Decision, Policy
from paceline.server.messages import (
    BeginEpoch,
    BeginLease,
    DrawOrder,
    EpochOrder,
    EpochOver,
    LeaseDone,
    LeaseGranted,
    LeaveEpoch,
    Left,
    Proceed,
    RequestLease,
    StreamRead,
)
from paceline.server.parts import receive_parts
from paceline.server.sessions import Session, Sessions, SessionState
from paceline.server.updates import Updates

_MARKS = 10_000
"""Digests of streams that are kept."""


class LeaseService:
    """The ledger of a run, and the workers that wait for samples."""

    STATE = ("_ledger", "_marks", "_said_lost", "_said_apart")
    """Attributes that change."""

    def __init__(
        self,
        sessions: Sessions,
        policy: Policy,
        updates: Updates,
        recorder: Recorder,
        patience: float,
        execute: Callable[[Decision, int], None],
        say: Callable[[str], None],
    ) -> None:
        """execute: executes a decision of the policy that follows from a worker's message.

        say: lets the lead print a line.
        """
        self._sessions, self._policy, self._updates, self._recorder = sessions, policy, updates, recorder
        self._patience, self._execute, self._say = patience, execute, say
        self._ledger = Ledger(sessions, in_turns=policy.lockstep)
        self._marks: dict[tuple[int, int, int, int], tuple[int, int]] = {}
        """By loader, turn, source and samples: the first worker that has read so far, and its digest."""
        self._said_lost = self._said_apart = False

    def check_update(self, tickets: list[int], *, complete: bool) -> None:
        """Raises Mismatch if workers in lockstep do not update with all their gradients of one batch.

        complete: True if all workers are here. Says once that others update without a worker that has left them or the
        epoch, or is in one of its own, which a script may intend.
        """
        in_step = complete and self._ledger.in_step
        if in_step:
            self._updates.check_batches(tickets)
        loader, parts = self._updates.parts(tickets)
        waiting = {
            rank: session.request
            for rank, session in self._sessions.items()
            if session.state is SessionState.REQUESTING and isinstance(session.request, RequestLease)
        }
        alone = {rank for rank, request in waiting.items() if not self._ledger.is_entered(request.loader)}
        summed = [rank for rank, request in waiting.items() if not request.pull and rank not in alone]
        if in_step and summed:
            raise missed_step(sorted(summed), min(parts))
        if in_step and not alone:
            check_whole(parts)
        if not self._said_apart and (not is_whole(parts) or self._ledger.is_shared_out(loader)):
            self._said_apart = True
            self._say(
                "an update has no whole batch, since a worker has left an epoch before the others, or iterates over a "
                "loader by itself: all workers must step for the same batches; to evaluate, use torch.no_grad() or "
                "model.eval()"
            )

    # -- messages of workers -----------------------------------------------------------------------------------------

    def begin_epoch(self, session: Session, message: BeginEpoch) -> None:
        if message.shards:
            self._compare(session.rank, (message.loader, message.epoch, -1, 0), message.shards)
        session.enter(SessionState.ENTERING)
        session.request = message
        self.answer_waiting()

    def open_epoch(self, session: Session, message: EpochOrder) -> None:
        data = receive_parts(session.connection, self._patience)
        if data is None:
            raise Mismatch(f"rank {session.rank} did not send the order of the epoch", [session.rank])
        loader, epoch, now = message.loader, message.epoch, time.perf_counter()
        if message.stream is not None:
            self._ledger.open_stream(loader, epoch, message.stream, message.sizes)
            samples = -1
        else:
            order = msgspec.msgpack.decode(data)
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
        may_begin = message.ahead or self._policy.may_begin(session.rank)
        lease = self.lease(session, message.loader, message) if is_open and may_begin else None
        if lease is not None or message.ahead:
            self._sessions.send(session, self._granted(session, lease))
        elif not is_open or self._ledger.is_over(message.loader):
            self._end_epoch(session, message)  # it does not wait, so the policy must not count it as resting
        else:
            session.request = message
            session.enter(SessionState.REQUESTING)
            if not message.pull:
                self._ledger.carry(session.rank, message.loader)
            self._execute(self._policy.rest(session.rank), session.rank)
            self.answer_waiting()

    def begin(self, session: Session, message: BeginLease) -> None:
        """A worker begins a minibatch that it has fetched ahead."""
        self._ledger.begin(message.number)
        self._sessions.send(session, self._granted(session, None))

    def _granted(self, session: Session, lease: Lease | None) -> LeaseGranted:
        return LeaseGranted(lease, session.version, session.buffer, session.take_recalled())

    def finish(self, session: Session, message: LeaseDone) -> None:
        self._ledger.done(message.leases)
        self._recorder.add(events.Seen(session.rank, time.perf_counter(), message.leases))
        self.answer_waiting()

    def leave_epoch(self, session: Session, message: LeaveEpoch) -> None:
        is_open = self._ledger.is_open(message.loader, message.epoch)
        pushed = self._updates.leases_of(session.rank)
        leases = self._ledger.quit(session.rank, message.loader, message.epoch, pushed)
        self._record_return(session.rank, [lease.number for lease in leases], "abandoned")
        if is_open and self._policy.lockstep and self._ledger.is_left(message.loader):
            self._wake_all()  # what follows they do together again
        elif is_open:
            self._execute(self._policy.rest(session.rank), session.rank)
        self.answer_waiting()

    def _wake_all(self) -> None:
        for session in self._sessions.values():
            if not session.fresh:
                self._policy.wake(session.rank)

    # -- streams -----------------------------------------------------------------------------------------------------

    def read_stream(self, session: Session, message: StreamRead) -> None:
        """Compares what workers have found in a stream that all of them read, and notes the ends of its sources."""
        loader = message.loader
        for source, samples, digest in message.marks:
            self._compare(session.rank, (loader, message.turn, source, samples), digest)
        for source, length in message.ends:
            self._compare(session.rank, (loader, message.turn, source, -1), length)
            self._ledger.end_source(loader, source, message.turn, length)
            epoch = self._ledger.current(loader)
            self._recorder.add(events.Ended(session.rank, time.perf_counter(), loader, epoch, source, length))
        if message.lost and not self._said_lost:
            self._said_lost = True
            self._say(
                f"{message.lost} samples of a stream that a worker had and did not train on have gone by on the "
                "others, and are left out; shards can be read again"
            )
        self.answer_waiting()

    def _compare(self, rank: int, place: tuple[int, int, int, int], digest: int) -> None:
        """Raises Mismatch if a worker has found something else at a place of a stream, or its end elsewhere."""
        first, known = self._marks.setdefault(place, (rank, digest))
        if digest != known:
            raise unlike_streams([rank], first, place[-1] if place[-1] >= 0 else max(digest, known))
        while len(self._marks) > _MARKS:
            del self._marks[next(iter(self._marks))]

    # -- leases ------------------------------------------------------------------------------------------------------

    def lease(self, session: Session, loader: int, request: RequestLease | None = None) -> Lease | None:
        """The next lease for a worker, if there is one for it now; request: its own, if it has made one."""
        ahead = request is not None and request.ahead
        want = ANYTHING if request is None else Want(request.lane, not ahead, request.most)
        lease = self._ledger.lease(session.rank, loader, ahead=ahead, want=want)
        if lease is None and not ahead and self._recall(session.rank, loader):
            lease = self._ledger.lease(session.rank, loader, want=want)
        if lease is not None:
            session.fresh = False
            self._policy.wake(session.rank)
            now, source = time.perf_counter(), -1 if lease.stretch is None else lease.stretch.source
            where = (loader, lease.epoch, lease.first, lease.samples, source)
            self._recorder.add(events.LeaseGiven(session.rank, now, lease.number, *where))
        return lease

    def _recall(self, rank: int, loader: int) -> bool:
        """Takes a minibatch back that another worker has only fetched ahead, for one that has none; True if it could.

        So the samples of an epoch run out for all workers at once. Others learn of it with their next answer, before
        they begin it.
        """
        most: list[int] = []
        for session in self._sessions.values():
            pushed, waits = self._updates.leases_of(session.rank), session.state is SessionState.PUSHED
            ahead = self._ledger.fetched(session.rank, loader, pushed=pushed, waits=waits)
            if session.rank != rank and len(ahead) > len(most):
                most, holder = ahead, session
        if not most:
            return False
        holder.recalled.append(most[-1])
        self.give_back(holder.rank, most[-1:], "recalled")
        return True

    def left(self) -> Left:
        """By loader, the samples of its epoch that are part of no version."""
        return {loader: self._ledger.left(loader) for loader in self._ledger.loaders()}

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
        may_begin = is_open and self._policy.may_begin(session.rank)
        lease = self.lease(session, request.loader, request) if may_begin else None
        if lease is not None:
            if request.pull:
                self._sessions.pull(session)
            self._sessions.reply(session, self._granted(session, lease))
        elif not is_open or self._ledger.is_over(request.loader):
            self._end_epoch(session, request)

    def _end_epoch(self, session: Session, request: RequestLease) -> None:
        """Tells a worker that the epoch is over for all; it may compute next."""
        is_open = self._ledger.is_open(request.loader, request.epoch)
        if is_open and self._ledger.close(request.loader):
            now = time.perf_counter()
            self._recorder.add(events.Epoch(-1, now, request.loader, request.epoch, 0, over=True))
            if self._policy.lockstep:
                self._wake_all()  # also those that have left it before its end
        if request.pull:
            self._sessions.pull(session)
        turn, lengths = self._ledger.lengths(request.loader) if is_open else (0, [])
        self._sessions.reply(session, EpochOver(session.version, session.buffer, turn, lengths))
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
            if is_open and not self._policy.may_begin(session.rank):
                return  # until those that are behind have caught up
            if is_open:
                self._ledger.join(session.rank)
                self._ledger.enter(session.rank, loader)
            if not session.fresh:
                self._policy.wake(session.rank)
            if request.pull:
                self._sessions.pull(session)
            note = self._ledger.note(loader) if is_open else b""
            self._sessions.reply(session, Proceed(session.version, session.buffer, note=note))
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
