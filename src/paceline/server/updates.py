"""Updates: the pushed gradients that are not used yet, and how an update makes a version from them."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from typing import Any

import msgspec

from paceline import events, failpoints
from paceline.config import RunSpec, parse_correction
from paceline.errors import Mismatch, TeamTimeout, left_out_step
from paceline.events.recorder import Recorder
from paceline.parameters.corrections import Corrections
from paceline.parameters.hyperparameters import RateScaling, multiplied
from paceline.parameters.loss_weight import Kind
from paceline.parameters.reduction import combine_norms
from paceline.server import messages
from paceline.server.journal import Journal
from paceline.server.sessions import Sessions
from paceline.server.shard_set import ShardSet
from paceline.transport.unix_connection import Closed


@dataclasses.dataclass(slots=True)
class PendingPush:
    """A pushed gradient, until it is used or dropped."""

    ticket: int
    rank: int
    message: messages.PushGradient
    groups: list[dict[str, Any]]
    """Hyperparameters of its worker's optimizer."""
    used: bytes | None
    """Per parameter, 1 if it has a gradient; None if all have."""
    buffer: int
    """The buffer with the version that it was computed on."""
    source: int
    """Number of the buffer that it is in: its worker's, its group's, or the collected sum."""
    rate: float = 1.0
    """Factor of the learning rate for it, because it is stale."""
    sums: bool = False
    """True if its loss is a sum over samples."""

    @property
    def weight(self) -> float:
        """Its weight before normalization: its mass times its rate."""
        return self.mass * self.rate

    @property
    def mass(self) -> float:
        """The items that its loss is a mean over, samples if they are not known; 1 if its loss is a sum."""
        if self.sums:
            return 1.0
        return self.message.items if self.message.kind == Kind.MEAN else float(max(1, self.message.samples))

    def __post_init__(self) -> None:
        self.sums = self.message.kind == Kind.SUM


class Updates:
    """Makes versions from gradients, as the policy decides."""

    STATE = ("held", "seconds", "keep", "_last", "_scaling")
    """Attributes that change."""

    def __init__(
        self, spec: RunSpec, sessions: Sessions, shards: ShardSet, recorder: Recorder, k: int, journal: Journal
    ) -> None:
        self._spec, self._sessions, self._shards, self._recorder = spec, sessions, shards, recorder
        self._journal = journal
        self._corrections = Corrections(map(parse_correction, spec.corrections))
        self._scaling = RateScaling(spec.scale_lr, k, spec.warmup, k * spec.minibatch)
        self.bound = self._corrections.bound()
        """The staleness above which a gradient is dropped."""
        self.seconds = 0.0
        """Duration of the last update."""
        self.held: dict[int, PendingPush] = {}
        """Gradients that are not used yet, by ticket."""
        self._last: tuple[list[dict[str, Any]], float] | None = None
        """Hyperparameters of the last update, and the factor of their learning rates."""
        self.keep = False
        """True if the next update copies what it overwrites, for a snapshot."""

    def set_k(self, k: int) -> None:
        """Sets the number of gradients of an update, for learning rates that scale with it."""
        self._scaling = dataclasses.replace(self._scaling, workers=k, batch=k * self._spec.minibatch)

    def hold(self, pushed: PendingPush, staleness: int) -> None:
        """Adds a gradient that has arrived."""
        if self._spec.corrections:
            distance, newest = 0.0, self._sessions.pool.newest
            if self._corrections.needs_distance and pushed.buffer != newest:
                distance = sum(self._shards.handle(messages.MeasureDistance(newest, pushed.buffer)))
            rate = float(pushed.groups[0].get("lr", 1.0)) if pushed.groups else 1.0
            pushed.rate = self._corrections.rate(staleness, distance, rate)
        self.held[pushed.ticket] = pushed
        failpoints.hit("push.held")

    def leases_of(self, rank: int) -> list[int]:
        """The leases of a worker's gradients that are held."""
        return [number for held in self.held.values() if held.rank == rank for number in held.message.leases]

    def holds(self, rank: int) -> bool:
        """True if a gradient of this worker is held."""
        return any(held.rank == rank for held in self.held.values())

    def collect(self, rank: int) -> None:
        """Adds a worker's held gradient to the sum, because the worker is about to overwrite its buffer."""
        for pushed in self.held.values():
            if pushed.rank == rank and pushed.source == rank:
                source = self._source(pushed, pushed.weight * pushed.message.factor)
                self._shards.handle(messages.AddGradient(source, self._sessions.pool.newest))
                pushed.source = self._shards.collected

    def _source(self, pushed: PendingPush, weight: float) -> messages.GradientRef:
        base = pushed.buffer if self._corrections.compensates else -1
        return messages.GradientRef(pushed.source, weight, base, pushed.used, pushed.message.factor)

    def check_batches(self, tickets: list[int]) -> None:
        """Raises Mismatch if gradients that all workers make together are of different batches."""
        held = [self.held[ticket] for ticket in tickets]
        batches = {one.rank: (one.message.loader, one.message.batch) for one in held}
        first = min(batches)
        others = sorted(rank for rank, batch in batches.items() if batch != batches[first])
        if others:
            raise left_out_step(others, first)

    def parts(self, tickets: list[int]) -> tuple[int, dict[int, float]]:
        """The loader that gradients are of, -1 if that is not known; by rank, a gradient's share of its batch."""
        loader = self.held[tickets[0]].message.loader
        return loader, {self.held[ticket].rank: self.held[ticket].message.part for ticket in tickets}

    def apply(self, tickets: list[int], version: int) -> list[PendingPush]:
        """Makes this version from these gradients, which are not held any longer."""
        start = time.perf_counter()
        pushes = [self.held.pop(ticket) for ticket in tickets]
        if len(pushes) > 1:
            pushes.sort(key=lambda pushed: pushed.rank)
        pool = self._sessions.pool
        old, new = pool.newest, pool.take()
        failpoints.hit("update.begin")
        rate = 1.0
        # Gradients of several optimizers are independent of each other: each of them makes its part of the version.
        for number in sorted({pushed.message.optimizer for pushed in pushes}):
            part = [pushed for pushed in pushes if pushed.message.optimizer == number]
            rate = self._apply(part, old, new, version)
            old = new
        failpoints.hit("update.written")
        pool.publish(new, version)
        failpoints.hit("update.published")
        seconds = self.seconds = time.perf_counter() - start
        read = sum([pushed.message.bytes for pushed in pushes])
        used = [pushed.ticket for pushed in pushes]
        self._recorder.add(events.Update(-1, start, seconds, version, read, len(pushes), pushes=used, rate=rate))
        return pushes

    def _apply(self, pushes: list[PendingPush], old: int, new: int, version: int) -> float:
        """Updates the parameters of one optimizer; returns the factor of its learning rates."""
        if all(pushed.source < self._spec.capacity for pushed in pushes):  # else they are weighted already
            _agree_on_sums(pushes)
        total = sum([pushed.weight for pushed in pushes]) or 1.0
        rate = total / sum(pushed.mass for pushed in pushes) if self._spec.corrections else 1.0
        total = _divisor(pushes, total)
        groups = self._hyperparameters(pushes[0].groups, rate, version)
        optimizer = pushes[0].message.optimizer if len(self._spec.optimizers) > 1 else -1
        message = messages.ApplyUpdate(self._sources(pushes, total), old, new, groups, optimizer=optimizer)
        clips = [pushed.message.clip for pushed in pushes if pushed.message.clip is not None]
        if clips:
            message = self._clip(message, *clips[0])
        if self.keep:
            message, self.keep = msgspec.structs.replace(message, keep=True), False
        self._shards.handle(message)
        return rate

    def _sources(self, pushes: list[PendingPush], total: float) -> list[messages.GradientRef]:
        sources: dict[int, messages.GradientRef] = {}
        for pushed in pushes:
            source = pushed.source
            if source == self._shards.collected:
                sources[source] = messages.GradientRef(source, 1.0 / total)
            elif source >= self._spec.capacity:  # a group's mean
                members = [other for other in pushes if other.source == source]
                weight = sum(other.weight for other in members)
                sources[source] = messages.GradientRef(source, _divisor(members, weight) / total)
            else:
                sources[source] = self._source(pushed, pushed.weight * pushed.message.factor / total)
        return list(sources.values())

    def _hyperparameters(self, groups: list[dict[str, Any]], rate: float, version: int) -> list[dict[str, Any]] | None:
        """Hyperparameters for an update; None if they are those of the last one."""
        factor = self._scaling.factor(self._spec.version + version - 1) * rate
        if self._last is not None and self._last[0] is groups and self._last[1] == factor:
            return None
        self._last = (groups, factor)
        return multiplied(groups, factor)

    def _clip(self, message: messages.ApplyUpdate, limit: float, norm: float) -> messages.ApplyUpdate:
        """Makes the mean gradient and measures its norm; returns the update that uses it, scaled."""
        parts = self._shards.handle(msgspec.structs.replace(message, norm=norm))
        length = combine_norms(parts, norm)
        if norm != float("inf"):
            length **= 1.0 / norm
        scale = min(1.0, limit / (length + 1e-6))
        if math.isnan(length):  # it must stay one, as in plain torch
            scale = length
        collected = messages.GradientRef(self._shards.collected, 1.0)
        return messages.ApplyUpdate([collected], message.old, message.new, None, scale, optimizer=message.optimizer)

    def reduce_group(self, group: int, tickets: list[int]) -> None:
        """Has the members of a group sum their gradients, each a part of them."""
        pushes = [self.held[ticket] for ticket in tickets if ticket in self.held]
        sessions = [self._sessions[pushed.rank] for pushed in pushes if pushed.rank in self._sessions]
        plain = not self._spec.compressed and not self._corrections.compensates
        plain = plain and not any(session.host for session in self._sessions.values())  # they share no memory
        if not plain or len(sessions) < len(pushes) or any(pushed.used is not None for pushed in pushes):
            return  # the update takes them one by one
        _agree_on_sums(pushes)
        total = _divisor(pushes, sum(pushed.weight for pushed in pushes) or 1.0)
        weights = [pushed.weight * pushed.message.factor / total for pushed in pushes]
        for session in sessions:
            self._sessions.send(session, messages.ReduceShare([pushed.rank for pushed in pushes], weights, group))
        whole = True
        for session in sessions:
            try:
                answer = session.connection.receive_within(self._spec.timeouts.barrier)
            except Closed:
                whole = False  # the coordinator notices that; the others' sums are not used
                continue
            if answer is None:
                late = "did not sum its part of its group's gradient"
                end = functools.partial(self._sessions.end, session, f"{late} and had to be evicted")
                if not self._journal.value(end):
                    raise TeamTimeout(f"rank {session.rank} {late}", [session.rank])
                whole = False
                continue
            if not isinstance(answer, messages.ShareReduced):
                raise Mismatch(f"rank {session.rank} sent a {type(answer).__name__} instead of a sum", [session.rank])
        for pushed in pushes if whole else ():
            pushed.source = self._spec.capacity + group


def _agree_on_sums(pushes: list[PendingPush]) -> None:
    """Takes all losses for sums if one is: a divisor that is a number of samples by chance is one on few workers."""
    if any(pushed.sums for pushed in pushes):
        for pushed in pushes:
            pushed.sums = pushed.sums or pushed.message.kind == Kind.MEAN


def _divisor(pushes: list[PendingPush], total: float) -> float:
    """The divisor of a weighted sum of gradients: the total of their weights, or the mean of them if losses are sums.

    That mean is a factor of the learning rate already.
    """
    return total / len(pushes) if all(pushed.sums for pushed in pushes) else total
