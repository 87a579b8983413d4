"""`paceline doctor`: checks this machine or a cluster, and prints what to change."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import paceline.doctor
from paceline.cli import panels
from paceline.cli.engines import ON_METAVAR
from paceline.cli.status import StatusLine
from paceline.cluster.engines import find_engine
from paceline.cluster.engines.base import EngineCallbacks, Job
from paceline.cluster.supervision import ExitStatus, Interrupted
from paceline.config import Launch, Place, Timeouts
from paceline.doctor.findings import Diagnosis, Finding, LinkFindings
from paceline.errors import TeamError, UsageError

_MEMBER = Path(paceline.doctor.__file__).with_name("member.py")
_WIDTH = 160
_COLOURS = {"ok": "green", "works with limits": "yellow", "cannot": "red"}


def doctor(
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-w",
            help="Number of workers to start, to measure the links between them. [default: 1; 2 in a cluster]",
            rich_help_panel=panels.WORKERS,
        ),
    ] = None,
    on: Annotated[
        str,
        typer.Option(
            metavar=ON_METAVAR,
            help="Where to start them; in a cluster they are spread over its nodes.",
            rich_help_panel=panels.ENGINES,
        ),
    ] = "local",
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.", rich_help_panel=panels.OUTPUT)
    ] = False,
) -> None:
    """Check this machine, or every machine of a cluster and the links between them, and print what to change.

    Under torchrun (`torchrun … -m paceline doctor`) the machines of its workers are checked. Exit code 0 if all that is
    needed works, perhaps with limits; 1 if something cannot.

    Example: `paceline doctor --workers 4`
    """
    if workers is not None and workers < 1:
        raise UsageError(f"--workers is {workers}; it must be at least 1")
    place = Place.from_environment()
    if place.world_size > 1 or (not find_engine(on).SEVERAL_MACHINES and (workers or 1) == 1):
        # Not above: it imports torch, which neither help nor the doctor of a cluster needs here.
        from paceline.doctor.member import diagnose

        with StatusLine("checking this machine") if place.rank == 0 else contextlib.nullcontext() as status:
            diagnosis = diagnose(place, status.show if status is not None else lambda _words: None)
    else:
        diagnosis = _on_workers(on, workers or 2)
    if diagnosis is None:  # the lead prints it
        raise typer.Exit(0)
    if json:
        told = {"verdict": diagnosis.verdict, **msgspec.to_builtins(diagnosis)}
        print(msgspec.json.format(msgspec.json.encode(told)).decode())
    else:
        _show(diagnosis)
    raise typer.Exit(1 if diagnosis.verdict == "cannot" else 0)


def _on_workers(on: str, workers: int) -> Diagnosis:
    """The diagnosis of workers that are started as those of a run."""
    printed: list[bytes] = []
    status = StatusLine(f"starting {workers} workers")

    def output(rank: int, stream: str, line: bytes) -> None:
        if rank == 0 and stream == "stdout":
            if line.startswith(b"{"):
                printed.append(line)
            else:
                status.show(line.decode(errors="replace"))

    with tempfile.TemporaryDirectory(prefix="paceline-doctor-") as folder, status:
        launch = Launch(folder=folder, record=False, timeouts=Timeouts(join=180.0))
        engine = find_engine(on)(Job(script=_MEMBER, workers=workers, on=on))
        try:
            statuses = engine.run(launch, EngineCallbacks(output=output))
        except Interrupted as stop:
            raise typer.Exit(128 + stop.number) from None
    failed = [status for status in statuses if status.failed]
    if failed or not printed:
        raise TeamError(f"the workers did not finish: {_reason(failed)}")
    return msgspec.json.decode(printed[-1], type=Diagnosis)


def _reason(failed: list[ExitStatus]) -> str:
    for status in failed:
        if status.exit_report is not None:
            return f"rank {status.rank}: {status.exit_report.message}"
    return failed[0].description if failed else "rank 0 printed nothing"


# -- for people ------------------------------------------------------------------------------------------------------


def _show(diagnosis: Diagnosis) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH  # a file gets whole lines
    several = len(diagnosis.machines) > 1
    for machine in diagnosis.machines:
        if several:
            console.print(f"[bold]{machine.host}[/]")
        _table(console, machine.findings)
    if diagnosis.links is not None:
        _table(console, diagnosis.links.findings)
        _matrix(console, "latency from row to column, µs", diagnosis.links, diagnosis.links.latency, 1e6)
        _matrix(console, "bandwidth from row to column, MB/s", diagnosis.links, diagnosis.links.bandwidth, 1e-6)
    words = {
        "ok": "all is well",
        "works with limits": "it works, with limits",
        "cannot": "something that a run needs does not work",
    }
    console.print(f"[{_COLOURS[diagnosis.verdict]}]{words[diagnosis.verdict]}[/]")


def _table(console: Console, findings: list[Finding]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for column in range(3):
        table.add_column(no_wrap=column < 2, overflow="fold")
    for finding in findings:
        table.add_row(finding.what, f"[{_COLOURS[finding.verdict]}]{finding.verdict}[/]", Text(finding.found))
        if finding.change:
            table.add_row("", "[dim]to change[/]", Text(finding.change))
    console.print(table)


def _matrix(console: Console, title: str, links: LinkFindings, values: list[list[float | None]], factor: float) -> None:
    console.print(f"[italic]{title}[/]")
    table = Table(box=None, padding=(0, 1, 0, 1))
    table.add_column("")
    for rank in range(len(values)):
        table.add_column(str(rank), justify="right")
    for rank, row in enumerate(values):
        cells = ["–" if value is None else f"{value * factor:,.0f}" for value in row]
        table.add_row(f"{rank} {links.hosts[rank]}", *cells)
    console.print(table)
