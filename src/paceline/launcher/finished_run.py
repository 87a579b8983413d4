"""A run that is over, as a Python value."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from html import escape
from pathlib import Path

import msgspec

from paceline.errors import UsageError
from paceline.events import Event, read
from paceline.events.summary import Summary


class Run:
    """A finished run, read from its folder; in a notebook it shows itself as a short report."""

    def __init__(self, folder: str | Path) -> None:
        """folder: such as `runs/first`, of `paceline.launch` or of `paceline run`."""
        self.folder = Path(folder).resolve()
        if not (self.folder / "summary.json").is_file():
            raise UsageError(f"{folder} is not the folder of a finished run: it has no summary.json")

    @cached_property
    def summary(self) -> Summary:
        """The numbers of `summary.json`: `summary.samples_per_second`, `summary.staleness.mean`, …"""
        return msgspec.json.decode((self.folder / "summary.json").read_bytes(), type=Summary)

    def events(self) -> Iterator[Event]:
        """All events, in the order of time."""
        return read(self.folder / "events.jsonl")

    def timeline(
        self, title: str | None = None, updates: int = 8, *, staleness: bool = False, whole: bool = False
    ) -> str:
        """An SVG of some successive updates that are typical for the run, or of the whole; a notebook draws it.

        staleness: draw each push's staleness.
        """
        from paceline.report import timeline  # imports much, and only pictures need it

        return timeline(self.events(), title or self.folder.name, updates, staleness=staleness, whole=whole)

    def report(self, path: str | Path | None = None) -> Path:
        """Write the page of `paceline report`, by default as `report.html` in the run's folder; returns its path."""
        from paceline.report.page import write_report
        from paceline.report.source import open_run

        page = self.folder / "report.html" if path is None else Path(path)
        source = open_run(self.folder)
        write_report(page, source.name, [source.facts()])
        return page

    def _repr_html_(self) -> str:
        from paceline.report.inline import inline_report

        try:
            return inline_report(self.folder)
        except UsageError as error:
            return f"<div>{escape(str(error))}</div>"

    def __repr__(self) -> str:
        found, where = self.summary, os.path.relpath(self.folder)
        rate = f", {found.samples_per_second:,.0f} samples/s" if found.samples_per_second else ""
        return f"<Run {where}: {found.strategy}, {found.world_size} workers, {found.updates} updates{rate}>"
