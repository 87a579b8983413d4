"""The picture that explains a run: a row per worker, time to the right, the gaps where a worker waits left empty."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from paceline.events import Compute, Event, Reduce, Update, Wait

# Okabe and Ito's colours, which stay apart for colour-blind readers.
_COLOURS = {"computing": "#0072B2", "slowed on purpose": "#56B4E9", "updating": "#E69F00", "waiting": "#ffffff"}
_OTHER = "#f0f0f0"
_WIDTH, _ROW, _LEFT, _TOP = 960, 34, 76, 46


def timeline(events: Iterable[Event], title: str, updates: int = 8) -> str:
    """An SVG of some updates in a row that are typical for a run."""
    events = list(events)
    moments = sorted(event.start for event in events if isinstance(event, Update) and event.rank == 0)
    if not moments:
        return _frame(title, 1, ["<text x='20' y='70'>there was no update in this run</text>"])
    begin, end = _window(moments, updates)
    if end <= begin:
        begin, end = min(e.start for e in events), max(e.start + getattr(e, "seconds", 0.0) for e in events)
    ranks = sorted({event.rank for event in events})
    scale = (_WIDTH - _LEFT - 16) / (end - begin)
    shapes: list[str] = []
    for row, rank in enumerate(ranks):
        y = _TOP + row * _ROW
        shapes.append(f"<text x='{_LEFT - 10}' y='{y + 19}' text-anchor='end'>worker {rank}</text>")
        width = _WIDTH - _LEFT - 16
        shapes.append(f"<rect x='{_LEFT}' y='{y}' width='{width}' height='{_ROW - 8}' fill='{_OTHER}' stroke='#ddd'/>")
        for event in events:
            if event.rank == rank:
                for kind, start, seconds, note in _spans(event):
                    first, last = max(begin, start), min(end, start + seconds)
                    if first < last:
                        x, length = _LEFT + (first - begin) * scale, max(0.6, (last - first) * scale)
                        shapes.append(_bar(x, y, length, kind, note))
    for moment in moments:
        if begin <= moment <= end:
            x = _LEFT + (moment - begin) * scale
            bottom = _TOP + len(ranks) * _ROW - 4
            shapes.append(
                f"<line x1='{x:.1f}' y1='{_TOP - 4}' x2='{x:.1f}' y2='{bottom}' stroke='#333' opacity='.35'/>"
            )
    shapes.append(_axis(end - begin, _TOP + len(ranks) * _ROW + 12))
    return _frame(title, len(ranks), shapes)


def _window(moments: list[float], updates: int) -> tuple[float, float]:
    """From when to when: of all stretches of so many updates, the one of middling length."""
    count = min(updates, len(moments) - 1)
    stretches = sorted((moments[i + count] - moments[i], moments[i]) for i in range(len(moments) - count))
    seconds, begin = stretches[len(stretches) // 2]
    return begin, begin + seconds


def _spans(event: Event) -> list[tuple[str, float, float, str]]:
    """What an event shows as: kind, start, seconds, and words for whoever points at it."""
    match event:
        case Compute():
            busy = event.seconds - event.slowed
            words = f"{event.samples} samples of version {event.version} in {event.seconds * 1e3:.2f} ms"
            spans = [("computing", event.start, busy, words)]
            if event.slowed > 0:
                spans.append(("slowed on purpose", event.start + busy, event.slowed, words))
            return spans
        case Update() | Reduce():
            return [("updating", event.start, event.seconds, f"{event.seconds * 1e3:.2f} ms")]
        case Wait():
            return [("waiting", event.start, event.seconds, f"{event.seconds * 1e3:.2f} ms for worker {event.on}")]
    return []


def _bar(x: float, y: float, width: float, kind: str, note: str) -> str:
    return (
        f"<rect x='{x:.2f}' y='{y + 1}' width='{width:.2f}' height='{_ROW - 10}' fill='{_COLOURS[kind]}'>"
        f"<title>{escape(kind)}: {escape(note)}</title></rect>"
    )


def _axis(seconds: float, y: int) -> str:
    right = _WIDTH - 16
    return (
        f"<text x='{_LEFT}' y='{y}' class='small'>0</text>"
        f"<text x='{right}' y='{y}' class='small' text-anchor='end'>{seconds * 1e3:.1f} ms</text>"
    )


def _frame(title: str, rows: int, shapes: list[str]) -> str:
    height = _TOP + rows * _ROW + 44
    legend, x = [], _LEFT
    for kind, colour in {**_COLOURS, "not training": _OTHER}.items():
        legend.append(f"<rect x='{x}' y='{height - 20}' width='12' height='12' fill='{colour}' stroke='#bbb'/>")
        legend.append(f"<text x='{x + 18}' y='{height - 9}' class='small'>{kind}</text>")
        x += 34 + 7 * len(kind)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height}' width='{_WIDTH}' height='{height}'>"
        "<style>text{font:13px system-ui,sans-serif;fill:#222}.small{font-size:11px;fill:#555}</style>"
        f"<rect width='{_WIDTH}' height='{height}' fill='#ffffff'/>"
        f"<text x='{_LEFT}' y='26' style='font-weight:600;font-size:15px'>{escape(title)}</text>"
        + "".join(shapes)
        + "".join(legend)
        + "</svg>"
    )
