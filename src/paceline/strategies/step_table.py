"""The notes that workers exchange at the start of an update, and the agreement that follows from them."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.optim import Optimizer

from paceline.cluster.membership import Members
from paceline.errors import Mismatch, names
from paceline.parameters.announcements import Header
from paceline.parameters.gradient_state import both
from paceline.parameters.hyperparameters import Hyperparameters
from paceline.parameters.layout import Slot
from paceline.parameters.loss_weight import Kind, LossWeight
from paceline.parameters.worker_table import WorkerTable

_NOTE = struct.Struct("=dqddqqqdqqqdqqqdqq")
# share, kind and count of the loss, factor, skip, number of the hyperparameters, all used, seconds, samples,
# digest of changes by hand, round of the loader, loss, number of the optimizer, digest of how losses are computed,
# whether gradients are averaged by samples, share of the last batch, number of workers whose gradient it is, whether
# what was announced of it is wrong

WRONG = b"!"
"""The note of a passive worker that has announced a gradient which does not count."""
_MEANS = {Kind.MEAN}
_SIZE = 4
"""Bytes of the length of a tail."""


class StepAgreement(NamedTuple):
    """The content of an update; equal on all workers."""

    weights: list[tuple[int, float]]
    """Ranks that contribute a gradient, each with its weight in the mean."""
    used: list[bytes] | None
    """Per worker, a byte per parameter: 1 if it has a gradient there. None if all parameters have one everywhere."""
    skip: bool
    """True if a worker's gradient is not finite."""
    groups: list[dict[str, Any]]
    """The optimizer's hyperparameters for this update, by parameter group."""
    paces: list[tuple[float, int]]
    """Per worker, seconds and samples of its minibatch; zeros for a passive worker."""

    factor: float = 1.0
    """Undoes the scale of the first contributing worker's loss."""
    scale: float = 1.0
    """The factor on the weighted sum that undoes the scale of all losses; 1 if that is a part of the weights."""
    share: float = 1.0
    """Their share of the global batch; below 1 if a worker was lost that had samples of it."""
    changes: dict[int, int] = {}  # noqa: RUF012
    """By rank, the digest of parameters that its script has changed itself; 0 if it has not."""
    rounds: dict[int, int] = {}  # noqa: RUF012
    """By rank, the round of its loader; -1 without one."""
    unlike: int = -1
    """A rank whose hyperparameters are not those that are used; -1 if there is none."""
    alike: bool = False
    """True if workers without a loader have the same loss."""
    not_finite: dict[int, float] = {}  # noqa: RUF012
    """Losses that are not finite and must not be, by rank."""
    optimizer: int = 0
    """The number of the optimizer that it is about; -1 if about all."""
    ways: dict[int, int] = {}  # noqa: RUF012
    """By rank of a worker with samples of the batch, the digest of how its losses are computed."""
    averaged: tuple[int, ...] = ()
    """Ranks that have averaged gradients by samples which the loss does not count alike."""
    sums: bool = False
    """True if the losses are sums, as a worker knows."""
    parts: dict[int, float] = {}  # noqa: RUF012
    """By rank of a worker that steps now, its share of the loader's batch."""
    exposed: int = 0
    """The number of workers whose gradients are in `.grad` of those that step now, if that is the team's; else 0."""
    again: bool = False
    """True if a worker's gradient, or its weight, is not what it announced in the backward pass."""
    tails: dict[int, bytes] = {}  # noqa: RUF012
    """By rank, further bytes of its note, which only teams on several machines have."""

    def anywhere(self) -> bytes | None:
        """A byte per parameter: 1 if it has a gradient on any worker; None if all have."""
        if self.used is None:
            return None
        taking_part = [self.used[rank] for rank, _ in self.weights]
        return bytes(any(flags) for flags in zip(*taking_part, strict=True))


class StepTable:
    """Writes this worker's note for an update, and reads all."""

    def __init__(
        self, members: Members, optimizer: Optimizer, parameters: int, each: int = 1, masks: Sequence[bytes] = ()
    ) -> None:
        """each: workers of a replica, which have the same loss.

        masks: of several optimizers, a byte per parameter: 1 if it is updated by that one.
        """
        self._masks = masks
        self._barrier, self.each = members.barrier, each
        self._rank, self._members = members.rank, members
        self._everything = bytes([1]) * parameters
        self._in_notes = len(members.machines) > 1
        """True if flags and hyperparameters travel in the notes, to other machines; else they are in shared memory."""
        size = WorkerTable.memory_size(members.room, parameters)
        memory = memoryview(bytearray(size)) if self._in_notes else members.share(size).bytes(0, size)
        table = WorkerTable(memory, members.room, parameters)
        self._slots, self._used = table.slots, table.used
        self._hyperparameters = Hyperparameters(optimizer, self._slots, self._rank)
        self._sent = 0
        """The number of the hyperparameters that the other workers have."""
        self.tail = b""
        """Further bytes of this worker's next notes, on several machines."""
        self._tails: dict[int, bytes] = {}

    def write(
        self,
        share: float,
        loss: LossWeight,
        factor: float,
        skip: bool,
        used: bytes,
        pace: tuple[float, int],
        changed: int = 0,
        position: tuple[int, float] = (-1, 0.0),
        optimizer: int = 0,
        way: int = 0,
        averaged: bool = False,
        part: float = 1.0,
        exposed: int = 0,
        wrong: bool = False,
    ) -> int:
        """Write this worker's note for the next barrier; returns its length in bytes.

        share: its share of the global batch; factor: undoes the scale of its loss; changed: the digest of parameters
        that its script has changed itself, or 0; position: the round of its loader, and its loss; optimizer: the number
        of the one that steps, or -1 if the note is about all; way: the digest of how its losses are computed; averaged:
        True if a gradient was averaged by samples which the loss does not count alike; part: its share of the batch;
        exposed: the number of workers whose gradient it is, if it is the team's; wrong: True if what was announced of
        it is wrong.
        """
        complete = 0 not in used
        if not complete:
            self._used[self._rank][:] = used
        number = self._hyperparameters.publish()
        note = self._barrier.note
        of_loss = (share, loss.kind, loss.items, factor, skip)
        of_step = (*pace, changed, *position, optimizer, way, averaged, part, exposed, wrong)
        _NOTE.pack_into(note, 0, *of_loss, number, complete, *of_step)
        end = _NOTE.size
        if not self._in_notes:
            return end
        if not complete:
            note[end : end + len(used)] = used
            end += len(used)
        if number != self._sent:
            self._sent = number
            slot = self._slots[self._rank]
            length = 8 + int.from_bytes(slot[:8], "little")
            note[end : end + length] = slot[:length]
            end += length
        tail = self.tail + len(self.tail).to_bytes(_SIZE, "little")
        note[end : end + len(tail)] = tail
        return end + len(tail)

    def read(self) -> StepAgreement:
        """The agreement that follows from all notes."""
        losses: list[tuple[int, float, int, float, float]] = []
        paces: list[tuple[float, int]] = [(0.0, 0)] * self._members.size
        used: list[bytes] | None = None
        skip, unlike, exposed, again, self._tails = False, -1, 0, False, {}
        changes: dict[int, int] = {}
        rounds: dict[int, int] = {}
        stepping: dict[int, int] = {}
        ways: dict[int, int] = {}
        averaging: list[int] = []
        parts: dict[int, float] = {}
        values: set[float] = set()
        groups: list[dict[str, Any]] = []
        not_finite: dict[int, float] = {}
        for rank, note in enumerate(self._barrier.notes):
            passive = self._barrier.passive[rank]
            if passive and self._barrier.length(rank) < _NOTE.size:
                again = again or self._barrier.length(rank) == len(WRONG)
                continue
            share, kind, count, factor, skips, number, all_used, *rest = _NOTE.unpack_from(note)
            seconds, samples, changed, turn, loss, steps, way, averages, part, shown, wrong = rest
            if self._in_notes:
                self._take(rank, note[_NOTE.size : self._barrier.length(rank)], bool(all_used))
            own = self._hyperparameters.read(rank, number)
            if not losses:
                groups = own
            elif own is not groups and own != groups:
                unlike = rank
            values.add(loss)
            if not math.isfinite(loss):
                not_finite[rank] = loss
            losses.append((rank, share, kind, count, factor))
            if not passive:  # else it is a sum of batches before, to which this worker's script adds no more
                changes[rank], rounds[rank], stepping[rank], parts[rank] = changed, turn, steps, part
                exposed = max(exposed, shown)
                if share > 0 and turn >= 0:
                    ways[rank] = way
            paces[rank] = (seconds, samples)
            skip, again = skip or bool(skips), again or bool(wrong)
            if averages:
                averaging.append(rank)
            if not all_used:
                used = used or [self._everything] * self._members.size
                used[rank] = bytes(self._used[rank])
        optimizer = self._common(stepping)
        if self._masks and optimizer >= 0:
            mask = self._masks[optimizer]
            used = [both(flags, mask) for flags in used or [self._everything] * self._members.size]
        weights, share, factor, scale = _weigh_scaled(losses, self.each)
        alike = len(values) == 1 and len(losses) > self.each and set(rounds.values()) == {-1}
        facts = (
            changes,
            rounds,
            unlike,
            alike,
            not_finite,
            optimizer,
            ways,
            *_averaged(averaging, losses),
            parts,
            exposed,
            again,
        )
        return StepAgreement(weights, used, skip, groups, paces, factor, scale, share, *facts, self._tails)

    def forget(self, rank: int) -> None:
        """Another worker has this rank now."""
        self._hyperparameters.forget(rank)

    def _common(self, stepping: dict[int, int]) -> int:
        """The number of the optimizer that all workers step."""
        if len(set(stepping.values())) < 2:
            return next(iter(stepping.values()), 0)
        first = min(stepping)
        others = [rank for rank, number in stepping.items() if number != stepping[first]]
        raise Mismatch(
            f"{names(others)} stepped another optimizer than rank {first}; all workers must step the same ones in the "
            "same order",
            others,
        )

    def _take(self, rank: int, rest: memoryview, complete: bool) -> None:
        """Store the flags, the hyperparameters and the tail of another worker's note."""
        end = len(rest) - _SIZE
        begin = end - int.from_bytes(rest[end:], "little")
        if begin < end:
            self._tails[rank] = bytes(rest[begin:end])
        rest = rest[:begin]
        if not complete:
            count = len(self._everything)
            self._used[rank][:] = rest[:count]
            rest = rest[count:]
        if len(rest):
            self._slots[rank][: len(rest)] = rest


def _averaged(averaging: list[int], losses: list[tuple[int, float, int, float, float]]) -> tuple[tuple[int, ...], bool]:
    """The ranks that average gradients by samples where that is not exact, and True if losses are sums.

    averaging: those that know it; losses: as for `weigh`, of all workers.
    """
    kinds = {kind for _, share, kind, _, _ in losses if share > 0}
    sums = Kind.SUM in kinds
    if sums and Kind.UNKNOWN in kinds:
        averaging = [
            rank for rank, share, kind, _, _ in losses if (kind == Kind.UNKNOWN and share > 0) or rank in averaging
        ]
    return tuple(averaging), sums


def _weigh_scaled(
    losses: list[tuple[int, float, int, float, float]], each: int
) -> tuple[list[tuple[int, float]], float, float, float]:
    """As `weigh`, of every replica of so many workers; with two factors.

    The first worker's, and the one that all have and that is left to apply to the sum; 1 if they differ.
    """
    factors = [one[-1] for one in losses] or [1.0]
    scale = factors[0] if len(set(factors)) == 1 else 1.0
    return *weigh([(*one[:-1], one[-1] / scale) for one in losses[::each]]), factors[0], scale


def weigh(losses: list[tuple[int, float, int, float, float]]) -> tuple[list[tuple[int, float]], float]:
    """The weight of each gradient in the undivided batch's, by rank, and their share of it.

    losses: rank, share of samples, kind and count of the loss, and the factor that undoes its scale.
    """
    parts = [part for part in losses if part[1] > 0] or losses
    kinds = {kind for _, _, kind, _, _ in parts}
    if kinds == _MEANS and (total := sum(count for *_, count, _ in parts)) > 0:
        # A mean over no items is not a number; its weight of 0 would not help.
        return [(rank, count / total * factor) for rank, _, _, count, factor in parts if count > 0], 1.0
    if (
        kinds <= {Kind.SUM, Kind.MEAN} and Kind.SUM in kinds
    ):  # a divisor that is a count by chance is one on few workers
        return [(rank, factor) for rank, *_, factor in parts], 1.0
    return [(rank, share * factor) for rank, share, *_, factor in losses], sum(share for _, share, *_ in losses)


def weigh_headers(headers: Sequence[tuple[int, Header]]) -> list[tuple[int, float]]:
    """The same weights from what workers have told during the backward pass."""
    return weigh([(rank, *header, 1.0) for rank, header in headers])[0]


def changed_unlike(changed: Sequence[Slot], others: Sequence[int], first: int) -> Mismatch:
    """The error of workers whose scripts have changed these parameters to other values than the first worker's."""
    named = f" ({', '.join(slot.name for slot in changed[:3])})" if changed else ""
    return Mismatch(
        f"parameters{named} were changed outside of the optimizer, by {names(others)} to other values than by rank "
        f"{first}; all workers must change them alike, or before team.setup",
        others,
    )


class ReplicaStepTable(StepTable):
    """A table whose agreement is by replica instead of by worker."""

    def __init__(self, members: Members, optimizer: Optimizer, parameters: int, workers: int) -> None:
        """workers: of each replica."""
        super().__init__(members, optimizer, parameters, workers)

    def read(self) -> StepAgreement:
        agreed = super().read()
        each = self.each
        weights = [(rank // each, weight) for rank, weight in agreed.weights]
        paces = [
            (max(seconds for seconds, _ in part), sum(samples for _, samples in part))
            for start in range(0, len(agreed.paces), each)
            if (part := agreed.paces[start : start + each])
        ]
        used = None
        if agreed.used is not None:
            used = [any_used(agreed.used[first : first + each]) for first in range(0, len(agreed.used), each)]
            if all(0 not in used[replica] for replica, _ in weights):
                used = None
        return agreed._replace(weights=weights, used=used, paces=paces)


def any_used(flags: list[bytes]) -> bytes:
    """The flags of a replica: 1 for each parameter that has a gradient on any of its workers."""
    found = 0
    for one in flags:
        found |= int.from_bytes(one, "little")
    return found.to_bytes(len(flags[0]), "little")
