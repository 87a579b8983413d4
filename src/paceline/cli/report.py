"""`paceline report`: the course of runs as a web page, in the terminal, or as files for other tools."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from paceline.errors import UsageError
from paceline.events import Event
from paceline.events.exports import write_csv, write_tensorboard, write_trace
from paceline.events.reader import Reader
from paceline.report.page import write_report
from paceline.report.png import find_browser, take_pictures
from paceline.report.source import RunSource, open_run
from paceline.report.text import text_report

_LIMIT = 100_000
"""Intervals drawn on a page, over all its runs."""


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of runs, or their events files.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The path of the page. [default: report.html in the run's folder]"),
    ] = None,
    title: Annotated[str | None, typer.Option(help="The title of the page. [default: the run's name]")] = None,
    names: Annotated[
        list[str] | None, typer.Option("--name", help="A name for each run, in their order. Repeatable.")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Print to the terminal instead of writing a page.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON instead of writing a page.")] = False,
    png: Annotated[
        bool, typer.Option("--png", help="Also write each figure as a PNG (needs chromium or chrome).")
    ] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Also write trace.json, for Perfetto.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Also write csv/, with a file per kind of event.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write tensorboard/, with scalars.")] = False,
) -> None:
    """Show how runs spent their time, which workers were slow, and why.

    Writes one page that needs no network. Several runs are put side by side.

    Example: `paceline report runs/first runs/second --name sync --name async --png`
    """
    if names and len(names) != len(runs):
        raise UsageError(f"there are {len(runs)} runs but {len(names)} names; give one --name for each run, or none")
    if text and json:
        raise UsageError("--text and --json are two ways to print the same; give one of them")
    if output is not None and not output.parent.is_dir():
        raise UsageError(f"--output is {output}, and there is no folder {output.parent}; make it first")
    if png:
        find_browser()
    sources = _read(runs)
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
            with Console(stderr=True).status("drawing"):
                pictures = take_pictures(page, page.with_suffix(""))
            print(f"pictures: {os.path.relpath(page.with_suffix(''))}/ ({len(pictures)} PNG files)", flush=True)
    for source in sources:
        _export(source, trace=trace, csv=csv, tensorboard=tensorboard)


def _read(runs: list[Path]) -> list[RunSource]:
    sources = []
    for number, path in enumerate(runs, start=1):
        if sys.stderr.isatty():
            print(f"paceline: reading {path} ({number} of {len(runs)})", file=sys.stderr)
        sources.append(open_run(path, max(5000, _LIMIT // len(runs))))
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
        write_trace(path, _events(source))
        print(f"trace: {os.path.relpath(path)} (open it in Perfetto or chrome://tracing)", flush=True)
    if csv:
        path = source.folder / "csv"
        files = write_csv(path, _events(source))
        print(f"tables: {os.path.relpath(path)}/ ({len(files)} files)", flush=True)
    if tensorboard:
        path = source.folder / "tensorboard"
        write_tensorboard(path, _events(source))
        print(f"scalars: {os.path.relpath(path)}/ (tensorboard --logdir {os.path.relpath(path)})", flush=True)


def _events(source: RunSource) -> Iterator[Event]:
    for path in source.files:
        for block in Reader(path).all():
            yield from block
