"""Draws runs below each other on one time scale, and plays them: what each does in the same seconds.

The picture is an SVG whose style sheet moves it. Where that is not shown, or the reader wants no motion, it is the same
picture at its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from paceline.events import Compute, Event, Push, Update
from paceline.report.lanes import EXCHANGE, ROW, Scale, bars, drawn, lane, moments_of
from paceline.report.svg import COLOURS, LEFT, WIDTH, document

_RIGHT = 150
"""Pixels right of the rows, for the counters."""
_TOP, _HEAD, _GAP = 44, 26, 18
"""Pixels above the first run, for a run's title, and below its rows."""
_PLAY, _PAUSE = 9.0, 5.0
"""Seconds that the rows take to fill, and that the whole picture stays; it begins with the latter."""
_LINE = 40
"""The height of a counter's line, in pixels."""


class Runner(NamedTuple):
    """One of the runs."""

    title: str
    events: list[Event]


def race(title: str, runners: Sequence[Runner], seconds: float) -> str:
    """An SVG of so many typical seconds of each run, from an update on."""
    shapes, styles, y = [], [_STYLE], _TOP
    for number, runner in enumerate(runners):
        drawing, style, height = _panel(runner, number, y, seconds)
        shapes.append(drawing)
        styles.append(style)
        y += height + _GAP
    width = WIDTH - LEFT - _RIGHT
    axis = f"y='{y - 4}' class='small'"
    for part in range(5):
        anchor = "start" if part == 0 else "end" if part == 4 else "middle"
        shapes.append(
            f"<text x='{LEFT + width * part / 4:.1f}' {axis} text-anchor='{anchor}'>{seconds * part / 4:.2g} s</text>"
        )
    return document(title, y + 34, [*shapes, *_legend(y + 12)], "".join(styles))


def _panel(runner: Runner, number: int, top: int, seconds: float) -> tuple[str, str, int]:
    """The shapes of a run, their style, and their height."""
    events = runner.events
    served = any(isinstance(event, Push) for event in events)
    moments = moments_of(events, served)
    begin = _typical(events, moments, seconds)
    ranks = sorted({event.rank for event in events if event.rank >= 0})
    scale = Scale(begin, begin + seconds, {rank: top + _HEAD + row * ROW for row, rank in enumerate(ranks)}, _RIGHT)
    shapes = [f"<text x='{LEFT}' y='{top + 16}' class='run'>{escape(runner.title)}</text>"]
    shapes += [lane(scale, rank) for rank in ranks]
    for event in events:
        if event.rank in scale.rows:
            shapes += [drawn(scale, event.rank, bar) for bar in bars(event, served=True)]
    bottom = top + _HEAD + len(ranks) * ROW - 8
    inside = [moment for moment in moments if scale.shows(moment) and moment > begin]
    for moment in inside:
        x = scale.x(moment)
        shapes.append(f"<line x1='{x:.1f}' y1='{top + _HEAD - 3}' x2='{x:.1f}' y2='{bottom + 3}' class='update'/>")
    box = f"y='{top + _HEAD - 4}' height='{bottom - top - _HEAD + 8}'"
    shapes.append(f"<rect class='cover' x='{LEFT - 1}' width='{scale.width + 2}' {box}/>")
    shapes.append(f"<rect class='now' x='{LEFT - 1}' width='2' {box}/>")
    samples = _samples(events, served)
    counted = list(itertools.accumulate(samples[moment] for moment in inside))
    left, middle = WIDTH - _RIGHT + 14, (top + _HEAD + bottom) // 2
    for row, (values, unit) in enumerate(((list(range(1, len(inside) + 1)), "updates"), (counted, "samples"))):
        name = f"c{number}{row}"
        place = middle - _LINE - 4 + row * (_LINE + 8)
        shapes.append(_counter(name, [0, *values], unit, left, place))
    times = [(moment - begin) / seconds for moment in inside]
    style = "".join(_steps(f"c{number}{row}", times) for row in range(2))
    return "".join(shapes), style, bottom - top


def _typical(events: list[Event], moments: list[float], seconds: float) -> float:
    """An update from which on the run makes as many updates as it mostly does in so many seconds.

    It is one of the quarter of all stretches in which workers do least besides training, such as to evaluate.
    """
    starts = [moment for moment in moments if moment + seconds <= moments[-1]]
    if not starts:
        raise ValueError(f"the run has no {seconds:g} seconds between two updates")
    spans = np.array([(bar.start, bar.start + bar.seconds) for event in events for bar in bars(event, served=True)])
    trained = [
        np.clip(np.minimum(spans[:, 1], start + seconds) - np.maximum(spans[:, 0], start), 0, None).sum()
        for start in starts
    ]
    usual = [start for start, share in zip(starts, trained, strict=True) if share >= np.quantile(trained, 0.75)]
    counts = sorted((sum(start < moment <= start + seconds for moment in moments), start) for start in usual)
    return counts[len(counts) // 2][1]


def _samples(events: list[Event], served: bool) -> dict[float, int]:
    """The samples of each update, by the moment at which its version was published."""
    updates = [event for event in events if isinstance(event, Update) and (event.rank == -1) == served]
    if served:
        pushed = {event.ticket: event.samples for event in events if isinstance(event, Push)}
        return {one.start + one.seconds: sum(pushed[ticket] for ticket in one.pushes) for one in updates}
    computed: dict[int, int] = {}
    for event in events:
        if isinstance(event, Compute):
            computed[event.version] = computed.get(event.version, 0) + event.samples
    first = {one.version: one.start for one in sorted(updates, key=lambda one: one.rank, reverse=True)}
    return {start: computed.get(version - 1, 0) for version, start in first.items()}


def _counter(name: str, values: list[int], unit: str, x: int, y: int) -> str:
    """A number that changes: a column of numbers behind a window of one line. Its place at rest shows the last one."""
    column = "".join(
        f"<text x='{x}' y='{y + 26 + line * _LINE}' class='count'>{value:,}</text>" for line, value in enumerate(values)
    )
    return (
        f"<clipPath id='{name}w'><rect x='{x}' y='{y}' width='{_RIGHT}' height='{_LINE - 12}'/></clipPath>"
        f"<g clip-path='url(#{name}w)'><g class='{name}'>{column}</g></g>"
        f"<text x='{x}' y='{y + 40}' class='small'>{unit}</text>"
    )


def _steps(name: str, times: list[float]) -> str:
    """The style of a counter that moves up by a line at each of these times, shares of the whole."""
    frames = [(0.0, 0)] + [(_PLAY / (_PLAY + _PAUSE) * time, line) for line, time in enumerate(times, start=1)]
    moves = "".join(f"{share:.3%}{{transform:translateY({-line * _LINE}px)}}" for share, line in frames)
    last = f"transform:translateY({-len(times) * _LINE}px)"
    return (
        f".{name}{{{last};animation:{name} {_PLAY + _PAUSE:g}s step-end {-_PLAY:g}s infinite}}"
        f"@keyframes {name}{{{moves}to{{{last}}}}}"
    )


def _legend(y: int) -> list[str]:
    known = [
        ("computing, a colour per version", list(COLOURS), ""),
        ("cancelled", [COLOURS[0]], " fill-opacity='.25'"),
        ("exchanging, updating", [EXCHANGE], ""),
        ("waiting", ["#ffffff"], ""),
    ]
    shapes, x = [], LEFT
    for words, colours, style in known:
        for colour in colours:
            shapes.append(f"<rect x='{x}' y='{y}' width='12' height='12' fill='{colour}'{style} stroke='#bbb'/>")
            x += 12
        shapes.append(f"<text x='{x + 6}' y='{y + 11}' class='small'>{words}</text>")
        x += 24 + 6 * len(words)
    return shapes


_SHARE = _PLAY / (_PLAY + _PAUSE)
_STYLE = (
    ".run{font-weight:600}.count{font-size:26px;font-weight:700}"
    ".update{stroke:#222;opacity:.45}.now{fill:#222;opacity:0}"
    ".cover{fill:#fff;transform:scaleX(0);transform-box:fill-box;transform-origin:right}"
    f".cover,.now{{animation:cover {_PLAY + _PAUSE:g}s linear {-_PLAY:g}s infinite}}.now{{animation-name:now}}"
    f"@keyframes cover{{0%{{transform:scaleX(1)}}{_SHARE:.3%}{{transform:scaleX(0)}}to{{transform:scaleX(0)}}}}"
    f"@keyframes now{{0%{{opacity:.8;transform:translateX(0)}}{_SHARE:.3%}{{opacity:.8;transform:translateX("
    f"{WIDTH - LEFT - _RIGHT}px)}}{_SHARE + 0.001:.3%}{{opacity:0}}to{{opacity:0}}}}"
    "@media(prefers-reduced-motion:reduce){*{animation:none!important}}"
)
