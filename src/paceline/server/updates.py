"""From gradients to versions: what has been pushed and is not used yet, and how an update is made of it."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import msgspec

from paceline import events
from paceline.config import RunSpec, parse_correction
from paceline.errors import Mismatch, TeamTimeout
from paceline.events import Recorder
from paceline.parameters.corrections import Corrections
from paceline.parameters.hyperparameters import RateScaling, multiplied
from paceline.parameters.reduction import together
from paceline.server.messages import (
    AddGradient,
    ApplyUpdate,
    GradientRef,
    MeasureDistance,
    PushGradient,
    ReduceShare,
    ShareReduced,
)
from paceline.server.sessions import Sessions
from paceline.server.shard_set import ShardSet
from paceline.transport.unix_connection import Closed


@dataclasses.dataclass(slots=True)
class Pushed:
    """A gradient that has come, until it is used or dropped."""

    ticket: int
    rank: int
    message: PushGradient
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

    def __init__(self, spec: RunSpec, sessions: Sessions, shards: ShardSet, recorder: Recorder, k: int) -> None:
        self._spec, self._sessions, self._shards, self._recorder = spec, sessions, shards, recorder
        self._corrections = Corrections(map(parse_correction, spec.corrections))
        self._scaling = RateScaling(spec.scale_lr, k, spec.warmup)
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
        if self._spec.corrections:
            pushed.rate = self._rate_of(pushed, staleness)
        self.held[pushed.ticket] = pushed

    def leases_of(self, rank: int) -> list[int]:
        """The leases of a worker's gradients that are held; they are not the worker's any more."""
        return [number for held in self.held.values() if held.rank == rank for number in held.message.leases]

    def holds(self, rank: int) -> bool:
        """Whether a gradient of this worker is held."""
        return any(held.rank == rank for held in self.held.values())

    def _rate_of(self, pushed: Pushed, staleness: int) -> float:
        distance, newest = 0.0, self._sessions.pool.newest
        if self._corrections.needs_distance and pushed.buffer != newest:
            distance = self._shards.distance(MeasureDistance(newest, pushed.buffer))
        rate = float(pushed.groups[0].get("lr", 1.0)) if pushed.groups else 1.0
        return self._corrections.rate(staleness, distance, rate)

    def collect(self, rank: int) -> None:
        """If a worker's gradient is still held, take it in, as the worker is about to make its next one."""
        for pushed in self.held.values():
            if pushed.rank == rank and pushed.place == rank:
                source = self._source(pushed, pushed.mass * pushed.message.factor)
                self._shards.add(AddGradient(source, self._sessions.pool.newest))
                pushed.place = self._shards.collected

    def _source(self, pushed: Pushed, weight: float) -> GradientRef:
        base = pushed.buffer if self._corrections.compensates else -1
        return GradientRef(pushed.place, weight, base, pushed.used, pushed.message.factor)

    def make(self, tickets: list[int], version: int) -> list[Pushed]:
        """Make this version from these gradients, which are not held any longer."""
        start = time.perf_counter()
        pushes = [self.held.pop(ticket) for ticket in tickets]
        if len(pushes) > 1:
            pushes.sort(key=lambda pushed: pushed.rank)
        total = sum([pushed.mass for pushed in pushes]) or 1.0
        rate = total / sum(pushed.samples for pushed in pushes) if self._spec.corrections else 1.0
        groups = self._hyperparameters(pushes[0].groups, rate, version)
        pool = self._sessions.pool
        old, new = pool.newest, pool.take()
        message = ApplyUpdate(self._sources(pushes, total), old, new, groups)
        clips = [pushed.message.clip for pushed in pushes if pushed.message.clip is not None]
        if clips:
            message = self._clip(message, *clips[0])
        self._shards.apply(message)
        pool.publish(new, version)
        seconds = self.seconds = time.perf_counter() - start
        read = sum([pushed.message.bytes for pushed in pushes])
        used = [pushed.ticket for pushed in pushes]
        self._recorder.add(events.Update(-1, start, seconds, version, read, len(pushes), pushes=used, rate=rate))
        return pushes

    def _sources(self, pushes: list[Pushed], total: float) -> list[GradientRef]:
        sources: dict[int, GradientRef] = {}
        for pushed in pushes:
            place = pushed.place
            if place == self._shards.collected:
                sources[place] = GradientRef(place, 1.0 / total)
            elif place >= self._spec.capacity:  # a group's mean
                mass = sum(other.mass for other in pushes if other.place == place)
                sources[place] = GradientRef(place, mass / total)
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

    def _clip(self, message: ApplyUpdate, limit: float, norm: float) -> ApplyUpdate:
        """First make the mean gradient, to know its norm; the update then is with that, scaled."""
        parts = self._shards.apply(msgspec.structs.replace(message, norm=norm))
        length = together(parts, norm)
        if norm != float("inf"):
            length **= 1.0 / norm
        scale = min(1.0, limit / (length + 1e-6))
        if math.isnan(length):  # it must stay one, as in plain torch
            scale = length
        collected = GradientRef(self._shards.collected, 1.0)
        return ApplyUpdate([collected], message.old, message.new, None, scale)

    def sum_group(self, group: int, tickets: list[int]) -> None:
        """Let the members of a group make the mean of their gradients, each a part of it."""
        pushes = [self.held[ticket] for ticket in tickets if ticket in self.held]
        sessions = [self._sessions[pushed.rank] for pushed in pushes if pushed.rank in self._sessions]
        plain = not self._spec.compressed and not self._corrections.compensates
        plain = plain and not any(session.host for session in self._sessions.values())  # they share no memory
        if not plain or len(sessions) < len(pushes) or any(pushed.used is not None for pushed in pushes):
            return  # the update takes them one by one
        total = sum(pushed.mass for pushed in pushes) or 1.0
        weights = [pushed.mass * pushed.message.factor / total for pushed in pushes]
        for session in sessions:
            self._sessions.tell(session, ReduceShare([pushed.rank for pushed in pushes], weights, group))
        whole = True
        for session in sessions:
            try:
                answer = session.connection.receive_within(self._spec.timeouts.barrier)
            except Closed:
                whole = False  # its death will be heard; the others' sums are not used
                continue
            if answer is None:
                raise TeamTimeout(f"rank {session.rank} did not sum its part of its group's gradient", [session.rank])
            if not isinstance(answer, ShareReduced):
                raise Mismatch(f"rank {session.rank} sent a {type(answer).__name__} instead of a sum", [session.rank])
        for pushed in pushes if whole else ():
            pushed.place = self._spec.capacity + group
