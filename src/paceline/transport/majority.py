"""Which part of a team over machines may go on by itself: never two parts at once.

A part needs the majority of the machines of the last committed membership; of exactly half of them, the part with the
hub's machine. A membership is committed once the hub has collected notes from a majority of the one before: all of
their senders have read the table that announced it. So of two parts that do not reach each other, at most one goes on,
whatever the last hub has decided, and whichever members have learned of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple


class Membership(NamedTuple):
    """The members after a barrier."""

    ranks: frozenset[int]
    hub: int
    """The machine of the member that all notes go to."""

    def votes(
        self, ranks: Collection[int], left: Collection[int], machine_of: Mapping[int, int]
    ) -> tuple[int, int, bool]:
        """Machines with one of `ranks`, machines in all, and whether these may go on.

        left: ranks whose scripts have ended. Machines of which all have left do not count: no part can have them.
        """
        present = {machine_of[rank] for rank in self.ranks.intersection(ranks)}
        machines = present | {machine_of[rank] for rank in self.ranks.difference(left)}
        double = 2 * len(present)
        return len(present), len(machines), double > len(machines) or (double == len(machines) and self.hub in present)
