"""The part of the first server that runs the policy: receives the workers' messages and executes its decisions.

It handles one message at a time, so a decision is executed as a whole before the next one. A worker that has to wait
just gets its answer later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from paceline import events, failpoints
from paceline.config import RunSpec
from paceline.errors import Mismatch, ServerLost, TeamError, WorkerLost
from paceline.events.recorder import Recorder
from paceline.parameters.hyperparameters import Hyperparameters
from paceline.parameters.worker_table import WorkerTable
from paceline.policies import Arrival, Decision, Order, Policy, parse_policy
from paceline.server.admission import Admission
from paceline.server.barrier import ServerBarrier
from paceline.server.comparison import PushComparison
from paceline.server.flags import SharedFlags
from paceline.server.freezing import Freezing
from paceline.server.journal import Entry, EntryKind, Journal
from paceline.server.journaled_recorder import JournaledRecorder
from paceline.server.leases import LeaseService
from paceline.server.marking import VersionMarking
from paceline.server.memory import RunMemory
from paceline.server.messages import (
    BeginEpoch,
    BeginLease,
    CancelStep,
    EnterBarrier,
    EpochOrder,
    Freeze,
    Hello,
    LeaseDone,
    LeaveEpoch,
    LeaveTeam,
    MachineLost,
    MarkVersion,
    Proceed,
    PushGradient,
    RequestLease,
    RequestLeft,
    RunFailed,
    SnapshotNote,
    StepCancelled,
    StreamRead,
)
from paceline.server.recovery import keep_state, replay
from paceline.server.session_link import Detached, SessionLink
from paceline.server.sessions import Session, Sessions, SessionState
from paceline.server.shard_set import ShardSet
from paceline.server.tuner import Tuner
from paceline.server.updates import PendingPush, Updates
from paceline.server.waits import TICK, WaitMonitor
from paceline.transport.unix_connection import Closed, Listener

_SMOOTHING = 0.9
"""Weight of the previous value in the moving average of the loss, which a policy adapts to."""


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
        journal: Journal,
        recorder: Recorder,
    ) -> None:
        """listener: to which workers connect that join later. text: the spec, encoded.

        journal: of a coordinator that was killed, if this one goes on with it; then `restore` follows.
        """
        self._spec, self._shards, self._journal, self._recorder = spec, shards, journal, recorder
        self._say = lambda text: None if journal.replaying else say(text)
        table = WorkerTable(memory.table.bytes(0, memory.table.size), spec.capacity, len(spec.parameters))
        self._hyperparameters, self._used = Hyperparameters(None, table.slots), table.used
        self._flags = SharedFlags(memory.flags, spec.capacity)
        self._policy: Policy = parse_policy(spec.strategy).for_workers(range(spec.workers))
        if spec.policy:
            self._policy.load_state_dict(spec.policy["values"])
        self._sessions = Sessions(sessions, spec.versions, spec.replica)
        self._sessions.say = self._say
        self._updates = Updates(spec, self._sessions, shards, recorder, self._policy.k, journal)
        known = (self._sessions, self._policy, self._updates, recorder)
        self._leases = LeaseService(*known, spec.timeouts.barrier, self._execute, self._sessions.tell_lead)
        told = (self._sessions.tell_lead, lambda: {"values": self._policy.state_dict(), "loss": self._loss})
        self._marking = VersionMarking(self._flags, self._updates, self._leases, shards.kept, *told)
        self._freezing = Freezing(self._sessions, shards, spec.timeouts.barrier, self._lose)
        self._barrier = ServerBarrier(self._sessions, spec.timeouts.barrier)
        self._first_groups: list[dict[str, Any]] | None = None
        """The newest hyperparameters of a worker that was there from the start."""
        self._rejoin_deadline: float | None = None
        """If all workers were lost: until when another may join."""
        self._tuner = Tuner(*known, journal, self._say)
        self._comparison = PushComparison(self._sessions.tell_lead)
        self._pushes = 0
        self._loss: float | None = spec.policy.get("loss")
        self._admission = Admission(
            listener, spec, text, memory, self._sessions, shards, journal, self._admit, self._flags.dismiss
        )
        shards.meet = self._admission.meet
        self._sessions.spare = lambda: self._policy.spare or spec.elastic
        self._waits = WaitMonitor(self._sessions, spec.timeouts, self._resolve, self._lose_evicted, self._say)
        if not journal.replaying:
            self._record_present()
        self._handlers: dict[type, Callable[[Session, Any], object]] = {
            PushGradient: self._push,
            StepCancelled: self._leave_step,
            BeginEpoch: self._leases.begin_epoch,
            EpochOrder: self._leases.open_epoch,
            RequestLease: self._request_lease,
            BeginLease: self._leases.begin,
            LeaseDone: self._leases.finish,
            StreamRead: self._leases.read_stream,
            LeaveEpoch: self._leases.leave_epoch,
            EnterBarrier: self._barrier.enter,
            Freeze: self._freezing.freeze,
            MarkVersion: self._marking.request,
            RequestLeft: self._marking.answer,
            SnapshotNote: self._marking.note,
            LeaveTeam: lambda session, _: self._remove(session, "abandoned"),
            MachineLost: self._lose_machine,
        }

    @property
    def parts(self) -> list[tuple[object, tuple[str, ...]]]:
        """The objects that make its state, and their attributes that change."""
        return [
            (self, ("_first_groups", "_rejoin_deadline", "_pushes", "_loss")),
            (self._policy, tuple(sorted(vars(self._policy)))),
            *((part, part.STATE) for part in (self._updates, self._leases, self._marking, self._comparison)),
            (self._hyperparameters, Hyperparameters.STATE),
            (self._sessions, ("pool",)),
            (self._shards, ("operations",)),
            (self._recorder, JournaledRecorder.STATE),
        ]

    @property
    def known(self) -> tuple[Sessions, list[Session]]:
        """The workers that are present, and those that wait to join."""
        return self._sessions, self._admission.pending

    def do_again(self, entry: Entry) -> None:
        """Does what an entry of the journal is about, but for messages."""
        if entry.kind is EntryKind.JOIN:
            self._admission.join(msgspec.msgpack.decode(entry.data, type=Hello), None)
        elif entry.kind is EntryKind.DISMISS:
            self._flags.dismiss(entry.rank)
        elif entry.kind is EntryKind.EVICT:
            self._sessions[entry.rank].evicted = entry.data.decode()
            self._lose(self._sessions[entry.rank])
        elif entry.kind is EntryKind.RESOLVE:
            self._leases.resolve_deadlock()
        elif entry.kind is EntryKind.BACK:
            self._record_back(entry.rank)

    def _record_back(self, server: int) -> None:
        """A server that was killed is back."""
        version = self._policy.version
        self._recorder.add(events.Recovery(-1, time.perf_counter(), server, version))
        self._say(f"server {server} is back, at version {version}")

    def run(self) -> None:
        """Serves until all workers have left."""
        try:
            if self._journal.replaying:
                replay(self, self._journal, self.receive)
                self._admission.came_back.append(0)
            while self._sessions or self._expects_others():
                for server in self._admission.take_back():
                    self._journal.add(EntryKind.BACK, server)
                    self._record_back(server)
                if self._journal.due and (why := keep_state(self, self._journal, self._recorder)):
                    self._shards.run.state.give_up()
                    self._say(f"the server's state is not kept any more, so if it is killed the run ends: {why}")
                for descriptor, session in self._sessions.ready(TICK):
                    if session is not None:
                        self.receive(session)
                    else:
                        self._admission.receive(descriptor)
                self._admission.receive_postponed()
                if self._waits.due:
                    self._recorder.flush()
                    self._waits.check()
                    self._remove_left()
        except TeamError as error:
            self._fail(error)
        except Exception as error:
            self._fail(ServerLost(f"the server failed: {type(error).__name__}: {error}"))
            raise
        finally:
            self._recorder.close()
            self._admission.close()
            self._sessions.close()

    def _expects_others(self) -> bool:
        """True if all workers were lost and others may still join."""
        return self._rejoin_deadline is not None and time.monotonic() < self._rejoin_deadline

    # -- receiving ---------------------------------------------------------------------------------------------------

    def receive(self, session: Session) -> None:
        try:
            message = session.connection.receive()
        except Detached:
            return  # its relay was killed, and the worker connects again
        except Closed:
            if self._journal.value(lambda: self._sessions.has_left(session, self._flags)):
                self._remove(session, "abandoned")
            else:
                self._lose(session)
            return
        if (handle := self._handlers.get(type(message))) is None:
            raise Mismatch(f"rank {session.rank} sent an unexpected {type(message).__name__}", [session.rank])
        self._admission.before(session, message)
        handle(session, message)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def _push(self, session: Session, message: PushGradient) -> None:
        failpoints.hit("push.received")
        now = time.perf_counter()
        if self._tuner.watching:
            self._tuner.tune(session, now)
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
        groups = self._hyperparameters.read(rank, message.hyperparameters, self._journal.value)
        if not session.joined:
            self._first_groups = groups
        elif self._first_groups is not None and any(not other.joined for other in self._sessions.values()):
            groups = self._first_groups  # the schedulers of a worker that joined began later
        used = None if message.complete else self._journal.value(lambda: bytes(self._used[rank]))
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
        together = {one.worker for one in decision.together}
        group = next((group for group, members in self._policy.members.items() if together <= members), None)
        if len(together) > 1 and group is not None:  # else one is gone, and the update takes them one by one
            self._updates.reduce_group(group, [one.ticket for one in decision.together])
        if decision.use:
            tickets = [one.ticket for one in decision.use]
            if self._policy.lockstep and not self._spec.elastic:
                self._leases.check_update(tickets, complete=len(self._sessions) == self._spec.workers)
            used = self._updates.apply(tickets, self._policy.version)
            for pushed in used:
                self._leases.done(pushed.message.leases)
            self._marking.updated(self._policy.version)
            if self._policy.lockstep:
                self._comparison.compare(used)
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
        recalled = session.take_recalled()
        answer = Proceed(session.version, session.buffer, session.outcome, on, lease, recalled=recalled)
        self._sessions.reply(session, answer)

    def _request_lease(self, session: Session, message: RequestLease) -> None:
        self._leases.request(session, message)
        if session.state is SessionState.REQUESTING:
            self._barrier.release_if_complete()  # those that compute do not wait for it

    def _leave_step(self, session: Session, message: StepCancelled) -> None:
        session.request, session.outcome = message, "cancelled"
        self._leases.give_back(session.rank, message.leases, "cancelled")
        self._proceed(session, pull=True)
        self._leases.answer_waiting()

    # -- joining and leaving -----------------------------------------------------------------------------------------

    def _admit(self, session: Session) -> None:
        """Adds a worker that joins. No other worker waits for it before it has a lease or has pushed."""
        rank = session.rank
        self._updates.collect(rank)  # of the rank's previous worker, whose buffer it takes
        self._hyperparameters.forget(rank)
        self._sessions.add(session)
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
        how = session.evicted or how
        who, how = self._sessions.names([session.rank]), f"on {session.host} {how}" if session.host else how
        state = session.state
        self._recorder.add(events.Lost(session.rank, time.perf_counter()))
        leases = self._remove(session, "lost")
        if not self._sessions.spare():
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

    def _remove_left(self) -> None:
        """Removes workers that have left on purpose while this server was away, or whose relay does not come back."""
        for session in list(self._sessions.values()):
            link, left = session.connection, self._flags.has_left(session.rank, session.pid)
            if isinstance(link, SessionLink) and not link.attached:
                if link.relayed and (left or not self._shards.run.state.relayed):
                    self._sessions.end_detached(session, left=left)
                elif left:
                    self.receive(session)

    def _lose_evicted(self, session: Session) -> None:
        self._journal.add(EntryKind.EVICT, session.rank, session.evicted.encode())
        self._lose(session)

    def _resolve(self) -> bool:
        self._journal.add(EntryKind.RESOLVE)
        return self._leases.resolve_deadlock()

    def _lose_machine(self, session: Session, message: MachineLost) -> None:
        if message.servers:
            raise ServerLost(message.why, self._sessions.processes([session.rank]))
        self._lose(session, f"is lost: {message.why}")

    def _remove(self, session: Session, why: str) -> int:
        """Removes a worker: its version and leases are released, its pushes still count. Returns its open leases."""
        rank = session.rank
        self._sessions.remove(session)
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
        self._journal.end()
        until = time.monotonic() + self._spec.timeouts.stop
        while time.monotonic() < until and not self._sessions.attached:
            self._admission.meet(TICK)
        self._admission.close()
        failed = RunFailed(type(error).__name__, str(error), list(error.ranks))
        self._sessions.fail(failed, self._spec.timeouts.stop + 2.0)
