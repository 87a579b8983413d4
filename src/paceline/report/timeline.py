"""Draws the timeline of a run: a row per worker, time to the right, white gaps where a worker waits.

If workers may be on different versions, computing has the colour of its version, cancelled work is light, and arrows
show pushes and pulls.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from html import escape
from typing import NamedTuple

from paceline.events import Cancel, Compute, Event, Load, Pass, Pull, Push, Reduce, Update, Wait
from paceline.report.rows import median_span
from paceline.report.svg import COLOURS, LEFT, PASSES, WIDTH, document

# Okabe and Ito's colours, which stay apart for colour-blind readers.
_COLOURS = {
    "computing": "#0072B2",
    "slowed on purpose": "#56B4E9",
    "loading": "#CC79A7",
    "updating": "#E69F00",
    "waiting": "#ffffff",
}
_PASSES = {"F": "forward", "B": "backward", "W": "gradients of weights"}
_OTHER = "#f0f0f0"
_EXCHANGE = "#555555"
_ROW, _TOP, _RIGHT = 34, 46, 16


class _Bar(NamedTuple):
    kind: str
    start: float
    seconds: float
    note: str
    colour: str
    light: bool = False
    label: str = ""
    """Drawn inside the bar if there is room."""


class _Scale(NamedTuple):
    """Maps times to coordinates."""

    begin: float
    end: float
    rows: dict[int, int]
    """The y coordinate of each rank's row."""

    def x(self, moment: float) -> float:
        return LEFT + (moment - self.begin) * (WIDTH - LEFT - _RIGHT) / (self.end - self.begin)

    def shows(self, *moments: float) -> bool:
        return all(self.begin <= moment <= self.end for moment in moments)


def timeline(
    events: Iterable[Event], title: str, updates: int = 8, *, staleness: bool = False, whole: bool = False
) -> str:
    """An SVG of some successive updates that are typical for a run.

    staleness: draw each push's staleness.
    whole: draw the whole run, from its first update to its last, without arrows, of which there would be too many.
    """
    events = list(events)
    served = any(isinstance(event, Push) for event in events)
    moments = _moments(events, served)
    legend = _legend(events, served)
    if not moments:
        return _frame(title, 1, ["<text x='20' y='70'>there was no update in this run</text>"], legend)
    begin, end = (moments[0], moments[-1]) if whole else median_span(moments, updates)
    if end <= begin:
        begin, end = min(e.start for e in events), max(e.start + getattr(e, "seconds", 0.0) for e in events)
    ranks = sorted({event.rank for event in events if event.rank >= 0})
    lanes = [*ranks, -1] if served else ranks
    scale = _Scale(begin, end, {rank: _TOP + row * _ROW for row, rank in enumerate(lanes)})
    shapes = [_lane(rank, y) for rank, y in scale.rows.items()]
    for event in events:
        if event.rank in scale.rows:
            shapes += [_drawn(scale, event.rank, bar) for bar in _bars(event, served)]
    bottom = _TOP + len(lanes) * _ROW
    for moment in moments if not whole else ():
        if scale.shows(moment):
            x = scale.x(moment)
            line = f"x1='{x:.1f}' y1='{_TOP - 4}' x2='{x:.1f}' y2='{bottom - 4}'"
            shapes.append(f"<line {line} stroke='#333' opacity='.35'/>")
    if served and not whole:
        shapes += _arrows(events, scale, moments, staleness)
    axis = f"y='{bottom + 12}' class='small'"
    shapes.append(f"<text x='{LEFT}' {axis}>0</text>")
    shapes.append(f"<text x='{WIDTH - _RIGHT}' {axis} text-anchor='end'>{(end - begin) * 1e3:.1f} ms</text>")
    return _frame(title, len(lanes), shapes, legend)


def _moments(events: list[Event], served: bool) -> list[float]:
    """The times at which versions were published: by the server, or by workers that all make the same update."""
    made = [event for event in events if isinstance(event, Update) and (event.rank == -1) == served]
    if served:
        return sorted(event.start + event.seconds for event in made)
    # If all workers make the same update, the lowest remaining rank counts.
    first = {event.version: event.start for event in sorted(made, key=lambda event: event.rank, reverse=True)}
    return sorted(first.values())


def _bars(event: Event, served: bool) -> list[_Bar]:
    """The bars of an event."""
    match event:
        case Compute() | Pass():
            return _computed(event, served)
        case Cancel():
            words = f"after {event.seconds * 1e3:.2f} ms on version {event.version}"
            return [_Bar("cancelled", event.start, event.seconds, words, _colour(event.version), light=True)]
        case Load() if not served:
            kind, colour, cause = "loading", _COLOURS["loading"], ""
        case Update() | Reduce() | Pull():
            kind, colour, cause = "updating", _EXCHANGE if served else _COLOURS["updating"], ""
        case Wait():
            kind, colour, cause = "waiting", _COLOURS["waiting"], f" for worker {event.on}"
        case _:
            return []
    return [_Bar(kind, event.start, event.seconds, f"{event.seconds * 1e3:.2f} ms{cause}", colour)]


def _computed(event: Compute | Pass, served: bool) -> list[_Bar]:
    if isinstance(event, Pass):
        words = f"{event.kind}{event.microbatch} of stage {event.stage} in {event.seconds * 1e3:.2f} ms"
        kind = event.kind if event.kind in _PASSES else "F"
        return [_Bar(_PASSES[kind], event.start, event.seconds, words, PASSES[kind], label=str(event.microbatch))]
    words = f"{event.samples} samples on version {event.version} in {event.seconds * 1e3:.2f} ms"
    if served:
        return [_Bar("computing", event.start, event.seconds, words, _colour(event.version))]
    busy = event.seconds - event.slowed
    bars = [_Bar("computing", event.start, busy, words, _COLOURS["computing"])]
    if event.slowed > 0:
        kind = "slowed on purpose"
        bars.append(_Bar(kind, event.start + busy, event.slowed, words, _COLOURS[kind]))
    return bars


def _colour(version: int) -> str:
    return COLOURS[version % len(COLOURS)]


# -- shapes ----------------------------------------------------------------------------------------------------------


def _lane(rank: int, y: int) -> str:
    name = f"worker {rank}" if rank >= 0 else "server"
    width = WIDTH - LEFT - _RIGHT
    return (
        f"<text x='{LEFT - 10}' y='{y + 19}' text-anchor='end'>{name}</text>"
        f"<rect x='{LEFT}' y='{y}' width='{width}' height='{_ROW - 8}' fill='{_OTHER}' stroke='#ddd'/>"
    )


def _drawn(scale: _Scale, rank: int, bar: _Bar) -> str:
    first, last = max(scale.begin, bar.start), min(scale.end, bar.start + bar.seconds)
    if first >= last:
        return ""
    x, y = scale.x(first), scale.rows[rank]
    width = max(0.6, scale.x(last) - x)
    faint = " fill-opacity='.25' stroke-dasharray='3 2'" if bar.light else ""
    edge = f" stroke='{bar.colour}' stroke-width='.8'" if bar.light else ""
    box = (
        f"<rect x='{x:.2f}' y='{y + 1}' width='{width:.2f}' height='{_ROW - 10}' fill='{bar.colour}'{faint}{edge}>"
        f"<title>{escape(bar.kind)}: {escape(bar.note)}</title></rect>"
    )
    if bar.label and width > 8 * len(bar.label) + 2:
        middle = x + width / 2
        box += f"<text x='{middle:.1f}' y='{y + 18}' text-anchor='middle' class='inside'>{escape(bar.label)}</text>"
    return box


def _arrows(events: list[Event], scale: _Scale, published: list[float], staleness: bool) -> list[str]:
    """Arrows of pushes and of the pulls that follow them."""
    talks: dict[int, list[Pull | Wait]] = {}
    for event in events:
        if isinstance(event, Pull | Wait) and event.rank >= 0:
            talks.setdefault(event.rank, []).append(event)
    for talk in talks.values():
        talk.sort(key=lambda event: event.start)
    shapes = []
    deep = scale.rows[-1]
    for push in events:
        if not isinstance(push, Push) or push.rank not in talks:
            continue
        mine = talks[push.rank]
        number = bisect_right(mine, push.start, key=lambda event: event.start) - 1
        if number < 0:
            continue
        sent, got = mine[number].start, mine[number].start + mine[number].seconds
        if not scale.shows(sent, push.start) or push.start > got:
            continue
        low = scale.rows[push.rank] + _ROW - 8
        words = f"push of worker {push.rank}, {push.staleness} versions old: {push.outcome}, {push.reason}"
        dashed = push.outcome in ("dropped", "skipped")
        shapes.append(_arrow(scale.x(sent), low, scale.x(push.start), deep, "#222222", words, dashed=dashed))
        last = bisect_right(published, got) - 1
        answered = max(push.start, published[last]) if last >= 0 else push.start
        if scale.shows(answered, got):
            words = f"pull of worker {push.rank}"
            shapes.append(_arrow(scale.x(answered), deep, scale.x(got), low, "#8a8a8a", words))
        if staleness:
            x = scale.x(push.start)
            shapes.append(f"<circle cx='{x:.1f}' cy='{deep + 13}' r='8' fill='#ffffff' stroke='#222'/>")
            shapes.append(
                f"<text x='{x:.1f}' y='{deep + 17}' class='small' text-anchor='middle'>{push.staleness}</text>"
            )
    return shapes


def _arrow(x1: float, y1: float, x2: float, y2: float, colour: str, words: str, *, dashed: bool = False) -> str:
    dash = " stroke-dasharray='3 3'" if dashed else ""
    up = -1 if y2 > y1 else 1
    head = f"{x2:.1f},{y2:.1f} {x2 - 3:.1f},{y2 + 7 * up:.1f} {x2 + 3:.1f},{y2 + 7 * up:.1f}"
    return (
        f"<g stroke='{colour}' fill='{colour}' opacity='.8'><title>{escape(words)}</title>"
        f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}'{dash}/><polygon points='{head}'/></g>"
    )


def _legend(events: list[Event], served: bool) -> list[tuple[str, list[str], str]]:
    """The labels, the colours of their boxes, and the boxes' fill style."""
    if not served:
        slowed = any(isinstance(event, Compute) and event.slowed > 0 for event in events)
        loads = any(isinstance(event, Load) for event in events)
        passes = {event.kind for event in events if isinstance(event, Pass)}
        left_out = {"slowed on purpose": not slowed, "loading": not loads, "computing": bool(passes)}
        known = [(words, [PASSES[kind]], "") for kind, words in _PASSES.items() if kind in passes]
        known += [(kind, [colour], "") for kind, colour in _COLOURS.items() if not left_out.get(kind, False)]
    else:
        known = [
            ("computing, a colour per version", list(COLOURS), ""),
            ("cancelled", [COLOURS[0]], " fill-opacity='.25'"),
            ("pushing, updating, pulling", [_EXCHANGE], ""),
            ("waiting", ["#ffffff"], ""),
        ]
    return [*known, ("not training", [_OTHER], "")]


def _frame(title: str, rows: int, shapes: list[str], legend: list[tuple[str, list[str], str]]) -> str:
    height = _TOP + rows * _ROW + 44
    words, x = [], LEFT
    for kind, colours, style in legend:
        for colour in colours:
            words.append(
                f"<rect x='{x}' y='{height - 20}' width='12' height='12' fill='{colour}'{style} stroke='#bbb'/>"
            )
            x += 12
        words.append(f"<text x='{x + 6}' y='{height - 9}' class='small'>{kind}</text>")
        x += 22 + 7 * len(kind)
    return document(title, height, [*shapes, *words], ".inside{font-size:11px;fill:#fff}")
