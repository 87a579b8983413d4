"""The part of the first server that runs the policy: receives the workers' messages and executes its decisions.

It handles one message at a time, so a decision is executed as a whole before the next one. A worker that has to wait
just gets its answer later.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline import events
from paceline.config import RunSpec
from paceline.errors import (
    Mismatch,
    ServerLost,
    TeamError,
    TeamTimeout,
    WorkerLost,
    still_waits,
    unlike_rates,
    waited_too_long,
)
from paceline.events.recorder import Recorder, ReplicaRecorder
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
    EpochOrder,
    Freeze,
    Frozen,
    LeaseDone,
    LeaveEpoch,
    LeaveTeam,
    MachineLost,
    Proceed,
    PushGradient,
    ReloadState,
    RequestLease,
    RunFailed,
    StepCancelled,
    Thaw,
)
from paceline.server.sessions import Session, Sessions, SessionState
from paceline.server.shard import ShardSet
from paceline.server.tuner import Tuner
from paceline.server.updates import PendingPush, Updates
from paceline.transport.unix_connection import Closed, Listener

_TICK = 0.5
"""Seconds between checks for workers that have waited too long."""
_SMOOTHING = 0.9
"""Weight of the previous value in the moving average of the loss, which a policy adapts to."""

_BUSY = (SessionState.COMPUTING, SessionState.DRAWING)
"""States in which a worker waits for no other."""


class Coordinator:
    """Coordinates one run."""

    def __init__(
        self,
        spec: RunSpec,
        sessions: dict[int, Session],
        shards: ShardSet,
        memory: RunMemory,
        listener: Listener,
        text: bytes,
        say: Callable[[str], None],
    ) -> None:
        """listener: to which workers connect that join later. text: the spec, encoded."""
        self._spec, self._shards, self._say = spec, shards, say
        table = WorkerTable(memory.table.bytes(0, memory.table.size), spec.capacity, len(spec.parameters))
        self._hyperparameters, self._used = Hyperparameters(None, table.slots), table.used
        self._flags = SharedFlags(memory.flags, spec.capacity)
        self._policy: Policy = parse_policy(spec.strategy).for_workers(range(spec.workers))
        folder = None if spec.folder is None else Path(spec.folder)
        self._recorder = Recorder(folder, -1) if spec.replica == 1 else ReplicaRecorder(folder, -1, spec.replica)
        self._sessions = Sessions(sessions, spec.versions, spec.replica)
        self._updates = Updates(spec, self._sessions, shards, self._recorder, self._policy.k)
        self._leases = LeaseService(
            self._sessions, self._policy, self._updates, self._recorder, spec.timeouts.barrier, self._execute
        )
        self._barrier = ServerBarrier(self._sessions, spec.timeouts.barrier)
        self._first_groups: list[dict[str, Any]] | None = None
        """The newest hyperparameters of a worker that was there from the start."""
        self._rejoin_deadline: float | None = None
        """If all workers were lost: until when another may join."""
        self._tuner = Tuner(self._policy)
        self._said_rates = False
        """True if it was said that workers have different learning rates."""
        self._pushes = 0
        self._loss: float | None = None
        self._by_descriptor = {session.connection.descriptor: session for session in sessions.values()}
        self._epoll = select.epoll()
        for descriptor in self._by_descriptor:
            self._epoll.register(descriptor, select.EPOLLIN)
        self._admission = Admission(
            listener, spec, text, memory, self._sessions, self._epoll, self._admit, self._flags.dismiss
        )
        self._next_check = time.monotonic() + _TICK
        self._record_present()
        self._all_waited = False
        """True if all workers waited at the last check."""
        self._notices: dict[int, float] = {}
        """By rank, seconds of waiting after which it is reported again."""
        self._handlers: dict[type, Callable[[Session, Any], object]] = {
            PushGradient: self._push,
            StepCancelled: self._leave_step,
            BeginEpoch: self._leases.begin_epoch,
            EpochOrder: self._leases.open_epoch,
            RequestLease: self._request_lease,
            LeaseDone: self._leases.finish,
            LeaveEpoch: self._leases.leave_epoch,
            EnterBarrier: self._barrier.enter,
            Freeze: self._freeze,
            LeaveTeam: lambda session, _: self._remove(session, "abandoned"),
            MachineLost: lambda session, message: self._lose(session, f"is lost: {message.why}"),
        }

    def run(self) -> None:
        """Serves until all workers have left."""
        try:
            while self._sessions or self._expects_others():
                for descriptor, _ in self._epoll.poll(_TICK):
                    if descriptor in self._by_descriptor:
                        self._receive(self._by_descriptor[descriptor])
                    else:
                        self._admission.receive(descriptor)
                if time.monotonic() >= self._next_check:
                    self._check_waits()
        except TeamError as error:
            self._fail(error)
        except Exception as error:
            self._fail(ServerLost(f"the server failed: {type(error).__name__}: {error}"))
            raise
        finally:
            self._recorder.close()
            self._admission.close()
            self._epoll.close()
            for session in self._sessions.values():
                session.connection.close()

    def _expects_others(self) -> bool:
        """True if all workers were lost and others may still join."""
        return self._rejoin_deadline is not None and time.monotonic() < self._rejoin_deadline

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _receive(self, session: Session) -> None:
        try:
            message = session.connection.receive()
        except Closed:
            self._lose(session)
            return
        handle = self._handlers.get(type(message))
        if handle is None:
            raise Mismatch(
                f"rank {session.rank} sent a {type(message).__name__}, which was not expected", [session.rank]
            )
        self._admission.before(session, message)
        handle(session, message)

    def _check_waits(self) -> None:
        """Reports workers that have waited long; raises TeamTimeout if it was too long."""
        now = time.monotonic()
        self._next_check = now + _TICK
        self._recorder.flush()
        limits = self._spec.timeouts
        late = [other.rank for other in self._sessions.values() if other.state in _BUSY]
        for session in self._sessions.values():
            if session.state is SessionState.COMPUTING:
                continue
            waited = now - session.since
            notice = max(limits.notice, self._notices.get(session.rank, 0.0))
            if not late:
                continue
            who, others = self._sessions.names([session.rank]), self._sessions.names_and_hosts(late)
            wait = (who, waited, others, session.state.value, limits.barrier)
            if waited >= limits.barrier:
                raise TeamTimeout(waited_too_long(*wait), self._sessions.processes(late))
            if waited < limits.notice:
                self._notices.pop(session.rank, None)
            elif waited >= notice:
                self._notices[session.rank] = 2 * waited
                self._say(still_waits(*wait))
        self._check_deadlock()

    def _check_deadlock(self) -> None:
        """Raises Mismatch if all workers wait for each other: their scripts differ."""
        stuck = bool(self._sessions) and all(session.state not in _BUSY for session in self._sessions.values())
        before, self._all_waited = self._all_waited, stuck
        # At the first check a closed connection may not have been read yet.
        if not (stuck and before) or self._leases.resolve_deadlock():
            return
        where: dict[str, list[int]] = {}
        for rank in sorted(self._sessions):
            where.setdefault(self._sessions[rank].state.value, []).append(rank)
        parts = [f"{self._sessions.names_and_hosts(ranks)} for {state}" for state, ranks in where.items()]
        raise Mismatch(
            f"nobody can go on: all wait, {', '.join(parts)}; all workers must do the same", list(self._sessions)
        )

    # -- gradients ---------------------------------------------------------------------------------------------------

    def _push(self, session: Session, message: PushGradient) -> None:
        now = time.perf_counter()
        if self._tuner.watching:
            self._tune(session, now)
        session.enter(SessionState.PUSHED)
        session.request, session.outcome, session.fresh = message, "used", False
        self._policy.wake(session.rank)
        self._pushes += 1
        ticket, staleness = self._pushes, self._policy.version - message.version
        if message.loss is not None:
            before = message.loss if self._loss is None else self._loss
            self._loss = _SMOOTHING * before + (1 - _SMOOTHING) * message.loss
            self._policy.observe(self._loss)
        outcome, reason = self._decide(session, message, ticket, staleness)
        # Recorded last: the worker has its answer already.
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
        """Passes the length of a worker's step to the tuner, and follows its choice of a policy."""
        choice = self._tuner.step(session.rank, time.monotonic() - session.since, self._updates.seconds)
        if choice is None:
            return
        k = parse_policy(choice.strategy).for_workers(range(len(self._sessions))).k
        self._updates.set_k(k)
        version = self._policy.version
        self._recorder.add(events.Switch(-1, now, version, choice.strategy, choice.reason))
        self._say(f"after {version} updates, auto goes on as {choice.strategy}: {choice.reason}")

    def _decide(self, session: Session, message: PushGradient, ticket: int, staleness: int) -> tuple[str, str]:
        """The outcome of a push, and its reason."""
        rank, bound = session.rank, self._updates.bound
        if message.skip:
            self._leases.done(message.leases)
            self._proceed(session, pull=True)
            self._leases.answer_waiting()
            return "skipped", "its gradient is not finite"
        if bound is not None and staleness > bound:
            self._leases.give_back(rank, message.leases, "dropped")
            session.outcome = "dropped"
            self._proceed(session, pull=True)
            self._leases.answer_waiting()
            return "dropped", f"older than the {bound} updates that are allowed"
        groups = self._hyperparameters.read(rank, message.hyperparameters)
        if not session.joined:
            self._first_groups = groups
        elif self._first_groups is not None and any(not other.joined for other in self._sessions.values()):
            groups = self._first_groups  # the schedulers of a worker that joined began later
        used = None if message.complete else bytes(self._used[rank])
        self._updates.hold(PendingPush(ticket, rank, message, groups, used, session.buffer, rank), staleness)
        decision = self._policy.arrive(Arrival(ticket, rank, message.version))
        self._execute(decision, rank)
        for outcome, arrivals in (("used", decision.use), ("dropped", decision.drop)):
            for one in arrivals:
                if one.ticket == ticket:
                    return outcome, decision.reason
        return "held", decision.reason

    def _execute(self, decision: Decision, by: int) -> None:
        """Executes the policy's decision.

        by: the rank whose message it answers.
        """
        for one in decision.drop:
            pushed = self._updates.held.pop(one.ticket)
            self._leases.give_back(pushed.rank, pushed.message.leases, "dropped")
            if pushed.rank in self._sessions:
                self._sessions[pushed.rank].outcome = "dropped"
        if len(decision.together) > 1 and self._policy.members:
            first = decision.together[0].worker
            group = next(group for group, members in self._policy.members.items() if first in members)
            self._updates.reduce_group(group, [one.ticket for one in decision.together])
        if decision.use:
            if self._leases.in_step and not self._spec.elastic and len(self._sessions) == self._spec.workers:
                self._updates.check_batches([one.ticket for one in decision.use])
            used = self._updates.apply([one.ticket for one in decision.use], self._policy.version)
            for pushed in used:
                self._leases.done(pushed.message.leases)
            if self._policy.lockstep and not self._said_rates:
                self._compare_rates(used)
        for rank, order in decision.orders.items():
            session = self._sessions.get(rank)
            if session is None or order is Order.WAIT:
                continue
            if session.state is SessionState.PUSHED:
                self._updates.collect(rank)
                self._proceed(session, pull=order is not Order.STAY, by=by)
            elif order is Order.CANCEL and session.state is SessionState.COMPUTING:
                self._cancel(session)
        if decision.use or decision.drop:
            self._leases.answer_waiting()

    def _compare_rates(self, used: list[PendingPush]) -> None:
        """Says once if workers that make every update together have different learning rates."""
        first = used[0]
        for pushed in used[1:]:
            if pushed.groups is not first.groups and pushed.groups != first.groups:
                self._said_rates = True
                self._say(unlike_rates(pushed.rank, first.rank))
                return

    def _cancel(self, session: Session) -> None:
        if session.host:
            self._sessions.send(session, CancelStep(self._policy.version))
            return
        self._flags.cancel(session.rank, self._policy.version, time.perf_counter())

    def _proceed(self, session: Session, *, pull: bool, by: int = -1) -> None:
        """Lets a worker go on that has pushed or was cancelled."""
        request = session.request
        want = request.next_loader if isinstance(request, PushGradient | StepCancelled) else None
        lease = None if want is None else self._leases.lease(session, want)
        if pull:
            self._sessions.pull(session)
        on = -1 if by == session.rank else by
        self._sessions.reply(session, Proceed(session.version, session.buffer, session.outcome, on, lease))

    def _request_lease(self, session: Session, message: RequestLease) -> None:
        self._leases.request(session, message)
        if session.state is SessionState.REQUESTING:
            self._barrier.release_if_complete()  # those that compute do not wait for it

    def _leave_step(self, session: Session, message: StepCancelled) -> None:
        session.request, session.outcome = message, "cancelled"
        self._leases.give_back(session.rank, message.leases, "cancelled")
        self._proceed(session, pull=True)
        self._leases.answer_waiting()

    # -- freezing ----------------------------------------------------------------------------------------------------

    def _freeze(self, session: Session, message: Freeze) -> None:
        """Handles no other message until this worker thaws: it reads or writes memory that the servers own."""
        if message.pull:
            self._sessions.pull(session)
        pool = self._sessions.pool
        self._sessions.send(session, Frozen(pool.version, pool.newest))
        try:
            answer = session.connection.receive_within(self._spec.timeouts.barrier)
        except Closed:
            self._lose(session)
            return
        if not isinstance(answer, Thaw):
            raise TeamTimeout(
                f"rank {session.rank} kept the server waiting while it read the parameters", [session.rank]
            )
        if answer.reload:
            self._shards.handle(ReloadState())

    # -- joining and leaving -----------------------------------------------------------------------------------------

    def _admit(self, session: Session) -> None:
        """Adds a worker that joins. No other worker waits for it before it has a lease or has pushed."""
        rank = session.rank
        self._updates.collect(rank)  # of the rank's previous worker, whose buffer it takes
        self._hyperparameters.forget(rank)
        self._sessions.add(session)
        self._by_descriptor[session.connection.descriptor] = session
        self._epoll.register(session.connection.descriptor, select.EPOLLIN)
        self._rejoin_deadline = None
        self._record_present()
        self._execute(self._policy.join(rank), rank)
        self._execute(self._policy.rest(rank), rank)
        self._updates.set_k(self._policy.k)
        self._admission.send_run(session)
        self._say(f"rank {rank} has joined; there are {len(self._sessions)} workers now")

    def _record_present(self) -> None:
        self._flags.present = len(self._sessions)
        self._recorder.add(events.Roster(-1, time.perf_counter(), sorted(self._sessions), self._policy.version))

    def _lose(self, session: Session, how: str = "died") -> None:
        """Removes a worker that has died; raises WorkerLost if the policy needs it."""
        who, how = self._sessions.names([session.rank]), f"on {session.host} {how}" if session.host else how
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
            self._rejoin_deadline = time.monotonic() + self._spec.timeouts.join if self._spec.elastic else None
            self._admission.admit_without_copy()
            return
        again = f"; what it trained on ({leases} minibatches) goes to the others" if leases else ""
        doing = "" if state is SessionState.COMPUTING else f" while it waited for {state.value}"
        self._say(f"{who} {how}{doing}; the other {len(self._sessions)} go on without it{again}")

    def _remove(self, session: Session, why: str) -> int:
        """Removes a worker: its version and leases are released, its pushes still count. Returns its open leases."""
        rank = session.rank
        self._epoll.unregister(session.connection.descriptor)
        del self._by_descriptor[session.connection.descriptor]
        session.connection.close()
        del self._sessions[rank]
        self._flags.clear_dismissal(rank)
        self._record_present()
        leases = self._leases.leave(rank, why)
        elastic = self._spec.elastic
        if elastic or (self._sessions and (why == "abandoned" or self._policy.spare)):
            self._execute(self._policy.leave(rank), rank)
            self._leases.answer_waiting()
            self._barrier.release_if_complete()
            self._updates.set_k(self._policy.k)
        # Not before: an update may still have needed the version that its last gradient was computed on.
        self._sessions.pool.release(session.buffer)
        return leases

    def _fail(self, error: TeamError) -> None:
        """Sends the error to all workers, and waits until they have left."""
        self._recorder.flush()
        self._admission.close()
        failed = RunFailed(type(error).__name__, str(error), list(error.ranks))
        for session in self._sessions.values():
            self._sessions.send(session, failed)
        # They raise it and leave; one that computes finds it at its next request.
        until = time.monotonic() + self._spec.timeouts.stop + 2.0
        while self._sessions and time.monotonic() < until:
            for descriptor, _ in self._epoll.poll(0.1):
                session = self._by_descriptor[descriptor]
                try:
                    session.connection.receive()
                    self._sessions.send(session, failed)
                except Closed:
                    self._epoll.unregister(descriptor)
                    del self._by_descriptor[descriptor], self._sessions[session.rank]
