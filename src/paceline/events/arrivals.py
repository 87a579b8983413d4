"""Finds, for operations of process groups, who came last and how long the others waited for it.

Every worker records its own part only: when it came, and from when on it could only wait. The parts of one operation
have the same channel and number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from paceline.events import Collective, Event, Peers, Reduce, Wait

_NOTABLE = 2e-5
"""Seconds of waiting that are worth an event."""
_Key = tuple[str, int]


class Arrivals:
    """Turns the parts of operations into `Wait` and `Reduce` events, as soon as all parts are known."""

    def __init__(self) -> None:
        self._ranks: dict[str, list[int]] = {}
        """The workers of each channel."""
        self._parts: defaultdict[_Key, list[Collective]] = defaultdict(list)
        """Operations of which parts are missing."""

    def add(self, events: Iterable[Event]) -> list[Event]:
        """The waits and exchanges of the operations whose last part is among these events."""
        found: list[Event] = []
        for event in events:
            if type(event) is Collective:
                key = event.channel, event.number
                parts = self._parts[key]
                parts.append(event)
                if len(parts) >= len(self._ranks.get(event.channel, ())) > 0:
                    found += waits(self._parts.pop(key))
            elif type(event) is Peers:
                self._ranks[event.channel] = event.ranks
        return found

    def finish(self) -> list[Event]:
        """Those of operations that some worker did not come to: it is the one that was waited for."""
        found: list[Event] = []
        for (channel, _), parts in self._parts.items():
            missing = set(self._ranks.get(channel, ())) - {part.rank for part in parts}
            for part in parts:
                if missing and part.blocked > _NOTABLE:
                    found.append(Wait(part.rank, part.start + part.seconds - part.blocked, part.blocked, min(missing)))
        self._parts.clear()
        return found


def waits(parts: Sequence[Collective]) -> Iterator[Event]:
    """The waits and exchanges of one operation: a worker waits until the last one has come."""
    last = max(parts, key=lambda part: part.start)
    for part in parts:
        if part.blocked <= 0:
            continue
        end = part.start + part.seconds
        begin = end - part.blocked
        waited = min(last.start, end) - begin if last.rank != part.rank else 0.0
        if waited > _NOTABLE:
            yield Wait(part.rank, begin, waited, last.rank)
            begin += waited
        if end > begin:
            yield Reduce(part.rank, begin, end - begin, part.bytes)
