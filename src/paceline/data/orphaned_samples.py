"""The samples of workers that were lost before they trained on them; others get them at the end of the epoch.

Pure, and the same on all workers if they get the same calls.
"""

from __future__ import annotations

from typing import Any

_REMEMBERED = 64
"""Rounds whose parts are kept: more than loader processes fetch ahead."""

Parts = list[list[Any]]
"""The parts of one round, by rank."""


class OrphanedSamples:
    """The workers of each round, and the samples of lost ones."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.takers = list(range(size))
        """The ranks that get the samples of lost workers."""
        self._until: dict[int, int] = {}
        """By lost rank, the first round that is cut without it."""
        self._since: dict[int, int] = {}
        """By lost rank, the first round whose part it has not trained on."""
        self._recent: dict[int, Parts] = {}
        self._left: dict[tuple[int, int], list[Any]] = {}
        """The parts of lost workers, by round and rank."""

    def begin(self, first: int) -> None:
        """Begins an epoch with this round."""
        self._until = {rank: min(until, first) for rank, until in self._until.items()}
        self.takers = [rank for rank in range(self._size) if rank not in self._until]
        self._recent, self._left = {}, {}

    def sharers(self, number: int) -> list[int]:
        """The ranks with a part of this round."""
        return [rank for rank in range(self._size) if number < self._until.get(rank, number + 1)]

    def note(self, number: int, parts: Parts) -> Parts:
        """Records the parts of a round, and returns them."""
        self._recent[number] = parts
        self._recent.pop(number - _REMEMBERED, None)
        for rank, since in self._since.items():
            if number >= since and parts[rank]:
                self._left[number, rank] = parts[rank]
        return parts

    def lose(self, ranks: set[int], since: int, until: int, takers: list[int]) -> None:
        """Removes lost ranks: their parts of rounds from `since` on go to others; from `until` on they have none."""
        self.takers = [rank for rank in takers if rank not in self._until and rank not in ranks] or self.takers
        for rank in sorted(ranks):
            self._until[rank], self._since[rank] = until, since
            for number, parts in self._recent.items():
                if number >= since and parts[rank]:
                    self._left[number, rank] = parts[rank]

    def take(self) -> list[list[Any]]:
        """Takes out all parts of lost workers, in order."""
        left, self._left = self._left, {}
        return [left[place] for place in sorted(left)]
