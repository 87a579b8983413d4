"""Draws the timeline of a run: a row per worker, time to the right, white gaps where a worker waits.

If workers may be on different versions, computing has the colour of its version, cancelled work is light, and arrows
show pushes and pulls.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from html import escape

from paceline.events import Compute, Event, Load, Pass, Pull, Push, StageTransfer, Wait
from paceline.report.lanes import (
    ACTIVITIES,
    EXCHANGE,
    OTHER,
    PASS_NAMES,
    RECEIVING,
    RIGHT,
    ROW,
    TOP,
    TRANSFER,
    Scale,
    bars,
    drawn,
    lane,
    moments_of,
)
from paceline.report.rows import median_span
from paceline.report.svg import COLOURS, LEFT, PASSES, WIDTH, Figure, document


def timeline(
    events: Iterable[Event], title: str, updates: int = 8, *, staleness: bool = False, whole: bool = False
) -> Figure:
    """An SVG of some successive updates that are typical for a run.

    staleness: draw each push's staleness.
    whole: draw the whole run, from its first update to its last, without arrows, of which there would be too many.
    """
    events = list(events)
    served = any(isinstance(event, Push) for event in events)
    moments = moments_of(events, served)
    legend = _legend(events, served)
    if not moments:
        return _frame(title, 1, ["<text x='20' y='70'>there was no update in this run</text>"], legend)
    begin, end = (moments[0], moments[-1]) if whole else median_span(moments, updates)
    if end <= begin:
        begin, end = min(e.start for e in events), max(e.start + getattr(e, "seconds", 0.0) for e in events)
    ranks = sorted({event.rank for event in events if event.rank >= 0})
    lanes = [*ranks, -1] if served else ranks
    scale = Scale(begin, end, {rank: TOP + row * ROW for row, rank in enumerate(lanes)})
    shapes = [lane(scale, rank) for rank in scale.rows]
    for event in events:
        if event.rank in scale.rows:
            shapes += [drawn(scale, event.rank, bar) for bar in bars(event, served)]
    bottom = TOP + len(lanes) * ROW
    for moment in moments if not whole else ():
        if scale.shows(moment):
            x = scale.x(moment)
            line = f"x1='{x:.1f}' y1='{TOP - 4}' x2='{x:.1f}' y2='{bottom - 4}'"
            shapes.append(f"<line {line} stroke='#333' opacity='.35'/>")
    if served and not whole:
        shapes += _arrows(events, scale, moments, staleness)
    axis = f"y='{bottom + 12}' class='small'"
    shapes.append(f"<text x='{LEFT}' {axis}>0</text>")
    shapes.append(f"<text x='{WIDTH - RIGHT}' {axis} text-anchor='end'>{(end - begin) * 1e3:.1f} ms</text>")
    return _frame(title, len(lanes), shapes, legend)


# -- shapes ----------------------------------------------------------------------------------------------------------


def _arrows(events: list[Event], scale: Scale, published: list[float], staleness: bool) -> list[str]:
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
        low = scale.rows[push.rank] + ROW - 8
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
        known = [(words, [PASSES[kind]], "") for kind, words in PASS_NAMES.items() if kind in passes]
        known += [(kind, [colour], "") for kind, colour in ACTIVITIES.items() if not left_out.get(kind, False)]
        if any(isinstance(event, StageTransfer) for event in events):
            known.append((RECEIVING, [TRANSFER], ""))
    else:
        known = [
            ("computing, a colour per version", list(COLOURS), ""),
            ("cancelled", [COLOURS[0]], " fill-opacity='.25'"),
            ("pushing, updating, pulling", [EXCHANGE], ""),
            ("waiting", ["#ffffff"], ""),
        ]
    return [*known, ("not training", [OTHER], "")]


def _frame(title: str, rows: int, shapes: list[str], legend: list[tuple[str, list[str], str]]) -> Figure:
    height = TOP + rows * ROW + 44
    words, x = [], LEFT
    for kind, colours, style in legend:
        for colour in colours:
            words.append(
                f"<rect x='{x}' y='{height - 20}' width='12' height='12' fill='{colour}'{style} stroke='#bbb'/>"
            )
            x += 12
        words.append(f"<text x='{x + 6}' y='{height - 9}' class='small'>{kind}</text>")
        x += 22 + 7 * len(kind)
    return document(title, height, [*shapes, *words])
