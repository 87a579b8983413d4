"""The first server: hears all workers, lets the policy decide, and does what it says.

It handles one message at a time, so a decision and what follows from it are never mixed with another. A worker that
has to wait just gets its answer later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import select
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from paceline import events
from paceline.config import parse_correction, parse_strategy
from paceline.data.ledger import Ledger
from paceline.errors import Mismatch, ServerLost, TeamError, TeamTimeout, WorkerLost, names
from paceline.events import Recorder
from paceline.parameters.corrections import Corrections
from paceline.parameters.hyperparameters import Hyperparameters, RateScaling
from paceline.parameters.reduction import together
from paceline.policies import Decision, Groups, Order, Policy, make_policy
from paceline.policies import Push as Arrival
from paceline.server.messages import (
    Add,
    Apply,
    Ask,
    Bye,
    Cancelled,
    Distance,
    Done,
    Draw,
    Enter,
    Failed,
    Freeze,
    Frozen,
    Go,
    Leased,
    Over,
    Plan,
    Push,
    Quit,
    Reduce,
    Reduced,
    Source,
    Thaw,
    receive_parts,
)
from paceline.server.messages import Order as Drawn
from paceline.server.seats import Seat, Shelf, State
from paceline.server.shards import Shards
from paceline.transport.futex import Words
from paceline.transport.wire import Closed

_TICK = 0.5
"""Seconds between looks at who has waited too long."""
_SMOOTHING = 0.9
"""Of the loss that a policy adapts to."""


@dataclasses.dataclass(slots=True)
class _Pushed:
    """A gradient that has come, until it is used or dropped."""

    ticket: int
    rank: int
    message: Push
    groups: list[dict[str, Any]]
    used: bytes | None
    buffer: int
    """The buffer with the version that it was computed on."""
    mass: float
    """Its weight in the mean, not yet divided by that of all."""
    rate: float
    """What the learning rate is multiplied with for it, because it is stale."""
    place: int
    """Which source it lies in: its worker's, its group's, or what was collected."""


class Coordinator:
    """One run."""

    def __init__(
        self,
        plan: Plan,
        seats: dict[int, Seat],
        shards: Shards,
        hyperparameters: Hyperparameters,
        used: list[memoryview],
        floors: Words,
        size: int,
        say: Callable[[str], None],
    ) -> None:
        """size: bytes of a gradient as it is."""
        self._plan, self._seats, self._shards = plan, seats, shards
        self._hyperparameters, self._used, self._floors, self._say = hyperparameters, used, floors, say
        self._policy: Policy = make_policy(parse_strategy(plan.strategy), range(plan.workers))
        self._corrections = Corrections(parse_correction(spec) for spec in plan.corrections)
        self._bound = self._corrections.bound()
        self._ledger = Ledger(range(plan.workers), in_turns=self._policy.lockstep)
        self._rate = RateScaling(plan.scale_lr, self._policy.k, plan.warmup)
        self._recorder = Recorder(None if plan.folder is None else Path(plan.folder), -1)
        self._size = size
        self._shelf = Shelf(plan.workers + 2)
        for _ in seats:
            self._shelf.hold(0)
        self._held: dict[int, _Pushed] = {}
        """Gradients that are not used yet, by ticket."""
        self._tickets = 0
        self._training: dict[int, bool] = {}
        """By loader, whether its running epoch is trained on, and not only evaluated."""
        self._loss: float | None = None
        self._last_groups: tuple[list[dict[str, Any]], float] | None = None
        self._by_descriptor = {seat.wire.descriptor: seat for seat in seats.values()}
        self._epoll = select.epoll()
        for descriptor in self._by_descriptor:
            self._epoll.register(descriptor, select.EPOLLIN)
        self._next_look = time.monotonic() + _TICK
        self._notices: dict[int, float] = {}
        self._handlers: dict[type, Callable[[Seat, Any], None]] = {
            Push: self._push,
            Cancelled: self._cancelled,
            Enter: self._enter,
            Drawn: self._drawn,
            Ask: self._ask,
            Done: self._done,
            Quit: self._quit,
            Freeze: self._freeze,
            Bye: self._bye,
        }

    def run(self) -> None:
        """Serve until all workers have left."""
        for seat in self._seats.values():
            seat.into(State.COMPUTING)
        try:
            while self._seats:
                for descriptor, _ in self._epoll.poll(_TICK):
                    if descriptor in self._by_descriptor:
                        self._hear(self._by_descriptor[descriptor])
                if time.monotonic() >= self._next_look:
                    self._look()
        except TeamError as error:
            self._fail(error)
        except Exception as error:
            self._fail(ServerLost(f"the server failed: {type(error).__name__}: {error}"))
            raise
        finally:
            self._recorder.close()
            self._epoll.close()

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
        handle(seat, message)

    def _tell(self, seat: Seat, message: msgspec.Struct) -> None:
        with contextlib.suppress(Closed):  # its end will be heard
            seat.wire.send(message)

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
                    f"rank {seat.rank} waited {waited:.1f} s for {names(late)} at {seat.state.value}; "
                    f"the timeout is {limits.meeting:g} s",
                    late,
                )
            if waited < limits.notice:
                self._notices.pop(seat.rank, None)
            elif waited >= notice:
                self._notices[seat.rank] = 2 * waited
                self._say(
                    f"rank {seat.rank} waits for {names(late)} at {seat.state.value}: {waited:.0f} s so far, "
                    f"the timeout is {limits.meeting:g} s"
                )

    # -- gradients ---------------------------------------------------------------------------------------------------

    def _push(self, seat: Seat, message: Push) -> None:
        now = time.perf_counter()
        seat.into(State.PUSHED)
        seat.request, seat.outcome = message, "used"
        rank = seat.rank
        self._policy.wake(rank)
        self._tickets += 1
        ticket = self._tickets
        staleness = self._policy.version - message.version
        if message.loss is not None:
            before = message.loss if self._loss is None else self._loss
            self._loss = _SMOOTHING * before + (1 - _SMOOTHING) * message.loss
            self._policy.observe(self._loss)
        if message.skip:
            self._ledger.done(message.leases)
            self._record(now, rank, ticket, staleness, message, "skipped", "its gradient is not finite")
            self._go(seat, renew=True)
            self._settle()
            return
        if self._bound is not None and staleness > self._bound:
            self._record(
                now,
                rank,
                ticket,
                staleness,
                message,
                "dropped",
                f"older than the {self._bound} updates that are allowed",
            )
            self._give_back(rank, message.leases, "dropped")
            seat.outcome = "dropped"
            self._go(seat, renew=True)
            self._settle()
            return
        groups = self._hyperparameters.read(rank, message.hyperparameters)
        used = None if message.complete else bytes(self._used[rank])
        pushed = _Pushed(ticket, rank, message, groups, used, seat.buffer, float(max(1, message.samples)), 1.0, rank)
        if self._plan.corrections:
            pushed.rate = self._rate_of(pushed, staleness)
        self._held[ticket] = pushed
        decision = self._policy.arrive(Arrival(ticket, rank, message.version))
        self._execute(decision, rank)
        outcome = "held"
        if any(one.ticket == ticket for one in decision.use):
            outcome = "used"
        elif any(one.ticket == ticket for one in decision.drop):
            outcome = "dropped"
        self._record(now, rank, ticket, staleness, message, outcome, decision.reason)

    def _record(
        self, now: float, rank: int, ticket: int, staleness: int, message: Push, outcome: str, reason: str
    ) -> None:
        self._recorder.add(
            events.Push(
                rank,
                now,
                ticket,
                message.version,
                staleness,
                message.samples,
                message.leases,
                message.bytes,
                self._size - message.bytes,
                outcome,
                reason,
            )
        )

    def _rate_of(self, pushed: _Pushed, staleness: int) -> float:
        distance = 0.0
        if self._corrections.needs_distance and pushed.buffer != self._shelf.newest:
            distance = self._shards.distance(Distance(self._shelf.newest, pushed.buffer))
        rate = float(pushed.groups[0].get("lr", 1.0)) if pushed.groups else 1.0
        return self._corrections.rate(staleness, distance, rate)

    def _execute(self, decision: Decision, by: int) -> None:
        """Do what the policy has decided after something that `by` did."""
        for one in decision.drop:
            pushed = self._held.pop(one.ticket)
            self._give_back(pushed.rank, pushed.message.leases, "dropped")
            if pushed.rank in self._seats:
                self._seats[pushed.rank].outcome = "dropped"
        if len(decision.together) > 1:
            self._sum_group(decision.together)
        if decision.use:
            self._update([self._held.pop(one.ticket) for one in decision.use])
        for rank, order in decision.orders.items():
            seat = self._seats.get(rank)
            if seat is None or order is Order.WAIT:
                continue
            if seat.state is State.PUSHED:
                self._collect(rank)
                self._go(seat, renew=order is not Order.STAY, by=by)
            elif order is Order.CANCEL and seat.state is State.COMPUTING:
                self._floors.write(rank, self._policy.version & 0xFFFFFFFF)
        if decision.use or decision.drop:
            self._settle()

    def _collect(self, rank: int) -> None:
        """If a worker's gradient is still held, take it in, as the worker is about to make its next one."""
        for pushed in self._held.values():
            if pushed.rank == rank and pushed.place == rank:
                source = self._source(pushed, pushed.mass * pushed.rate * pushed.message.factor)
                self._shards.add(Add(source, self._shelf.newest))
                pushed.place = self._shards.collected

    def _source(self, pushed: _Pushed, weight: float) -> Source:
        base = pushed.buffer if self._corrections.compensates else -1
        return Source(pushed.place, weight, base, pushed.used, pushed.message.factor)

    def _update(self, pushes: list[_Pushed]) -> None:
        """Make the next version from these gradients."""
        start = time.perf_counter()
        pushes.sort(key=lambda pushed: pushed.rank)
        total = sum(pushed.mass * pushed.rate for pushed in pushes) or 1.0
        sources: dict[int, Source] = {}
        for pushed in pushes:
            if pushed.place == self._shards.collected:
                sources[pushed.place] = Source(pushed.place, 1.0 / total)
            elif pushed.place >= self._plan.workers:  # a group's mean
                mass = sum(other.mass * other.rate for other in pushes if other.place == pushed.place)
                sources[pushed.place] = Source(pushed.place, mass / total)
            else:
                sources[pushed.place] = self._source(pushed, pushed.mass * pushed.rate * pushed.message.factor / total)
        rate = total / sum(pushed.mass for pushed in pushes) if self._plan.corrections else 1.0
        groups = self._groups(pushes[0].groups, rate)
        old, new = self._shelf.newest, self._shelf.take()
        message = Apply(list(sources.values()), old, new, groups)
        clip = next((pushed.message.clip for pushed in pushes if pushed.message.clip is not None), None)
        if clip is not None:
            message = self._clip(message, *clip)
        self._shards.apply(message)
        self._shelf.publish(new)
        end = time.perf_counter()
        read = sum(pushed.message.bytes for pushed in pushes)
        tickets = [pushed.ticket for pushed in pushes]
        self._recorder.add(
            events.Update(-1, start, end - start, self._policy.version, read, len(pushes), pushes=tickets, rate=rate)
        )
        for pushed in pushes:
            self._ledger.done(pushed.message.leases)

    def _groups(self, groups: list[dict[str, Any]], rate: float) -> list[dict[str, Any]] | None:
        """The hyperparameters for an update; None if they are those of the last one."""
        scaled = self._rate.scaled(groups, self._policy.version - 1)
        if self._last_groups is not None and self._last_groups[0] is scaled and self._last_groups[1] == rate:
            return None
        self._last_groups = (scaled, rate)
        if rate == 1.0:
            return scaled
        return [{**group, "lr": group["lr"] * rate} if "lr" in group else group for group in scaled]

    def _clip(self, message: Apply, limit: float, norm: float) -> Apply:
        """First make the mean gradient, to know its norm; the update then is with that, scaled."""
        parts = self._shards.apply(msgspec.structs.replace(message, norm=norm))
        length = together(parts, norm)
        if norm != float("inf"):
            length **= 1.0 / norm
        scale = min(1.0, limit / (length + 1e-6))
        if math.isnan(length):  # it must stay one, as in plain torch
            scale = length
        collected = Source(self._shards.collected, 1.0)
        return Apply([collected], message.old, message.new, None, scale)

    def _sum_group(self, together: Iterable[Arrival]) -> None:
        """Let the members of a group make the mean of their gradients, each a part of it."""
        assert isinstance(self._policy, Groups)
        pushes = [self._held[one.ticket] for one in together if one.ticket in self._held]
        seats = [self._seats[pushed.rank] for pushed in pushes if pushed.rank in self._seats]
        plain = self._plan.compress in ("none", "fp32") and not self._corrections.compensates
        if not plain or len(seats) < len(pushes) or any(pushed.used is not None for pushed in pushes):
            return  # the update takes them one by one
        group = self._policy.of[pushes[0].rank]
        total = sum(pushed.mass * pushed.rate for pushed in pushes) or 1.0
        weights = [pushed.mass * pushed.rate * pushed.message.factor / total for pushed in pushes]
        order = Reduce([pushed.rank for pushed in pushes], weights, group)
        for seat in seats:
            self._tell(seat, order)
        whole = True
        for seat in seats:
            try:
                answer = seat.wire.receive_within(self._plan.timeouts.meeting)
            except Closed:
                whole = False  # its death will be heard; the others' sums are not used
                continue
            if answer is None:
                raise TeamTimeout(f"rank {seat.rank} did not sum its part of its group's gradient", [seat.rank])
            if not isinstance(answer, Reduced):
                raise Mismatch(f"rank {seat.rank} sent a {type(answer).__name__} instead of a sum", [seat.rank])
        for pushed in pushes if whole else ():
            pushed.place = self._plan.workers + group

    def _go(self, seat: Seat, *, renew: bool, by: int = -1) -> None:
        """Let a worker go on that has pushed or was cancelled."""
        request = seat.request
        want = request.want if isinstance(request, Push | Cancelled) else None
        lease = None
        if want is not None:
            lease = self._lease(seat, want, ahead=False)
        if renew:
            self._renew(seat)
        on = -1 if by == seat.rank else by
        seat.into(State.COMPUTING)
        seat.request = None
        self._tell(seat, Go(seat.version, seat.buffer, seat.outcome, on, lease))

    def _renew(self, seat: Seat) -> None:
        """It takes the newest version, and lets go of the one that it has."""
        self._shelf.release(seat.buffer)
        seat.buffer, seat.version = self._shelf.newest, self._policy.version
        self._shelf.hold(seat.buffer)

    def _cancelled(self, seat: Seat, message: Cancelled) -> None:
        seat.request, seat.outcome = message, "cancelled"
        self._give_back(seat.rank, message.leases, "cancelled")
        self._go(seat, renew=True)
        self._settle()

    # -- samples -----------------------------------------------------------------------------------------------------

    def _enter(self, seat: Seat, message: Enter) -> None:
        seat.into(State.ENTERING)
        seat.request = message
        self._settle()

    def _drawn(self, seat: Seat, message: Drawn) -> None:
        data = receive_parts(seat.wire, self._plan.timeouts.meeting)
        if data is None:
            raise Mismatch(f"rank {seat.rank} did not tell the order of the epoch", [seat.rank])
        order = msgspec.msgpack.decode(data)
        ledger, now = self._ledger, time.perf_counter()
        self._training[message.loader] = message.training
        samples = ledger.open(
            message.loader, message.epoch, order, message.sizes, drop_last=message.drop_last, turns=message.training
        )
        self._recorder.add(events.Epoch(-1, now, message.loader, message.epoch, samples))
        if message.training:
            for rank in self._seats:
                self._policy.wake(rank)  # also whoever has not got there yet: it will
        seat.into(State.ENTERING)
        self._settle()

    def _ask(self, seat: Seat, message: Ask) -> None:
        if message.renew and not message.ahead and self._shelf.newest != seat.buffer:
            self._renew(seat)
        if self._ledger.is_open(message.loader, message.epoch):
            lease = self._lease(seat, message.loader, ahead=message.ahead)
            if lease is not None or message.ahead:
                self._tell(seat, Leased(lease, seat.version, seat.buffer))
                return
        elif message.ahead:
            self._tell(seat, Leased(None, seat.version, seat.buffer))
            return
        seat.request = message
        if not self._ledger.is_open(message.loader, message.epoch) or self._ledger.is_over(message.loader):
            self._over(seat, message)  # it waits for nobody, so nobody must take it for one who rests
            return
        seat.into(State.ASKING)
        if not message.renew and self._ledger.is_open(message.loader, message.epoch):
            self._ledger.carry(seat.rank, message.loader)
        self._execute(self._policy.rest(seat.rank), seat.rank)
        self._settle()

    def _lease(self, seat: Seat, loader: int, *, ahead: bool) -> Any:
        lease = self._ledger.lease(seat.rank, loader, ahead=ahead)
        if lease is not None:
            self._policy.wake(seat.rank)
            self._recorder.add(
                events.Lease(
                    seat.rank, time.perf_counter(), lease.number, loader, lease.epoch, lease.first, len(lease.keys)
                )
            )
        return lease

    def _settle(self) -> None:
        """Samples or epochs have changed: answer those who can be answered now."""
        for seat in list(self._seats.values()):
            request = seat.request
            if seat.state is State.ASKING and isinstance(request, Ask):
                self._answer(seat, request)
            elif seat.state is State.ENTERING and isinstance(request, Enter):
                self._admit(seat, request)

    def _answer(self, seat: Seat, request: Ask) -> None:
        is_open = self._ledger.is_open(request.loader, request.epoch)
        lease = self._lease(seat, request.loader, ahead=False) if is_open else None
        if lease is not None:
            if request.renew:
                self._renew(seat)
            seat.into(State.COMPUTING)
            seat.request = None
            self._tell(seat, Leased(lease, seat.version, seat.buffer))
        elif not is_open or self._ledger.is_over(request.loader):
            self._over(seat, request)

    def _over(self, seat: Seat, request: Ask) -> None:
        """Tell a worker that the epoch is over for all; what it does next may be to compute."""
        if self._ledger.is_open(request.loader, request.epoch) and self._ledger.close(request.loader):
            now = time.perf_counter()
            self._recorder.add(events.Epoch(-1, now, request.loader, request.epoch, 0, over=True))
        if request.renew:
            self._renew(seat)
        seat.into(State.COMPUTING)
        seat.request = None
        self._tell(seat, Over(seat.version, seat.buffer))
        if self._ledger.is_open(request.loader, request.epoch) and self._somebody_is_ahead(request.loader):
            self._execute(self._policy.rest(seat.rank), seat.rank)
        else:
            self._policy.wake(seat.rank)

    def _somebody_is_ahead(self, loader: int) -> bool:
        """Whether a worker, its gradient used, waits for others to get further, which in this epoch they will not."""
        held = {pushed.rank for pushed in self._held.values()}
        waits = any(seat.state is State.PUSHED and seat.rank not in held for seat in self._seats.values())
        return waits and self._training[loader]

    def _admit(self, seat: Seat, request: Enter) -> None:
        loader, epoch = request.loader, request.epoch
        is_open = self._ledger.is_open(loader, epoch)
        if is_open or self._ledger.is_past(loader, epoch):  # it will be told that it is over when it asks
            if is_open:
                self._ledger.enter(seat.rank, loader)
            self._policy.wake(seat.rank)
            if request.renew:
                self._renew(seat)
            seat.into(State.COMPUTING)
            seat.request = None
            self._tell(seat, Go(seat.version, seat.buffer))
        elif self._ledger.may_open(loader, epoch) and seat.rank == min(self._seats):
            seat.into(State.DRAWING)
            self._tell(seat, Draw())

    def _give_back(self, rank: int, leases: list[int], why: str) -> None:
        if leases:
            self._ledger.give_back(leases)
            self._recorder.add(events.Return(rank, time.perf_counter(), leases, why))

    def _done(self, seat: Seat, message: Done) -> None:
        self._ledger.done(message.leases)
        self._recorder.add(events.Seen(seat.rank, time.perf_counter(), message.leases))
        self._settle()

    def _quit(self, seat: Seat, message: Quit) -> None:
        is_open = self._ledger.is_open(message.loader, message.epoch)
        leases = self._ledger.quit(seat.rank, message.loader, message.epoch, self._pushed_by(seat.rank))
        if leases:
            numbers = [lease.number for lease in leases]
            self._recorder.add(events.Return(seat.rank, time.perf_counter(), numbers, "abandoned"))
        if is_open and self._training[message.loader]:
            self._execute(self._policy.rest(seat.rank), seat.rank)
        self._settle()

    def _pushed_by(self, rank: int) -> list[int]:
        """The leases of gradients that are held; they are not the worker's any more."""
        return [number for held in self._held.values() if held.rank == rank for number in held.message.leases]

    # -- standing still ----------------------------------------------------------------------------------------------

    def _freeze(self, seat: Seat, _: Freeze) -> None:
        """Change nothing until this worker allows it again: it reads, or writes, what else only the server does."""
        self._renew(seat)
        self._tell(seat, Frozen(seat.version, seat.buffer))
        try:
            answer = seat.wire.receive_within(self._plan.timeouts.meeting)
        except Closed:
            self._lost(seat)
            return
        if not isinstance(answer, Thaw):
            raise TeamTimeout(f"rank {seat.rank} kept the server waiting while it read the parameters", [seat.rank])
        if answer.reload:
            self._shards.reload()

    # -- leaving -----------------------------------------------------------------------------------------------------

    def _bye(self, seat: Seat, _: Bye) -> None:
        self._remove(seat, "abandoned")

    def _lost(self, seat: Seat) -> None:
        """A worker has died."""
        state = seat.state
        self._recorder.add(events.Lost(seat.rank, time.perf_counter()))
        leases = self._remove(seat, "lost")
        if not self._policy.spare:
            if self._seats:
                raise WorkerLost(
                    f"rank {seat.rank} died; under {self._plan.strategy} every update needs all workers", [seat.rank]
                )
            return
        if not self._seats:
            return
        again = f"; what it trained on ({leases} minibatches) goes to the others" if leases else ""
        doing = "" if state is State.COMPUTING else f" while it waited for {state.value}"
        self._say(f"rank {seat.rank} died{doing}; the other {len(self._seats)} go on without it{again}")

    def _remove(self, seat: Seat, why: str) -> int:
        """A worker is gone: its version is free, its samples are for others; what it has pushed still counts."""
        rank = seat.rank
        self._epoll.unregister(seat.wire.descriptor)
        del self._by_descriptor[seat.wire.descriptor]
        seat.wire.close()
        del self._seats[rank]
        leases = self._ledger.leave(rank, self._pushed_by(rank))
        if leases:
            numbers = [lease.number for lease in leases]
            self._recorder.add(events.Return(rank, time.perf_counter(), numbers, why))
        if self._seats and (why == "abandoned" or self._policy.spare):
            self._execute(self._policy.leave(rank), rank)
            self._settle()
        # Not before: an update may still have needed the version that its last gradient was computed on.
        self._shelf.release(seat.buffer)
        return len(leases)

    def _fail(self, error: TeamError) -> None:
        """Tell all workers that the run can not go on."""
        self._recorder.flush()
        for seat in self._seats.values():
            self._tell(seat, Failed(type(error).__name__, str(error), list(error.ranks)))
        # They raise it, and leave; whoever computes finds it when it next looks.
        until = time.monotonic() + self._plan.timeouts.stop + 2.0
        while self._seats and time.monotonic() < until:
            for descriptor, _ in self._epoll.poll(0.1):
                seat = self._by_descriptor[descriptor]
                try:
                    seat.wire.receive()
                except Closed:
                    self._epoll.unregister(descriptor)
                    del self._by_descriptor[descriptor], self._seats[seat.rank]
