"""The workers of each round, if some are lost or join; others get the samples of lost ones at the end of the epoch.

Pure, and the same on all workers if they get the same calls.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_REMEMBERED = 64
"""Rounds whose parts are kept beside those that loader processes fetch ahead."""
_NEVER = 1 << 62

Parts = list[list[Any]]
"""The parts of one round, by rank."""


class _Absence(NamedTuple):
    """The rounds of a rank that was lost."""

    rank: int
    since: int
    """The first round whose part it has not trained on."""
    until: int
    """The first round that is cut without it."""
    back: int = _NEVER
    """The first round that is cut with the worker that has joined in its place."""


class OrphanedSamples:
    """The workers of each round, and the samples of lost ones."""

    def __init__(self, size: int, ahead: int = 0) -> None:
        """ahead: rounds that loader processes fetch before they are trained on, at most."""
        self._size, self._ahead = size, ahead
        self.takers = list(range(size))
        """The ranks that get the samples of lost workers."""
        self._absences: list[_Absence] = []
        self._returning: set[int] = set()
        """Ranks that take part from the next epoch on."""
        self._recent: dict[int, Parts] = {}
        self._left: dict[tuple[int, int], list[Any]] = {}
        """The parts of lost workers, by round and rank."""

    def begin(self, first: int) -> None:
        """Begins an epoch with this round."""
        # A round of the epoch before may have a higher number, as the samples of lost workers made it longer.
        gone = {one.rank for one in self._absences if one.back == _NEVER} - self._returning
        self._absences = [_Absence(rank, first, first) for rank in sorted(gone)]
        self._returning = set()
        self.takers = [rank for rank in range(self._size) if rank not in gone]
        self._recent, self._left = {}, {}

    def sharers(self, number: int) -> list[int]:
        """The ranks with a part of this round."""
        away = {one.rank for one in self._absences if one.until <= number < one.back}
        return [rank for rank in range(self._size) if rank not in away]

    def takers_of(self, number: int) -> list[int]:
        """The ranks that get the samples of lost workers in this round."""
        joined = {one.rank for one in self._absences if one.back <= number} & set(self.sharers(number))
        return sorted({*self.takers, *joined})

    def note(self, number: int, parts: Parts) -> Parts:
        """Records the parts of a round, and returns them."""
        self._recent[number] = parts
        self._recent.pop(number - self._ahead - _REMEMBERED, None)
        for rank, since, until, _ in self._absences:
            if since <= number < until and parts[rank]:
                self._left[number, rank] = parts[rank]
        return parts

    def lose(self, ranks: set[int], since: int, until: int, takers: list[int]) -> None:
        """Removes lost ranks: their parts of rounds from `since` on go to others; from `until` on they have none."""
        gone = {one.rank for one in self._absences if one.back == _NEVER} | ranks
        self.takers = [rank for rank in takers if rank not in gone] or self.takers
        self._returning -= ranks
        for rank in sorted(ranks):
            # Parts before those of a worker that had joined are left since the loss before, and may be taken.
            own = max([since, *(one.back for one in self._absences if one.rank == rank)])
            self._absences.append(_Absence(rank, own, until))
            for number, parts in self._recent.items():
                if own <= number < until and parts[rank]:
                    self._left[number, rank] = parts[rank]

    def gain(self, rank: int, back: int | None) -> None:
        """Adds a worker from this round on, or from the next epoch on: in the place of a lost one, or one more."""
        # A rank that was never there is one without rounds; so are those below it, which may come later.
        self._absences += [_Absence(new, 0, 0) for new in range(self._size, rank + 1)]
        self._size = max(self._size, rank + 1)
        if back is None:
            self._returning.add(rank)
        else:
            self._absences = [
                one._replace(back=back) if one.rank == rank and one.back == _NEVER else one for one in self._absences
            ]

    def state(self) -> dict[str, Any]:
        """For a worker that joins, which cuts the rounds of the epoch again."""
        return {"size": self._size, "takers": self.takers, "absences": [list(one) for one in self._absences]}

    def restore(self, state: dict[str, Any]) -> None:
        self._size, self.takers = state["size"], list(state["takers"])
        self._absences = [_Absence(*one) for one in state["absences"]]

    def take(self) -> list[list[Any]]:
        """Takes out all parts of lost workers, in order."""
        left, self._left = self._left, {}
        return [left[place] for place in sorted(left)]
