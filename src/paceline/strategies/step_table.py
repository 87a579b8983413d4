"""What the workers tell each other at the start of an update, and what follows from it, equally on all of them."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from torch.optim import Optimizer

from paceline.cluster.membership import Members
from paceline.parameters.hyperparameters import Hyperparameters
from paceline.parameters.worker_table import WorkerTable

_NOTE = struct.Struct("=ddqqqdq")  # weight, factor, skip, number of the hyperparameters, all used, seconds, samples


class StepAgreement(NamedTuple):
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


class StepTable:
    """Where the workers write what they bring to an update."""

    def __init__(self, members: Members, optimizer: Optimizer, parameters: int) -> None:
        self._barrier = members.barrier
        self._rank, self._size = members.rank, members.size
        self._everything = bytes([1]) * parameters
        self._spread = len(members.machines) > 1
        """What is long goes with the notes, for those on other machines; else it lies in shared memory."""
        size = WorkerTable.memory_size(self._size, parameters)
        memory = memoryview(bytearray(size)) if self._spread else members.share(size).bytes(0, size)
        table = WorkerTable(memory, self._size, parameters)
        self._slots, self._used = table.slots, table.used
        self._hyperparameters = Hyperparameters(optimizer, self._slots, self._rank)
        self._sent = 0
        """The number of the hyperparameters that the others have."""

    def bring(self, weight: float, factor: float, skip: bool, used: bytes, pace: tuple[float, int]) -> int:
        """Write this worker's note for the barrier that is about to be held; returns its length.

        weight: of its samples in the team's; factor: what undoes the scale of its loss.
        """
        complete = 0 not in used
        if not complete:
            self._used[self._rank][:] = used
        number = self._hyperparameters.publish()
        note = self._barrier.note
        _NOTE.pack_into(note, 0, weight, factor, skip, number, complete, *pace)
        end = _NOTE.size
        if not self._spread:
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
        return end

    def read(self) -> StepAgreement:
        """Make out of all notes what was agreed."""
        weights: list[tuple[int, float]] = []
        paces: list[tuple[float, int]] = [(0.0, 0)] * self._size
        used = [self._everything] * self._size
        complete, skip, share = True, False, 0.0
        groups: list[dict[str, Any]] = []
        for rank, note in enumerate(self._barrier.notes):
            if self._barrier.passive[rank]:
                continue
            weight, factor, skips, number, all_used, seconds, samples = _NOTE.unpack_from(note)
            if self._spread:
                self._take(rank, note[_NOTE.size : self._barrier.length(rank)], bool(all_used))
            if not weights:
                groups = self._hyperparameters.read(rank, number)
            weights.append((rank, weight * factor))
            share += weight
            paces[rank] = (seconds, samples)
            skip = skip or bool(skips)
            if not all_used:
                complete = False
                used[rank] = bytes(self._used[rank])
        return StepAgreement(weights, None if complete else used, skip, groups, paces, share)

    def _take(self, rank: int, rest: memoryview, complete: bool) -> None:
        """Keep what came with a note."""
        if not complete:
            count = len(self._everything)
            self._used[rank][:] = rest[:count]
            rest = rest[count:]
        if len(rest):
            self._slots[rank][: len(rest)] = rest
