"""The time of transfers between machines in a run, and how much of it is hidden behind computing."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict

import msgspec

from paceline.config.units import duration, size
from paceline.events import Omitted, StageTransfer, Wait
from paceline.events.spans import Span, between, union

_MOST = 20_000
"""Transfers, waits and gaps of a worker that are kept, so that memory does not grow with the run."""


class Communication(msgspec.Struct, kw_only=True):
    """Values and gradients that pipelines have sent between machines."""

    bytes: int
    """Of the whole run."""
    seconds: float
    """In which at least one was on its way to a worker, summed over workers."""
    hidden: float | None
    """The share of these seconds in which that worker did not wait; None if there are none."""
    partial: bool = False
    """True if seconds and share are of a part of the run: events of the rest are in sums, or are too many."""

    @property
    def sentences(self) -> list[str]:
        """What a report says of it."""
        if self.hidden is None:
            return [f"Between machines {size(self.bytes)} were sent."]
        way, share = f"under way for {duration(self.seconds)}", f"{self.hidden:.0%} of that is hidden behind computing."
        if self.partial:
            known = "where all of them and all waits are known, they were"
            return [f"Between machines {size(self.bytes)} were sent; {known} {way}; {share}"]
        return [f"Between machines {size(self.bytes)} were {way}; {share}"]


class Transfers:
    """Sums the transfers to every worker, and their overlap with its waits; events may come in any order.

    Only time counts of which all transfers and waits of the worker are known: a wait that is not would make the
    transfers during it look hidden.
    """

    def __init__(self) -> None:
        self._spans: dict[type, defaultdict[int, array[float]]] = {
            kind: defaultdict(lambda: array("d")) for kind in (StageTransfer, Wait, Omitted)
        }
        """By kind of event and rank, starts and ends in turns."""
        self._until: dict[int, float] = {}
        """By rank, the first start of those that are not kept."""
        self._bytes: defaultdict[int, int] = defaultdict(int)
        """By rank of the receiver."""

    def add(self, event: StageTransfer | Wait | Omitted) -> None:
        """Adds a transfer, a wait, or the sums of such that are not recorded."""
        if isinstance(event, Omitted):
            for rank, sums in event.sums.items():
                if sums.events.keys() & {"transfer", "wait"}:
                    self._keep(event, rank)
                if "transfer" in sums.events:
                    self._bytes[rank] += sums.received
            return
        self._keep(event, event.rank)
        if isinstance(event, StageTransfer):
            self._bytes[event.rank] += event.bytes

    def _keep(self, event: StageTransfer | Wait | Omitted, rank: int) -> None:
        moments = self._spans[type(event)][rank]
        if len(moments) < 2 * _MOST:
            moments.extend((event.start, event.start + event.seconds))
        else:
            self._until[rank] = min(event.start, self._until.get(rank, math.inf))

    def result(self) -> Communication | None:
        """The sum of a run; None if nothing was sent between machines."""
        if not self._bytes:
            return None
        seconds, exposed, partial = 0.0, 0.0, False
        for rank in self._bytes:
            under_way, waits, gaps = (union(_pairs(spans[rank])) for spans in self._spans.values())
            if rank in self._until:
                gaps = union([*gaps, (self._until[rank], math.inf)])
            partial = partial or bool(gaps)
            known = [one for one in between(-math.inf, math.inf, gaps) if one[0] < one[1]]
            under_way = _common(under_way, known)
            seconds += _length(under_way)
            exposed += _length(_common(under_way, waits))
        return Communication(
            bytes=sum(self._bytes.values()),
            seconds=seconds,
            hidden=1 - exposed / seconds if seconds else None,
            partial=partial,
        )


def _pairs(moments: array[float]) -> list[Span]:
    return list(zip(moments[::2], moments[1::2], strict=True))


def _length(spans: list[Span]) -> float:
    return sum(end - start for start, end in spans)


def _common(some: list[Span], others: list[Span]) -> list[Span]:
    """The moments that are in both, of spans in order that do not overlap among themselves."""
    found, place = list[Span](), 0
    for start, end in some:
        while place < len(others) and others[place][1] <= start:
            place += 1
        number = place
        while number < len(others) and others[number][0] < end:
            found.append((max(start, others[number][0]), min(end, others[number][1])))
            number += 1
    return found
