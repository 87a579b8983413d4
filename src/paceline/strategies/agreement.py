"""What the workers tell each other at the start of an update, and what follows from it, equally on all of them."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from torch.optim import Optimizer

from paceline.cluster.membership import Members
from paceline.parameters.hyperparameters import SLOT, Hyperparameters

_NOTE = struct.Struct("=ddqqqdq")  # weight, factor, skip, number of the hyperparameters, all used, seconds, samples


class Agreement(NamedTuple):
    """The same on every worker."""

    weights: list[tuple[int, float]]
    """Those who brought a gradient, with its weight in the mean."""
    used: list[bytes] | None
    """Per worker, which parameters have a gradient there; None when all have everywhere."""
    skip: bool
    """Somebody's gradient was not finite."""
    groups: list[dict[str, Any]]
    """The optimizer's hyperparameters for this update, by parameter group."""
    paces: list[tuple[float, int]]
    """Per worker, seconds and samples of what it computed; zeros for one that computed nothing."""

    share: float = 1.0
    """Which part of the samples of this update they have: less than all if a worker was lost that had some."""

    def anywhere(self) -> bytes | None:
        """Which parameters have a gradient on any worker."""
        if self.used is None:
            return None
        taking_part = [self.used[rank] for rank, _ in self.weights]
        return bytes(any(flags) for flags in zip(*taking_part, strict=True))


class Table:
    """Where the workers write what they bring to an update."""

    def __init__(self, members: Members, optimizer: Optimizer, parameters: int) -> None:
        self._meeting = members.meeting
        self._rank, self._size = members.rank, members.size
        memory = members.share(self._size * (SLOT + parameters))
        slots = [memory.bytes(rank * SLOT, SLOT) for rank in range(self._size)]
        self._hyperparameters = Hyperparameters(optimizer, slots, self._rank)
        start = self._size * SLOT
        self._used = [memory.bytes(start + rank * parameters, parameters) for rank in range(self._size)]
        self._everything = bytes([1]) * parameters

    def bring(self, weight: float, factor: float, skip: bool, used: bytes, pace: tuple[float, int]) -> None:
        """Write this worker's note for the meeting that is about to be held.

        weight: of its samples in the team's; factor: what undoes the scale of its loss.
        """
        complete = 0 not in used
        if not complete:
            self._used[self._rank][:] = used
        number = self._hyperparameters.publish()
        _NOTE.pack_into(self._meeting.note, 0, weight, factor, skip, number, complete, *pace)

    def read(self) -> Agreement:
        """Make out of all notes what was agreed."""
        weights: list[tuple[int, float]] = []
        paces: list[tuple[float, int]] = [(0.0, 0)] * self._size
        used = [self._everything] * self._size
        complete, skip, share = True, False, 0.0
        groups: list[dict[str, Any]] = []
        for rank, note in enumerate(self._meeting.notes):
            if self._meeting.passive[rank]:
                continue
            weight, factor, skips, number, all_used, seconds, samples = _NOTE.unpack_from(note)
            if not weights:
                groups = self._hyperparameters.read(rank, number)
            weights.append((rank, weight * factor))
            share += weight
            paces[rank] = (seconds, samples)
            skip = skip or bool(skips)
            if not all_used:
                complete = False
                used[rank] = bytes(self._used[rank])
        return Agreement(weights, None if complete else used, skip, groups, paces, share)
