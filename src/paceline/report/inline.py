"""The report of a run in short, for a notebook's cell: its speed, its slow workers, and a part of its timeline."""

from __future__ import annotations

from html import escape
from pathlib import Path

from paceline.events import Event
from paceline.events.reader import Reader
from paceline.report.facts import headline
from paceline.report.source import RunSource, open_run
from paceline.report.timeline import timeline

_INTERVALS = 20_000
"""Intervals that are kept to find a typical part of the run."""
_UPDATES = 8


def inline_report(folder: Path) -> str:
    """HTML that needs no script and no network."""
    source = open_run(folder, _INTERVALS)
    facts = source.facts()
    words = headline(facts)
    if facts["served"]:
        words.append(f"staleness {facts['staleness']['mean']:.2f}")
    words += [f"{name} {value:.4g}" for name, value in facts["last"].items() if value is not None]
    title = f"{facts['strategy']}, {len(facts['workers'])} workers"
    begin, end = (moment + source.run.first for moment in facts["timeline"]["typical"])
    figure = timeline(_around(source, begin, end), title, _UPDATES)
    sentences = [*facts["notes"], *facts["verdict"]]
    return (
        "<div style='max-width:960px;font:13px system-ui,sans-serif'>"
        f"<div><b>{escape(facts['name'])}</b>: {escape(', '.join(words))}</div>"
        f"<div>{escape(' '.join(sentences))}</div>{figure}</div>"
    )


def _around(source: RunSource, begin: float, end: float) -> list[Event]:
    """The events from some time before a span to some time after it: a run may have more than fit into memory."""
    margin = end - begin
    return [
        event
        for path in source.files
        for block in Reader(path).all()
        for event in block
        if event.start < end + margin and event.start + getattr(event, "seconds", 0.0) > begin - margin
    ]
