"""Rows of a figure of time: what a worker did, as bars to the right."""

from __future__ import annotations

from html import escape
from typing import NamedTuple

from paceline.events import Cancel, Compute, Event, Load, Pass, Pull, Reduce, StageTransfer, Update, Wait
from paceline.report.svg import COLOURS, LEFT, PASSES, WIDTH

# Okabe and Ito's colours, which stay apart for colour-blind readers.
ACTIVITIES = {
    "computing": "#0072B2",
    "slowed on purpose": "#56B4E9",
    "loading": "#CC79A7",
    "updating": "#E69F00",
    "waiting": "#ffffff",
}
PASS_NAMES = {"F": "forward", "B": "backward", "W": "gradients of weights"}
OTHER = "#f0f0f0"
RECEIVING, TRANSFER = "coming from another machine", "#D55E00"
EXCHANGE = "#555555"
ROW, TOP, RIGHT = 34, 46, 16
_THIN = 4


class Bar(NamedTuple):
    """A stretch of a worker's time."""

    kind: str
    start: float
    seconds: float
    note: str
    colour: str
    light: bool = False
    label: str = ""
    """Drawn inside the bar if there is room."""
    thin: bool = False
    """True if it is drawn below the bars of what the worker does meanwhile."""


class Scale(NamedTuple):
    """Maps times to coordinates."""

    begin: float
    end: float
    rows: dict[int, int]
    """The y coordinate of each rank's row."""
    right: int = RIGHT
    """Pixels that are left free at the right end of a row."""

    @property
    def width(self) -> int:
        """The length of a row, in pixels."""
        return WIDTH - LEFT - self.right

    def x(self, moment: float) -> float:
        return LEFT + (moment - self.begin) * self.width / (self.end - self.begin)

    def shows(self, *moments: float) -> bool:
        return all(self.begin <= moment <= self.end for moment in moments)


def moments_of(events: list[Event], served: bool) -> list[float]:
    """The times at which versions were published: by the server, or by workers that all make the same update."""
    made = [event for event in events if isinstance(event, Update) and (event.rank == -1) == served]
    if served:
        return sorted(event.start + event.seconds for event in made)
    # If all workers make the same update, the lowest remaining rank counts.
    first = {event.version: event.start for event in sorted(made, key=lambda event: event.rank, reverse=True)}
    return sorted(first.values())


def bars(event: Event, served: bool) -> list[Bar]:
    """The bars of an event."""
    match event:
        case Compute() | Pass():
            return _computed(event, served)
        case Cancel():
            words = f"after {event.seconds * 1e3:.2f} ms on version {event.version}"
            return [Bar("cancelled", event.start, event.seconds, words, _colour(event.version), light=True)]
        case Load() if not served:
            kind, colour, cause = "loading", ACTIVITIES["loading"], ""
        case Update() | Reduce() | Pull():
            kind, colour, cause = "updating", EXCHANGE if served else ACTIVITIES["updating"], ""
        case StageTransfer():
            words = f"{event.bytes / 1e3:.1f} kB from worker {event.source} in {event.seconds * 1e3:.2f} ms"
            return [Bar(RECEIVING, event.start, event.seconds, words, TRANSFER, thin=True)]
        case Wait():
            kind, colour, cause = "waiting", ACTIVITIES["waiting"], f" for worker {event.on}"
        case _:
            return []
    return [Bar(kind, event.start, event.seconds, f"{event.seconds * 1e3:.2f} ms{cause}", colour)]


def _computed(event: Compute | Pass, served: bool) -> list[Bar]:
    if isinstance(event, Pass):
        words = f"{event.kind}{event.microbatch} of stage {event.stage} in {event.seconds * 1e3:.2f} ms"
        kind = event.kind if event.kind in PASS_NAMES else "F"
        return [Bar(PASS_NAMES[kind], event.start, event.seconds, words, PASSES[kind], label=str(event.microbatch))]
    words = f"{event.samples} samples on version {event.version} in {event.seconds * 1e3:.2f} ms"
    if served:
        return [Bar("computing", event.start, event.seconds, words, _colour(event.version))]
    busy = event.seconds - event.slowed
    parts = [Bar("computing", event.start, busy, words, ACTIVITIES["computing"])]
    if event.slowed > 0:
        kind = "slowed on purpose"
        parts.append(Bar(kind, event.start + busy, event.slowed, words, ACTIVITIES[kind]))
    return parts


def _colour(version: int) -> str:
    return COLOURS[version % len(COLOURS)]


def lane(scale: Scale, rank: int) -> str:
    """The name and the frame of a rank's row."""
    name = f"worker {rank}" if rank >= 0 else "server"
    y = scale.rows[rank]
    return (
        f"<text x='{LEFT - 10}' y='{y + 19}' text-anchor='end'>{name}</text>"
        f"<rect x='{LEFT}' y='{y}' width='{scale.width}' height='{ROW - 8}' fill='{OTHER}' stroke='#ddd'/>"
    )


def drawn(scale: Scale, rank: int, bar: Bar) -> str:
    """A bar in a rank's row."""
    first, last = max(scale.begin, bar.start), min(scale.end, bar.start + bar.seconds)
    if first >= last:
        return ""
    x, y = scale.x(first), scale.rows[rank]
    width = max(0.6, scale.x(last) - x)
    faint = " fill-opacity='.25' stroke-dasharray='3 2'" if bar.light else ""
    edge = f" stroke='{bar.colour}' stroke-width='.8'" if bar.light else ""
    top, height = (y + ROW - 8, _THIN) if bar.thin else (y + 1, ROW - 10)
    box = (
        f"<rect x='{x:.2f}' y='{top}' width='{width:.2f}' height='{height}' fill='{bar.colour}'{faint}{edge}>"
        f"<title>{escape(bar.kind)}: {escape(bar.note)}</title></rect>"
    )
    if bar.label and width > 8 * len(bar.label) + 2:
        middle = x + width / 2
        box += f"<text x='{middle:.1f}' y='{y + 18}' text-anchor='middle' class='inside'>{escape(bar.label)}</text>"
    return box
