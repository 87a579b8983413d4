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
from paceline.config import parse_strategy
from paceline.errors import Mismatch, ServerLost, TeamError, TeamTimeout, WorkerLost
from paceline.events import Recorder, ReplicaRecorder
from paceline.parameters.hyperparameters import Hyperparameters
from paceline.policies import Decision, Groups, Order, Policy, make_policy
from paceline.policies import Push as Arrival
from paceline.server.door import Door
from paceline.server.meetings import Meetings
from paceline.server.messages import (
    Ask,
    Bye,
    Cancel,
    Cancelled,
    Done,
    Enter,
    Failed,
    Freeze,
    Frozen,
    Go,
    Meet,
    Plan,
    Push,
    Quit,
    Thaw,
    Unreachable,
)
from paceline.server.messages import Order as Drawn
from paceline.server.samples import Samples
from paceline.server.seats import Seat, Seats, State
from paceline.server.shards import Shards
from paceline.server.tuner import Tuner
from paceline.server.updates import Pushed, Updates
from paceline.server.words import SharedWords
from paceline.transport import Memory
from paceline.transport.wire import Closed, Listener

_TICK = 0.5
"""Seconds between looks at who has waited too long."""
_SMOOTHING = 0.9
"""Of the loss that a policy adapts to."""


class Coordinator:
    """One run."""

    def __init__(
        self,
        plan: Plan,
        seats: dict[int, Seat],
        shards: Shards,
        hyperparameters: Hyperparameters,
        used: list[memoryview],
        words: SharedWords,
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._shards = plan, shards
        self._hyperparameters, self._used, self._words, self._say = hyperparameters, used, words, say
        self._policy: Policy = make_policy(parse_strategy(plan.strategy), range(plan.workers))
        folder = None if plan.folder is None else Path(plan.folder)
        self._recorder = Recorder(folder, -1) if plan.replica == 1 else ReplicaRecorder(folder, -1, plan.replica)
        self._seats = Seats(seats, plan.capacity, plan.replica)
        self._updates = Updates(plan, self._seats, shards, self._recorder, self._policy.k)
        self._samples = Samples(
            self._seats, self._policy, self._updates, self._recorder, plan.timeouts.meeting, self._execute
        )
        self._meetings = Meetings(self._seats, plan.timeouts.meeting)
        self._door: Door | None = None
        self._began_with: list[dict[str, Any]] | None = None
        """The newest hyperparameters of one who was here from the start."""
        self._until: float | None = None
        """When to give up waiting for somebody to join, if all workers were lost."""
        self._tuner = Tuner(self._policy, parse_strategy(plan.strategy))
        self._tickets = 0
        self._loss: float | None = None
        self._by_descriptor = {seat.wire.descriptor: seat for seat in seats.values()}
        self._epoll = select.epoll()
        for descriptor in self._by_descriptor:
            self._epoll.register(descriptor, select.EPOLLIN)
        self._next_look = time.monotonic() + _TICK
        self._note_who_is_here()
        self._stuck = False
        """Whether all workers waited at the last look."""
        self._notices: dict[int, float] = {}
        """When next to say for whom a worker waits."""
        self._handlers: dict[type, Callable[[Seat, Any], None]] = {
            Push: self._push,
            Cancelled: self._cancelled,
            Enter: self._samples.enter,
            Drawn: self._samples.drawn,
            Ask: self._samples.ask,
            Done: self._samples.seen,
            Quit: self._samples.quit,
            Meet: self._meetings.come,
            Freeze: self._freeze,
            Bye: self._bye,
            Unreachable: self._unreachable,
        }

    def let_in(self, listener: Listener, text: bytes, memories: list[Memory]) -> None:
        """From here on, others may join.

        text: the plan, as it is handed to them, with these memories.
        """
        self._door = Door(listener, self._plan, text, memories, self._seats)
        self._door.seat, self._door.dismiss = self._seat, self._words.dismiss
        self._door.open(self._epoll)

    def run(self) -> None:
        """Serve until all workers have left."""
        try:
            while self._seats or self._expects_others():
                for descriptor, _ in self._epoll.poll(_TICK):
                    if descriptor in self._by_descriptor:
                        self._hear(self._by_descriptor[descriptor])
                    elif self._door is not None:
                        self._door.hear(descriptor)
                if time.monotonic() >= self._next_look:
                    self._look()
        except TeamError as error:
            self._fail(error)
        except Exception as error:
            self._fail(ServerLost(f"the server failed: {type(error).__name__}: {error}"))
            raise
        finally:
            self._recorder.close()
            if self._door is not None:
                self._door.close()
            self._epoll.close()
            for seat in self._seats.values():
                seat.wire.close()  # nobody will answer there any more

    def _expects_others(self) -> bool:
        """Whether all workers were lost and others may yet come for them."""
        return self._until is not None and time.monotonic() < self._until

    # -- hearing -----------------------------------------------------------------------------------------------------

    def _hear(self, seat: Seat) -> None:
        try:
            message = seat.wire.receive()
        except Closed:
            self._lost(seat)
            return
        handle = self._handlers.get(type(message))
        if handle is None:
            raise Mismatch(f"rank {seat.rank} sent a {type(message).__name__}, which was not expected", [seat.rank])
        if self._door is not None:
            self._door.passing(seat, message)
        handle(seat, message)

    def _look(self) -> None:
        """Say who has waited long, and give up if it was too long."""
        now = time.monotonic()
        self._next_look = now + _TICK
        self._recorder.flush()
        limits = self._plan.timeouts
        for seat in self._seats.values():
            if seat.state is State.COMPUTING:
                continue
            waited = now - seat.since
            notice = max(limits.notice, self._notices.get(seat.rank, 0.0))
            late = [other.rank for other in self._seats.values() if other.state in (State.COMPUTING, State.DRAWING)]
            if not late:
                continue
            if waited >= limits.meeting:
                raise TeamTimeout(
                    f"{self._seats.called([seat.rank])} waited {waited:.1f} s for {self._seats.named(late)} at "
                    f"{seat.state.value}; the timeout is {limits.meeting:g} s",
                    self._seats.processes(late),
                )
            if waited < limits.notice:
                self._notices.pop(seat.rank, None)
            elif waited >= notice:
                self._notices[seat.rank] = 2 * waited
                self._say(
                    f"{self._seats.called([seat.rank])} waits for {self._seats.named(late)} at {seat.state.value}: "
                    f"{waited:.0f} s so far, the timeout is {limits.meeting:g} s"
                )
        self._unstick()

    def _unstick(self) -> None:
        """If everybody waits and nothing is under way, nobody will ever be answered: their scripts differ."""
        stuck = bool(self._seats) and all(
            seat.state not in (State.COMPUTING, State.DRAWING) for seat in self._seats.values()
        )
        before, self._stuck = self._stuck, stuck
        if not (stuck and before) or self._samples.unstick():  # a death may not have been heard at the first look
            return
        where: dict[str, list[int]] = {}
        for rank in sorted(self._seats):
            where.setdefault(self._seats[rank].state.value, []).append(rank)
        parts = [f"{self._seats.named(ranks)} for {state}" for state, ranks in where.items()]
        raise Mismatch(
            f"nobody can go on: all wait, {', '.join(parts)}; all workers must do the same", list(self._seats)
        )

    # -- gradients ---------------------------------------------------------------------------------------------------

    def _push(self, seat: Seat, message: Push) -> None:
        now = time.perf_counter()
        if self._tuner.watching:
            self._tune(seat, now)
        seat.into(State.PUSHED)
        seat.request, seat.outcome, seat.fresh = message, "used", False
        self._policy.wake(seat.rank)
        self._tickets += 1
        ticket, staleness = self._tickets, self._policy.version - message.version
        if message.loss is not None:
            before = message.loss if self._loss is None else self._loss
            self._loss = _SMOOTHING * before + (1 - _SMOOTHING) * message.loss
            self._policy.observe(self._loss)
        outcome, reason = self._decide(seat, message, ticket, staleness)
        # Written down last: the worker has its answer already.
        self._recorder.add(
            events.Push(
                seat.rank,
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

    def _tune(self, seat: Seat, now: float) -> None:
        """Let a worker's step count for the choice of a policy; if there is one, go on with it."""
        choice = self._tuner.step(seat.rank, time.monotonic() - seat.since, self._updates.seconds)
        if choice is None:
            return
        k = make_policy(parse_strategy(choice.strategy), range(len(self._seats))).k
        self._updates.expect(k)
        version = self._policy.version
        self._recorder.add(events.Switch(-1, now, version, choice.strategy, choice.reason))
        self._say(f"after {version} updates, auto goes on as {choice.strategy}: {choice.reason}")

    def _decide(self, seat: Seat, message: Push, ticket: int, staleness: int) -> tuple[str, str]:
        """What becomes of a gradient, and why."""
        rank, bound = seat.rank, self._updates.bound
        if message.skip:
            self._samples.done(message.leases)
            self._go(seat, renew=True)
            self._samples.settle()
            return "skipped", "its gradient is not finite"
        if bound is not None and staleness > bound:
            self._samples.give_back(rank, message.leases, "dropped")
            seat.outcome = "dropped"
            self._go(seat, renew=True)
            self._samples.settle()
            return "dropped", f"older than the {bound} updates that are allowed"
        groups = self._hyperparameters.read(rank, message.hyperparameters)
        if not seat.joined:
            self._began_with = groups
        elif self._began_with is not None and any(not other.joined for other in self._seats.values()):
            groups = self._began_with  # the schedulers of one who joined began later
        used = None if message.complete else bytes(self._used[rank])
        self._updates.hold(Pushed(ticket, rank, message, groups, used, seat.buffer, rank), staleness)
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
            if pushed.rank in self._seats:
                self._seats[pushed.rank].outcome = "dropped"
        if len(decision.together) > 1 and isinstance(self._policy, Groups):
            group = self._policy.of[decision.together[0].worker]
            self._updates.sum_group(group, [one.ticket for one in decision.together])
        if decision.use:
            for pushed in self._updates.make([one.ticket for one in decision.use], self._policy.version):
                self._samples.done(pushed.message.leases)
        for rank, order in decision.orders.items():
            seat = self._seats.get(rank)
            if seat is None or order is Order.WAIT:
                continue
            if seat.state is State.PUSHED:
                self._updates.collect(rank)
                self._go(seat, renew=order is not Order.STAY, by=by)
            elif order is Order.CANCEL and seat.state is State.COMPUTING:
                self._cancel(seat)
        if decision.use or decision.drop:
            self._samples.settle()

    def _cancel(self, seat: Seat) -> None:
        if seat.host:
            self._seats.tell(seat, Cancel(self._policy.version))
            return
        self._words.floors.stamp(seat.rank, time.perf_counter())
        self._words.floors.write(seat.rank, self._policy.version & 0xFFFFFFFF)

    def _go(self, seat: Seat, *, renew: bool, by: int = -1) -> None:
        """Let a worker go on that has pushed or was cancelled."""
        request = seat.request
        want = request.want if isinstance(request, Push | Cancelled) else None
        lease = None if want is None else self._samples.lease(seat, want)
        if renew:
            self._seats.renew(seat)
        on = -1 if by == seat.rank else by
        self._seats.answer(seat, Go(seat.version, seat.buffer, seat.outcome, on, lease))

    def _cancelled(self, seat: Seat, message: Cancelled) -> None:
        seat.request, seat.outcome = message, "cancelled"
        self._samples.give_back(seat.rank, message.leases, "cancelled")
        self._go(seat, renew=True)
        self._samples.settle()

    # -- standing still ----------------------------------------------------------------------------------------------

    def _freeze(self, seat: Seat, message: Freeze) -> None:
        """Change nothing until this worker allows it again: it reads, or writes, what else only the server does."""
        if message.renew:
            self._seats.renew(seat)
        shelf = self._seats.shelf
        self._seats.tell(seat, Frozen(shelf.version, shelf.newest))
        try:
            answer = seat.wire.receive_within(self._plan.timeouts.meeting)
        except Closed:
            self._lost(seat)
            return
        if not isinstance(answer, Thaw):
            raise TeamTimeout(f"rank {seat.rank} kept the server waiting while it read the parameters", [seat.rank])
        if answer.reload:
            self._shards.reload()

    # -- coming and leaving ------------------------------------------------------------------------------------------

    def _seat(self, seat: Seat) -> None:
        """One who joins takes its place. Nobody waits for it before it has got samples, or has pushed."""
        rank = seat.rank
        self._updates.collect(rank)  # of whoever had this rank before: its buffer is about to be another's
        self._hyperparameters.forget(rank)
        self._seats.add(seat)
        self._by_descriptor[seat.wire.descriptor] = seat
        self._epoll.register(seat.wire.descriptor, select.EPOLLIN)
        self._until = None
        self._note_who_is_here()
        self._execute(self._policy.join(rank), rank)
        self._execute(self._policy.rest(rank), rank)
        self._updates.expect(self._policy.k)
        assert self._door is not None
        self._door.hand_over(seat)
        self._say(f"rank {rank} has joined; there are {len(self._seats)} workers now")

    def _note_who_is_here(self) -> None:
        self._words.present = len(self._seats)
        self._recorder.add(events.Roster(-1, time.perf_counter(), sorted(self._seats), self._policy.version))

    def _bye(self, seat: Seat, _: Bye) -> None:
        self._remove(seat, "abandoned")

    def _unreachable(self, seat: Seat, message: Unreachable) -> None:
        self._lost(seat, f"is lost: {message.why}")

    def _lost(self, seat: Seat, how: str = "died") -> None:
        """A worker has died."""
        who, how = self._seats.called([seat.rank]), f"on {seat.host} {how}" if seat.host else how
        state = seat.state
        self._recorder.add(events.Lost(seat.rank, time.perf_counter()))
        leases = self._remove(seat, "lost")
        if not (self._policy.spare or self._plan.elastic):
            if self._seats:
                raise WorkerLost(
                    f"{who} {how}; under {self._plan.strategy} every update needs all workers",
                    self._seats.processes([seat.rank]),
                )
            return
        if not self._seats:
            self._until = time.monotonic() + self._plan.timeouts.join if self._plan.elastic else None
            if self._door is not None:
                self._door.settle()
            return
        again = f"; what it trained on ({leases} minibatches) goes to the others" if leases else ""
        doing = "" if state is State.COMPUTING else f" while it waited for {state.value}"
        self._say(f"{who} {how}{doing}; the other {len(self._seats)} go on without it{again}")

    def _remove(self, seat: Seat, why: str) -> int:
        """A worker is gone: its version is free, its samples are for others; what it has pushed still counts."""
        rank = seat.rank
        self._epoll.unregister(seat.wire.descriptor)
        del self._by_descriptor[seat.wire.descriptor]
        seat.wire.close()
        del self._seats[rank]
        self._words.stay(rank)
        self._note_who_is_here()
        leases = self._samples.leave(rank, why)
        elastic = self._plan.elastic
        if elastic or (self._seats and (why == "abandoned" or self._policy.spare)):
            self._execute(self._policy.leave(rank), rank)
            self._samples.settle()
            self._meetings.settle()
            self._updates.expect(self._policy.k)
        # Not before: an update may still have needed the version that its last gradient was computed on.
        self._seats.shelf.release(seat.buffer)
        return leases

    def _fail(self, error: TeamError) -> None:
        """Tell all workers that the run can not go on."""
        self._recorder.flush()
        if self._door is not None:
            self._door.close()  # nobody can join any more, nor need be heard
        word = Failed(type(error).__name__, str(error), list(error.ranks))
        for seat in self._seats.values():
            self._seats.tell(seat, word)
        # They raise it, and leave; whoever computes finds it when it next looks.
        until = time.monotonic() + self._plan.timeouts.stop + 2.0
        while self._seats and time.monotonic() < until:
            for descriptor, _ in self._epoll.poll(0.1):
                seat = self._by_descriptor[descriptor]
                try:
                    seat.wire.receive()
                    self._seats.tell(seat, word)  # whatever it asks for as it leaves
                except Closed:
                    self._epoll.unregister(descriptor)
                    del self._by_descriptor[descriptor], self._seats[seat.rank]
