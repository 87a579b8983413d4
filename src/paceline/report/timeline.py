"""The picture that explains a run: a row per worker, time to the right, the gaps where a worker waits left empty.

Where workers can be on different versions, computing has the colour of its version, and cancelled work is light.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import NamedTuple

from paceline.events import Cancel, Compute, Event, Pull, Push, Reduce, Update, Wait

# Okabe and Ito's colours, which stay apart for colour-blind readers.
_COLOURS = {"computing": "#0072B2", "slowed on purpose": "#56B4E9", "updating": "#E69F00", "waiting": "#ffffff"}
_VERSIONS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_OTHER = "#f0f0f0"
_WIDTH, _ROW, _LEFT, _TOP = 960, 34, 76, 46


class _Bar(NamedTuple):
    kind: str
    start: float
    seconds: float
    note: str
    colour: str
    light: bool = False


def timeline(events: Iterable[Event], title: str, updates: int = 8) -> str:
    """An SVG of some updates in a row that are typical for a run."""
    events = list(events)
    served = any(isinstance(event, Push) for event in events)
    who = -1 if served else 0
    moments = sorted(
        event.start + (event.seconds if served else 0.0)
        for event in events
        if isinstance(event, Update) and event.rank == who
    )
    legend = _legend(served)
    if not moments:
        return _frame(title, 1, ["<text x='20' y='70'>there was no update in this run</text>"], legend)
    begin, end = _window(moments, updates)
    if end <= begin:
        begin, end = min(e.start for e in events), max(e.start + getattr(e, "seconds", 0.0) for e in events)
    ranks = sorted({event.rank for event in events if event.rank >= 0})
    scale = (_WIDTH - _LEFT - 16) / (end - begin)
    shapes: list[str] = []
    for row, rank in enumerate(ranks):
        y = _TOP + row * _ROW
        shapes.append(f"<text x='{_LEFT - 10}' y='{y + 19}' text-anchor='end'>worker {rank}</text>")
        width = _WIDTH - _LEFT - 16
        shapes.append(f"<rect x='{_LEFT}' y='{y}' width='{width}' height='{_ROW - 8}' fill='{_OTHER}' stroke='#ddd'/>")
        for event in events:
            if event.rank == rank:
                for bar in _bars(event, served):
                    first, last = max(begin, bar.start), min(end, bar.start + bar.seconds)
                    if first < last:
                        x, length = _LEFT + (first - begin) * scale, max(0.6, (last - first) * scale)
                        shapes.append(_drawn(x, y, length, bar))
    for moment in moments:
        if begin <= moment <= end:
            x = _LEFT + (moment - begin) * scale
            bottom = _TOP + len(ranks) * _ROW - 4
            shapes.append(
                f"<line x1='{x:.1f}' y1='{_TOP - 4}' x2='{x:.1f}' y2='{bottom}' stroke='#333' opacity='.35'/>"
            )
    shapes.append(_axis(end - begin, _TOP + len(ranks) * _ROW + 12))
    return _frame(title, len(ranks), shapes, legend)


def _window(moments: list[float], updates: int) -> tuple[float, float]:
    """From when to when: of all stretches of so many updates, the one of middling length."""
    count = min(updates, len(moments) - 1)
    stretches = sorted((moments[i + count] - moments[i], moments[i]) for i in range(len(moments) - count))
    seconds, begin = stretches[len(stretches) // 2]
    return begin, begin + seconds


def _bars(event: Event, served: bool) -> list[_Bar]:
    """What an event shows as."""
    match event:
        case Compute() if served:
            words = f"{event.samples} samples on version {event.version} in {event.seconds * 1e3:.2f} ms"
            return [_Bar("computing", event.start, event.seconds, words, _colour(event.version))]
        case Compute():
            busy = event.seconds - event.slowed
            words = f"{event.samples} samples of version {event.version} in {event.seconds * 1e3:.2f} ms"
            bars = [_Bar("computing", event.start, busy, words, _COLOURS["computing"])]
            if event.slowed > 0:
                kind = "slowed on purpose"
                bars.append(_Bar(kind, event.start + busy, event.slowed, words, _COLOURS[kind]))
            return bars
        case Cancel():
            words = f"after {event.seconds * 1e3:.2f} ms on version {event.version}"
            return [_Bar("cancelled", event.start, event.seconds, words, _colour(event.version), light=True)]
        case Update() | Reduce() | Pull():
            words = f"{event.seconds * 1e3:.2f} ms"
            return [_Bar("updating", event.start, event.seconds, words, "#555555" if served else _COLOURS["updating"])]
        case Wait():
            words = f"{event.seconds * 1e3:.2f} ms for worker {event.on}"
            return [_Bar("waiting", event.start, event.seconds, words, _COLOURS["waiting"])]
    return []


def _colour(version: int) -> str:
    return _VERSIONS[version % len(_VERSIONS)]


def _drawn(x: float, y: float, width: float, bar: _Bar) -> str:
    faint = " fill-opacity='.25' stroke-dasharray='3 2'" if bar.light else ""
    edge = f" stroke='{bar.colour}' stroke-width='.8'" if bar.light else ""
    return (
        f"<rect x='{x:.2f}' y='{y + 1}' width='{width:.2f}' height='{_ROW - 10}' fill='{bar.colour}'{faint}{edge}>"
        f"<title>{escape(bar.kind)}: {escape(bar.note)}</title></rect>"
    )


def _axis(seconds: float, y: int) -> str:
    right = _WIDTH - 16
    return (
        f"<text x='{_LEFT}' y='{y}' class='small'>0</text>"
        f"<text x='{right}' y='{y}' class='small' text-anchor='end'>{seconds * 1e3:.1f} ms</text>"
    )


def _legend(served: bool) -> list[tuple[str, list[str], str]]:
    """Words, the colours of their boxes, and how the boxes are filled."""
    if not served:
        known = [(kind, [colour], "") for kind, colour in _COLOURS.items()]
    else:
        known = [
            ("computing, a colour per version", list(_VERSIONS), ""),
            ("cancelled", [_VERSIONS[0]], " fill-opacity='.25'"),
            ("pushing and pulling", ["#555555"], ""),
            ("waiting", ["#ffffff"], ""),
        ]
    return [*known, ("not training", [_OTHER], "")]


def _frame(title: str, rows: int, shapes: list[str], legend: list[tuple[str, list[str], str]]) -> str:
    height = _TOP + rows * _ROW + 44
    words, x = [], _LEFT
    for kind, colours, style in legend:
        for colour in colours:
            words.append(
                f"<rect x='{x}' y='{height - 20}' width='12' height='12' fill='{colour}'{style} stroke='#bbb'/>"
            )
            x += 12
        words.append(f"<text x='{x + 6}' y='{height - 9}' class='small'>{kind}</text>")
        x += 22 + 7 * len(kind)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height}' width='{_WIDTH}' height='{height}'>"
        "<style>text{font:13px system-ui,sans-serif;fill:#222}.small{font-size:11px;fill:#555}</style>"
        f"<rect width='{_WIDTH}' height='{height}' fill='#ffffff'/>"
        f"<text x='{_LEFT}' y='26' style='font-weight:600;font-size:15px'>{escape(title)}</text>"
        + "".join(shapes)
        + "".join(words)
        + "</svg>"
    )
