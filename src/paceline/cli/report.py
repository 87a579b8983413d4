"""`paceline report`: the course of runs as a web page, in the terminal, or as files for other tools."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from paceline.cli import panels
from paceline.cli.status import StatusLine
from paceline.cli.traces import GivenRun, given_runs
from paceline.errors import UsageError
from paceline.events import Event
from paceline.events.exports import write_csv, write_trace
from paceline.events.foreign.traces import is_foreign
from paceline.events.reader import Reader
from paceline.loggers.tensorboard import write_tensorboard
from paceline.report.page import write_report
from paceline.report.png import find_browser, take_pictures
from paceline.report.source import RunSource, open_run
from paceline.report.text import text_report

_LIMIT = 30_000
"""Intervals drawn on a page, over all its runs."""


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Folders of runs, or their events files; or traces of other programs, one file per rank: of torch's "
            "profiler, in Chrome's format (--mapping), or tables (CSV, Parquet).",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The path of the page. [default: report.html in the run's folder]",
            rich_help_panel=panels.OUTPUT,
        ),
    ] = None,
    title: Annotated[
        str | None, typer.Option(help="The title of the page. [default: the run's name]", rich_help_panel=panels.OUTPUT)
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option("--name", help="A name for each run, in their order. Repeatable.", rich_help_panel=panels.OUTPUT),
    ] = None,
    mapping: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What the slices of a trace in Chrome's format are, as JSON.",
            rich_help_panel=panels.OUTPUT,
        ),
    ] = None,
    text: Annotated[
        bool,
        typer.Option("--text", help="Print to the terminal instead of writing a page.", rich_help_panel=panels.OUTPUT),
    ] = False,
    json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the numbers as JSON instead of writing a page.", rich_help_panel=panels.OUTPUT
        ),
    ] = False,
    png: Annotated[
        bool,
        typer.Option(
            "--png", help="Also write each figure as a PNG (needs chromium or chrome).", rich_help_panel=panels.EXPORTS
        ),
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Also write trace.json, for Perfetto.", rich_help_panel=panels.EXPORTS)
    ] = False,
    csv: Annotated[
        bool,
        typer.Option("--csv", help="Also write csv/, with a file per kind of event.", rich_help_panel=panels.EXPORTS),
    ] = False,
    tensorboard: Annotated[
        bool,
        typer.Option("--tensorboard", help="Also write tensorboard/, with scalars.", rich_help_panel=panels.EXPORTS),
    ] = False,
) -> None:
    """Show how runs spent their time, which workers were slow, and why.

    Writes one page that needs no network. Several runs are put side by side.

    Example: `paceline report runs/first runs/second --name sync --name async --png`
    """
    if names and len(names) != len(runs) and not any(map(is_foreign, runs)):
        raise UsageError(f"there are {len(runs)} runs but {len(names)} names; give one --name for each run, or none")
    if text and json:
        raise UsageError("--text and --json are two ways to print the same; give one of them")
    if output is not None and not output.parent.is_dir():
        raise UsageError(f"--output is {output}, and there is no folder {output.parent}; make it first")
    if png:
        find_browser()
    sources = _read(given_runs(runs, mapping))
    if names and len(names) != len(sources):
        raise UsageError(f"there are {len(sources)} runs but {len(names)} names; give one --name for each run, or none")
    titles = names or _titles(sources)
    facts = [source.facts(name=name, pictures=not json) for source, name in zip(sources, titles, strict=True)]
    if text:
        console = Console(highlight=False)
        for source, known in zip(sources, facts, strict=True):
            console.print(text_report(source, known, console.width))
    elif json:
        print(msgspec.json.format(msgspec.json.encode(facts[0] if len(facts) == 1 else facts), indent=2).decode())
    else:
        page = output or _place(sources)
        write_report(page, title or (titles[0] if len(titles) == 1 else "Paceline: runs compared"), facts)
        print(f"report: {os.path.relpath(page)}", flush=True)
        if png:
            with StatusLine("drawing the figures"):
                pictures = take_pictures(page, page.with_suffix(""))
            print(f"figures: {os.path.relpath(page.with_suffix(''))}/ ({len(pictures)} PNG files)", flush=True)
    for source in sources:
        _export(source, trace=trace, csv=csv, tensorboard=tensorboard)


def _read(runs: list[GivenRun]) -> list[RunSource]:
    sources = []
    for number, (path, place, _) in enumerate(runs, start=1):
        words = f"reading {path} ({number} of {len(runs)})"
        with StatusLine(words, at_once=False) as status:
            tick = functools.partial(status.show, words)
            sources.append(open_run(path, max(5000, _LIMIT // len(runs)), tick))
        if place is not None:
            sources[-1].folder = place
        for note in sources[-1].notes:
            print(f"paceline: {note}", file=sys.stderr)
    return sources


def _titles(sources: list[RunSource]) -> list[str]:
    """The runs' own names, or their folders where names are equal."""
    names = [source.name for source in sources]
    return [name if names.count(name) == 1 else str(source.folder) for name, source in zip(names, sources, strict=True)]


def _place(sources: list[RunSource]) -> Path:
    if len(sources) == 1:
        return sources[0].folder / "report.html"
    return Path(os.path.commonpath([source.folder.resolve() for source in sources])) / "report.html"


def _export(source: RunSource, *, trace: bool, csv: bool, tensorboard: bool) -> None:
    if trace:
        path = source.folder / "trace.json"
        write_trace(path, _events(source, path))
        print(f"trace: {os.path.relpath(path)} (open it in Perfetto or chrome://tracing)", flush=True)
    if csv:
        path = source.folder / "csv"
        files = write_csv(path, _events(source, path))
        print(f"tables: {os.path.relpath(path)}/ ({len(files)} files)", flush=True)
    if tensorboard:
        path = source.folder / "tensorboard"
        write_tensorboard(source.folder, _events(source, path))
        print(f"scalars: {os.path.relpath(path)}/ (tensorboard --logdir {os.path.relpath(path)})", flush=True)


def _events(source: RunSource, target: Path) -> Iterator[Event]:
    """The run's events, while a status line says where they are written."""
    words = f"writing {os.path.relpath(target)}"
    with StatusLine(words, at_once=False) as status:
        for path in source.files:
            for block in Reader(path).all():
                yield from block
                status.show(words)
