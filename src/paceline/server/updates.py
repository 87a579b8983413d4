"""From gradients to versions: what has been pushed and is not used yet, and how an update is made of it."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import msgspec

from paceline import events
from paceline.config import parse_correction
from paceline.errors import Mismatch, TeamTimeout
from paceline.events import Recorder
from paceline.parameters.corrections import Corrections
from paceline.parameters.hyperparameters import RateScaling, multiplied
from paceline.parameters.reduction import together
from paceline.server.messages import Add, Apply, Distance, Plan, Push, Reduce, Reduced, Source
from paceline.server.seats import Seats
from paceline.server.shards import Shards
from paceline.transport.wire import Closed


@dataclasses.dataclass(slots=True)
class Pushed:
    """A gradient that has come, until it is used or dropped."""

    ticket: int
    rank: int
    message: Push
    groups: list[dict[str, Any]]
    """The optimizer's hyperparameters, as its worker has them."""
    used: bytes | None
    """Per parameter, whether it has a gradient; None if all have."""
    buffer: int
    """The buffer with the version that it was computed on."""
    place: int
    """Which source it lies in: its worker's, its group's, or what was collected."""
    rate: float = 1.0
    """What the learning rate is multiplied with for it, because it is stale."""

    @property
    def mass(self) -> float:
        """Its weight in the mean, not yet divided by that of all: as many as it has samples, by its own rate."""
        return self.samples * self.rate

    @property
    def samples(self) -> float:
        return float(max(1, self.message.samples))


class Updates:
    """Gradients in, versions out; what the policy wants is done here."""

    def __init__(self, plan: Plan, seats: Seats, shards: Shards, recorder: Recorder, k: int) -> None:
        self._plan, self._seats, self._shards, self._recorder = plan, seats, shards, recorder
        self._corrections = Corrections(parse_correction(spec) for spec in plan.corrections)
        self._scaling = RateScaling(plan.scale_lr, k, plan.warmup)
        self.bound = self._corrections.bound()
        """The staleness above which a gradient is dropped."""
        self.seconds = 0.0
        """That the last update took."""
        self.held: dict[int, Pushed] = {}
        """Gradients that are not used yet, by ticket."""
        self._last: tuple[list[dict[str, Any]], float] | None = None
        """Hyperparameters of the last update, and what their rates were multiplied with."""

    def expect(self, k: int) -> None:
        """From here on so many gradients make an update, for learning rates that follow that."""
        self._scaling = dataclasses.replace(self._scaling, workers=k)

    def hold(self, pushed: Pushed, staleness: int) -> None:
        """A gradient has come."""
        if self._plan.corrections:
            pushed.rate = self._rate_of(pushed, staleness)
        self.held[pushed.ticket] = pushed

    def leases_of(self, rank: int) -> list[int]:
        """The leases of a worker's gradients that are held; they are not the worker's any more."""
        return [number for held in self.held.values() if held.rank == rank for number in held.message.leases]

    def holds(self, rank: int) -> bool:
        """Whether a gradient of this worker is held."""
        return any(held.rank == rank for held in self.held.values())

    def _rate_of(self, pushed: Pushed, staleness: int) -> float:
        distance, newest = 0.0, self._seats.shelf.newest
        if self._corrections.needs_distance and pushed.buffer != newest:
            distance = self._shards.distance(Distance(newest, pushed.buffer))
        rate = float(pushed.groups[0].get("lr", 1.0)) if pushed.groups else 1.0
        return self._corrections.rate(staleness, distance, rate)

    def collect(self, rank: int) -> None:
        """If a worker's gradient is still held, take it in, as the worker is about to make its next one."""
        for pushed in self.held.values():
            if pushed.rank == rank and pushed.place == rank:
                source = self._source(pushed, pushed.mass * pushed.message.factor)
                self._shards.add(Add(source, self._seats.shelf.newest))
                pushed.place = self._shards.collected

    def _source(self, pushed: Pushed, weight: float) -> Source:
        base = pushed.buffer if self._corrections.compensates else -1
        return Source(pushed.place, weight, base, pushed.used, pushed.message.factor)

    def make(self, tickets: list[int], version: int) -> list[Pushed]:
        """Make this version from these gradients, which are not held any longer."""
        start = time.perf_counter()
        pushes = [self.held.pop(ticket) for ticket in tickets]
        if len(pushes) > 1:
            pushes.sort(key=lambda pushed: pushed.rank)
        total = sum([pushed.mass for pushed in pushes]) or 1.0
        rate = total / sum(pushed.samples for pushed in pushes) if self._plan.corrections else 1.0
        groups = self._hyperparameters(pushes[0].groups, rate, version)
        shelf = self._seats.shelf
        old, new = shelf.newest, shelf.take()
        message = Apply(self._sources(pushes, total), old, new, groups)
        clips = [pushed.message.clip for pushed in pushes if pushed.message.clip is not None]
        if clips:
            message = self._clip(message, *clips[0])
        self._shards.apply(message)
        shelf.publish(new, version)
        seconds = self.seconds = time.perf_counter() - start
        read = sum([pushed.message.bytes for pushed in pushes])
        used = [pushed.ticket for pushed in pushes]
        self._recorder.add(events.Update(-1, start, seconds, version, read, len(pushes), pushes=used, rate=rate))
        return pushes

    def _sources(self, pushes: list[Pushed], total: float) -> list[Source]:
        sources: dict[int, Source] = {}
        for pushed in pushes:
            place = pushed.place
            if place == self._shards.collected:
                sources[place] = Source(place, 1.0 / total)
            elif place >= self._plan.capacity:  # a group's mean
                mass = sum(other.mass for other in pushes if other.place == place)
                sources[place] = Source(place, mass / total)
            else:
                sources[place] = self._source(pushed, pushed.mass * pushed.message.factor / total)
        return list(sources.values())

    def _hyperparameters(self, groups: list[dict[str, Any]], rate: float, version: int) -> list[dict[str, Any]] | None:
        """For an update; None if they are those of the last one."""
        factor = self._scaling.factor(version - 1) * rate
        if self._last is not None and self._last[0] is groups and self._last[1] == factor:
            return None
        self._last = (groups, factor)
        return multiplied(groups, factor)

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

    def sum_group(self, group: int, tickets: list[int]) -> None:
        """Let the members of a group make the mean of their gradients, each a part of it."""
        pushes = [self.held[ticket] for ticket in tickets if ticket in self.held]
        seats = [self._seats[pushed.rank] for pushed in pushes if pushed.rank in self._seats]
        plain = self._plan.compress in ("none", "fp32") and not self._corrections.compensates
        plain = plain and not any(seat.host for seat in self._seats.values())  # they share no memory
        if not plain or len(seats) < len(pushes) or any(pushed.used is not None for pushed in pushes):
            return  # the update takes them one by one
        total = sum(pushed.mass for pushed in pushes) or 1.0
        weights = [pushed.mass * pushed.message.factor / total for pushed in pushes]
        for seat in seats:
            self._seats.tell(seat, Reduce([pushed.rank for pushed in pushes], weights, group))
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
            pushed.place = self._plan.capacity + group
