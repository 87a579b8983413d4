"""What was for workers who were lost before they trained on it: others get it at the end of the epoch.

Pure, and the same on all workers, as long as they are told the same.
"""

from __future__ import annotations

from typing import Any

_REMEMBERED = 64
"""Rounds whose parts are kept: more than loader processes fetch ahead."""

Parts = list[list[Any]]
"""Of one round, by rank."""


class OrphanedSamples:
    """Who shares in which rounds, and what was left over."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.takers = list(range(size))
        """Who gets what was left."""
        self._until: dict[int, int] = {}
        """Of those who are gone, the first round that is cut without them."""
        self._since: dict[int, int] = {}
        """And the first whose part they have not trained on."""
        self._recent: dict[int, Parts] = {}
        self._left: dict[tuple[int, int], list[Any]] = {}
        """By round and rank."""

    def begin(self, first: int) -> None:
        """An epoch begins, with this round."""
        self._until = {rank: min(until, first) for rank, until in self._until.items()}
        self.takers = [rank for rank in range(self._size) if rank not in self._until]
        self._recent, self._left = {}, {}

    def sharers(self, number: int) -> list[int]:
        """Who has a part of this round."""
        return [rank for rank in range(self._size) if number < self._until.get(rank, number + 1)]

    def note(self, number: int, parts: Parts) -> Parts:
        """A round is given out like this."""
        self._recent[number] = parts
        self._recent.pop(number - _REMEMBERED, None)
        for rank, since in self._since.items():
            if number >= since and parts[rank]:
                self._left[number, rank] = parts[rank]
        return parts

    def lose(self, ranks: set[int], since: int, until: int, takers: list[int]) -> None:
        """These are gone: what they have of rounds from `since` on is left; from `until` on they have nothing."""
        self.takers = [rank for rank in takers if rank not in self._until and rank not in ranks] or self.takers
        for rank in sorted(ranks):
            self._until[rank], self._since[rank] = until, since
            for number, parts in self._recent.items():
                if number >= since and parts[rank]:
                    self._left[number, rank] = parts[rank]

    def take(self) -> list[list[Any]]:
        """All that is left, in order; it is nobody's any more."""
        left, self._left = self._left, {}
        return [left[place] for place in sorted(left)]
