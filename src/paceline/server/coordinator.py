"""The first server: hears all workers, lets the policy decide, and does what it says.

It handles one message at a time, so a decision and what follows from it are never mixed with another. A worker that
has to wait just gets its answer later.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline import events
from paceline.config import RunSpec
from paceline.errors import Mismatch, ServerLost, TeamError, TeamTimeout, WorkerLost
from paceline.events import Recorder, ReplicaRecorder
from paceline.parameters.hyperparameters import Hyperparameters
from paceline.parameters.worker_table import WorkerTable
from paceline.policies import Arrival, Decision, Order, Policy, parse_policy
from paceline.server.admission import Admission
from paceline.server.barrier import ServerBarrier
from paceline.server.flags import SharedFlags
from paceline.server.leases import LeaseService
from paceline.server.memory import RunMemory
from paceline.server.messages import (
    BeginEpoch,
    CancelStep,
    EnterBarrier,
    Freeze,
    Frozen,
    LeaseDone,
    LeaveEpoch,
    LeaveTeam,
    MachineLost,
    Proceed,
    PushGradient,
    RequestLease,
    RunFailed,
    StepCancelled,
    Thaw,
)
from paceline.server.messages import EpochOrder as Drawn
from paceline.server.sessions import Session, Sessions, SessionState
from paceline.server.shard_set import ShardSet
from paceline.server.tuner import Tuner
from paceline.server.updates import Pushed, Updates
from paceline.transport.unix_connection import Closed, Listener

_TICK = 0.5
"""Seconds between looks at who has waited too long."""
_SMOOTHING = 0.9
"""Of the loss that a policy adapts to."""


class Coordinator:
    """One run."""

    def __init__(
        self,
        spec: RunSpec,
        sessions: dict[int, Session],
        shards: ShardSet,
        memory: RunMemory,
        say: Callable[[str], None],
    ) -> None:
        self._spec, self._shards, self._memory, self._say = spec, shards, memory, say
        table = WorkerTable(memory.table.bytes(0, memory.table.size), spec.capacity, len(spec.parameters))
        self._hyperparameters, self._used = Hyperparameters(None, table.slots), table.used
        self._flags = SharedFlags(memory.flags, spec.capacity)
        self._policy: Policy = parse_policy(spec.strategy).for_workers(range(spec.workers))
        folder = None if spec.folder is None else Path(spec.folder)
        self._recorder = Recorder(folder, -1) if spec.replica == 1 else ReplicaRecorder(folder, -1, spec.replica)
        self._sessions = Sessions(sessions, spec.capacity, spec.replica)
        self._updates = Updates(spec, self._sessions, shards, self._recorder, self._policy.k)
        self._samples = LeaseService(
            self._sessions, self._policy, self._updates, self._recorder, spec.timeouts.barrier, self._execute
        )
        self._barriers = ServerBarrier(self._sessions, spec.timeouts.barrier)
        self._admission: Admission | None = None
        self._began_with: list[dict[str, Any]] | None = None
        """The newest hyperparameters of one who was here from the start."""
        self._until: float | None = None
        """When to give up waiting for somebody to join, if all workers were lost."""
        self._tuner = Tuner(self._policy)
        self._tickets = 0
        self._loss: float | None = None
        self._by_descriptor = {session.connection.descriptor: session for session in sessions.values()}
        self._epoll = select.epoll()
        for descriptor in self._by_descriptor:
            self._epoll.register(descriptor, select.EPOLLIN)
        self._next_look = time.monotonic() + _TICK
        self._note_who_is_here()
        self._stuck = False
        """Whether all workers waited at the last look."""
        self._notices: dict[int, float] = {}
        """When next to say for whom a worker waits."""
        self._handlers: dict[type, Callable[[Session, Any], None]] = {
            PushGradient: self._push,
            StepCancelled: self._cancelled,
            BeginEpoch: self._samples.enter,
            Drawn: self._samples.drawn,
            RequestLease: self._samples.ask,
            LeaseDone: self._samples.seen,
            LeaveEpoch: self._samples.quit,
            EnterBarrier: self._barriers.come,
            Freeze: self._freeze,
            LeaveTeam: self._bye,
            MachineLost: self._unreachable,
        }

    def admit_from(self, listener: Listener, text: bytes) -> None:
        """Admits workers that connect from now on.

        text: the run's spec, encoded.
        """
        self._admission = Admission(listener, self._spec, text, self._memory, self._sessions)
        self._admission.session, self._admission.dismiss = self._session, self._flags.dismiss
        self._admission.open(self._epoll)

    def run(self) -> None:
        """Serve until all workers have left."""
        try:
            while self._sessions or self._expects_others():
                for descriptor, _ in self._epoll.poll(_TICK):
                    if descriptor in self._by_descriptor:
                        self._hear(self._by_descriptor[descriptor])
                    elif self._admission is not None:
                        self._admission.hear(descriptor)
                if time.monotonic() >= self._next_look:
                    self._look()
        except TeamError as error:
            self._fail(error)
        except Exception as error:
            self._fail(ServerLost(f"the server failed: {type(error).__name__}: {error}"))
            raise
        finally:
            self._recorder.close()
            if self._admission is not None:
                self._admission.close()
            self._epoll.close()
            for session in self._sessions.values():
                session.connection.close()  # nobody will answer there any more

    def _expects_others(self) -> bool:
        """Whether all workers were lost and others may yet come for them."""
        return self._until is not None and time.monotonic() < self._until

    # -- hearing -----------------------------------------------------------------------------------------------------

    def _hear(self, session: Session) -> None:
        try:
            message = session.connection.receive()
        except Closed:
            self._lost(session)
            return
        handle = self._handlers.get(type(message))
        if handle is None:
            raise Mismatch(
                f"rank {session.rank} sent a {type(message).__name__}, which was not expected", [session.rank]
            )
        if self._admission is not None:
            self._admission.passing(session, message)
        handle(session, message)

    def _look(self) -> None:
        """Say who has waited long, and give up if it was too long."""
        now = time.monotonic()
        self._next_look = now + _TICK
        self._recorder.flush()
        limits = self._spec.timeouts
        for session in self._sessions.values():
            if session.state is SessionState.COMPUTING:
                continue
            waited = now - session.since
            notice = max(limits.notice, self._notices.get(session.rank, 0.0))
            late = [
                other.rank
                for other in self._sessions.values()
                if other.state in (SessionState.COMPUTING, SessionState.DRAWING)
            ]
            if not late:
                continue
            if waited >= limits.barrier:
                raise TeamTimeout(
                    f"{self._sessions.called([session.rank])} waited {waited:.1f} s for {self._sessions.named(late)} "
                    f"at {session.state.value}; the timeout is {limits.barrier:g} s",
                    self._sessions.processes(late),
                )
            if waited < limits.notice:
                self._notices.pop(session.rank, None)
            elif waited >= notice:
                self._notices[session.rank] = 2 * waited
                self._say(
                    f"{self._sessions.called([session.rank])} waits for {self._sessions.named(late)} at "
                    f"{session.state.value}: {waited:.0f} s so far, the timeout is {limits.barrier:g} s"
                )
        self._unstick()

    def _unstick(self) -> None:
        """If everybody waits and nothing is under way, nobody will ever be answered: their scripts differ."""
        stuck = bool(self._sessions) and all(
            session.state not in (SessionState.COMPUTING, SessionState.DRAWING) for session in self._sessions.values()
        )
        before, self._stuck = self._stuck, stuck
        if not (stuck and before) or self._samples.unstick():  # a death may not have been heard at the first look
            return
        where: dict[str, list[int]] = {}
        for rank in sorted(self._sessions):
            where.setdefault(self._sessions[rank].state.value, []).append(rank)
        parts = [f"{self._sessions.named(ranks)} for {state}" for state, ranks in where.items()]
        raise Mismatch(
            f"nobody can go on: all wait, {', '.join(parts)}; all workers must do the same", list(self._sessions)
        )

    # -- gradients ---------------------------------------------------------------------------------------------------

    def _push(self, session: Session, message: PushGradient) -> None:
        now = time.perf_counter()
        if self._tuner.watching:
            self._tune(session, now)
        session.into(SessionState.PUSHED)
        session.request, session.outcome, session.fresh = message, "used", False
        self._policy.wake(session.rank)
        self._tickets += 1
        ticket, staleness = self._tickets, self._policy.version - message.version
        if message.loss is not None:
            before = message.loss if self._loss is None else self._loss
            self._loss = _SMOOTHING * before + (1 - _SMOOTHING) * message.loss
            self._policy.observe(self._loss)
        outcome, reason = self._decide(session, message, ticket, staleness)
        # Written down last: the worker has its answer already.
        self._recorder.add(
            events.Push(
                session.rank,
                now,
                ticket,
                message.version,
                staleness,
                message.samples,
                message.leases,
                message.bytes,
                self._shards.size - message.bytes,
                outcome,
                reason,
            )
        )

    def _tune(self, session: Session, now: float) -> None:
        """Let a worker's step count for the choice of a policy; if there is one, go on with it."""
        choice = self._tuner.step(session.rank, time.monotonic() - session.since, self._updates.seconds)
        if choice is None:
            return
        k = parse_policy(choice.strategy).for_workers(range(len(self._sessions))).k
        self._updates.expect(k)
        version = self._policy.version
        self._recorder.add(events.Switch(-1, now, version, choice.strategy, choice.reason))
        self._say(f"after {version} updates, auto goes on as {choice.strategy}: {choice.reason}")

    def _decide(self, session: Session, message: PushGradient, ticket: int, staleness: int) -> tuple[str, str]:
        """What becomes of a gradient, and why."""
        rank, bound = session.rank, self._updates.bound
        if message.skip:
            self._samples.done(message.leases)
            self._go(session, renew=True)
            self._samples.settle()
            return "skipped", "its gradient is not finite"
        if bound is not None and staleness > bound:
            self._samples.give_back(rank, message.leases, "dropped")
            session.outcome = "dropped"
            self._go(session, renew=True)
            self._samples.settle()
            return "dropped", f"older than the {bound} updates that are allowed"
        groups = self._hyperparameters.read(rank, message.hyperparameters)
        if not session.joined:
            self._began_with = groups
        elif self._began_with is not None and any(not other.joined for other in self._sessions.values()):
            groups = self._began_with  # the schedulers of one who joined began later
        used = None if message.complete else bytes(self._used[rank])
        self._updates.hold(Pushed(ticket, rank, message, groups, used, session.buffer, rank), staleness)
        decision = self._policy.arrive(Arrival(ticket, rank, message.version))
        self._execute(decision, rank)
        for one in decision.use:
            if one.ticket == ticket:
                return "used", decision.reason
        for one in decision.drop:
            if one.ticket == ticket:
                return "dropped", decision.reason
        return "held", decision.reason

    def _execute(self, decision: Decision, by: int) -> None:
        """Do what the policy has decided after something that `by` did."""
        for one in decision.drop:
            pushed = self._updates.held.pop(one.ticket)
            self._samples.give_back(pushed.rank, pushed.message.leases, "dropped")
            if pushed.rank in self._sessions:
                self._sessions[pushed.rank].outcome = "dropped"
        if len(decision.together) > 1 and self._policy.members:
            first = decision.together[0].worker
            group = next(group for group, members in self._policy.members.items() if first in members)
            self._updates.sum_group(group, [one.ticket for one in decision.together])
        if decision.use:
            for pushed in self._updates.make([one.ticket for one in decision.use], self._policy.version):
                self._samples.done(pushed.message.leases)
        for rank, order in decision.orders.items():
            session = self._sessions.get(rank)
            if session is None or order is Order.WAIT:
                continue
            if session.state is SessionState.PUSHED:
                self._updates.collect(rank)
                self._go(session, renew=order is not Order.STAY, by=by)
            elif order is Order.CANCEL and session.state is SessionState.COMPUTING:
                self._cancel(session)
        if decision.use or decision.drop:
            self._samples.settle()

    def _cancel(self, session: Session) -> None:
        if session.host:
            self._sessions.tell(session, CancelStep(self._policy.version))
            return
        self._flags.floors.stamp(session.rank, time.perf_counter())
        self._flags.floors.write(session.rank, self._policy.version & 0xFFFFFFFF)

    def _go(self, session: Session, *, renew: bool, by: int = -1) -> None:
        """Let a worker go on that has pushed or was cancelled."""
        request = session.request
        want = request.want if isinstance(request, PushGradient | StepCancelled) else None
        lease = None if want is None else self._samples.lease(session, want)
        if renew:
            self._sessions.renew(session)
        on = -1 if by == session.rank else by
        self._sessions.answer(session, Proceed(session.version, session.buffer, session.outcome, on, lease))

    def _cancelled(self, session: Session, message: StepCancelled) -> None:
        session.request, session.outcome = message, "cancelled"
        self._samples.give_back(session.rank, message.leases, "cancelled")
        self._go(session, renew=True)
        self._samples.settle()

    # -- standing still ----------------------------------------------------------------------------------------------

    def _freeze(self, session: Session, message: Freeze) -> None:
        """Change nothing until this worker allows it again: it reads, or writes, what else only the server does."""
        if message.renew:
            self._sessions.renew(session)
        pool = self._sessions.pool
        self._sessions.tell(session, Frozen(pool.version, pool.newest))
        try:
            answer = session.connection.receive_within(self._spec.timeouts.barrier)
        except Closed:
            self._lost(session)
            return
        if not isinstance(answer, Thaw):
            raise TeamTimeout(
                f"rank {session.rank} kept the server waiting while it read the parameters", [session.rank]
            )
        if answer.reload:
            self._shards.reload()

    # -- coming and leaving ------------------------------------------------------------------------------------------

    def _session(self, session: Session) -> None:
        """One who joins takes its place. Nobody waits for it before it has got samples, or has pushed."""
        rank = session.rank
        self._updates.collect(rank)  # of whoever had this rank before: its buffer is about to be another's
        self._hyperparameters.forget(rank)
        self._sessions.add(session)
        self._by_descriptor[session.connection.descriptor] = session
        self._epoll.register(session.connection.descriptor, select.EPOLLIN)
        self._until = None
        self._note_who_is_here()
        self._execute(self._policy.join(rank), rank)
        self._execute(self._policy.rest(rank), rank)
        self._updates.expect(self._policy.k)
        assert self._admission is not None
        self._admission.hand_over(session)
        self._say(f"rank {rank} has joined; there are {len(self._sessions)} workers now")

    def _note_who_is_here(self) -> None:
        self._flags.present = len(self._sessions)
        self._recorder.add(events.Roster(-1, time.perf_counter(), sorted(self._sessions), self._policy.version))

    def _bye(self, session: Session, _: LeaveTeam) -> None:
        self._remove(session, "abandoned")

    def _unreachable(self, session: Session, message: MachineLost) -> None:
        self._lost(session, f"is lost: {message.why}")

    def _lost(self, session: Session, how: str = "died") -> None:
        """A worker has died."""
        who, how = self._sessions.called([session.rank]), f"on {session.host} {how}" if session.host else how
        state = session.state
        self._recorder.add(events.Lost(session.rank, time.perf_counter()))
        leases = self._remove(session, "lost")
        if not (self._policy.spare or self._spec.elastic):
            if self._sessions:
                raise WorkerLost(
                    f"{who} {how}; under {self._spec.strategy} every update needs all workers",
                    self._sessions.processes([session.rank]),
                )
            return
        if not self._sessions:
            self._until = time.monotonic() + self._spec.timeouts.join if self._spec.elastic else None
            if self._admission is not None:
                self._admission.settle()
            return
        again = f"; what it trained on ({leases} minibatches) goes to the others" if leases else ""
        doing = "" if state is SessionState.COMPUTING else f" while it waited for {state.value}"
        self._say(f"{who} {how}{doing}; the other {len(self._sessions)} go on without it{again}")

    def _remove(self, session: Session, why: str) -> int:
        """A worker is gone: its version is free, its samples are for others; what it has pushed still counts."""
        rank = session.rank
        self._epoll.unregister(session.connection.descriptor)
        del self._by_descriptor[session.connection.descriptor]
        session.connection.close()
        del self._sessions[rank]
        self._flags.stay(rank)
        self._note_who_is_here()
        leases = self._samples.leave(rank, why)
        elastic = self._spec.elastic
        if elastic or (self._sessions and (why == "abandoned" or self._policy.spare)):
            self._execute(self._policy.leave(rank), rank)
            self._samples.settle()
            self._barriers.settle()
            self._updates.expect(self._policy.k)
        # Not before: an update may still have needed the version that its last gradient was computed on.
        self._sessions.pool.release(session.buffer)
        return leases

    def _fail(self, error: TeamError) -> None:
        """Tell all workers that the run can not go on."""
        self._recorder.flush()
        if self._admission is not None:
            self._admission.close()  # nobody can join any more, nor need be heard
        word = RunFailed(type(error).__name__, str(error), list(error.ranks))
        for session in self._sessions.values():
            self._sessions.tell(session, word)
        # They raise it, and leave; whoever computes finds it when it next looks.
        until = time.monotonic() + self._spec.timeouts.stop + 2.0
        while self._sessions and time.monotonic() < until:
            for descriptor, _ in self._epoll.poll(0.1):
                session = self._by_descriptor[descriptor]
                try:
                    session.connection.receive()
                    self._sessions.tell(session, word)  # whatever it asks for as it leaves
                except Closed:
                    self._epoll.unregister(descriptor)
                    del self._by_descriptor[descriptor], self._sessions[session.rank]
