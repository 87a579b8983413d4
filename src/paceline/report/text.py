"""The report for the terminal: a timeline in characters, and a table of each worker's time."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.config.units import duration
from paceline.report.facts import headline
from paceline.report.rows import KINDS, ROW, Rows, busy_until, ends
from paceline.report.source import RunSource

_LEFT = 10
_LOOKS = {"computing": "█", "loading": "▒", "communicating": "▄", "updating": "▪", "waiting": "·", "cancelled": "░"}
_COLOURS = ("blue", "yellow", "green", "magenta", "cyan", "red")


def text_report(source: RunSource, facts: dict[str, Any], width: int) -> RenderableType:
    """The report of one run."""
    head = [f"{facts['name']}: {facts['strategy']}, {len(facts['workers'])} workers", *headline(facts)]
    parts: list[RenderableType] = [Text(", ".join(head), style="bold")]
    parts += [Text(note, style="yellow") for note in facts["notes"]]
    parts += [Text(" ".join(facts["verdict"])), *_advice(facts.get("advice") or []), Text("")]
    parts += [_timeline(source, facts["timeline"], min(width, 160)), Text(""), _table(facts)]
    return Group(*parts)


def _advice(advice: list[dict[str, Any]]) -> list[RenderableType]:
    """What would have been quicker, each with the line to run."""
    lines: list[RenderableType] = [Text("What would be quicker, by simulation of this run:")] if advice else []
    for one in advice:
        lines.append(Text(f"· {one['sentence']}"))
        if one["command"]:
            lines.append(Text(f"    {one['command']}", style="dim"))
    return lines


def _timeline(source: RunSource, timeline: dict[str, Any], width: int) -> RenderableType:
    """Some typical updates: a line per worker, a character per interval."""
    if not timeline["pieces"]:
        return Text("nothing was trained on", style="dim")
    begin, end = (moment + source.run.first for moment in timeline["typical"])
    columns = max(20, width - _LEFT - 2)
    edges = np.linspace(begin, end, columns + 1)
    pieces = [piece.rows for piece in source.run.detail.seal()]
    rows: Rows = np.concatenate([np.zeros(0, ROW), *pieces])
    rows = rows[(ends(rows) > begin) & (rows["start"] < end)]
    lines: list[RenderableType] = []
    for lane in timeline["lanes"]:
        rank = lane["rank"]
        name = f"worker {rank}" if rank >= 0 else "server" if rank == -1 else f"server {-rank}"
        lines.append(Text.assemble(f"{name:>{_LEFT - 1}} ", _line(rows[rows["rank"] == rank], edges)))
    length = duration(end - begin)
    lines.append(Text(f"{'':{_LEFT}}0{length:>{columns - 1}}", style="dim"))
    words = "  ".join(f"{look} {kind}" for kind, look in _LOOKS.items())
    lines.append(Text(f"{'':{_LEFT}}{words}; a colour per version", style="dim"))
    return Group(*lines)


def _line(rows: Rows, edges: Any) -> Text:
    shares = np.zeros((len(KINDS), len(edges) - 1))
    for kind in range(len(KINDS)):
        mine = rows[rows["kind"] == kind]
        shares[kind] = np.diff(busy_until(mine["start"], mine["seconds"])(edges))
    middles = (edges[:-1] + edges[1:]) / 2
    index = np.searchsorted(rows["start"], middles, "right") - 1
    line = Text()
    for column, seconds in enumerate(shares.T):
        if seconds.sum() < (edges[1] - edges[0]) * 0.2:
            line.append(" ")
            continue
        most = KINDS[int(np.argmax(seconds))]
        version = int(rows["version"][max(0, index[column])]) if len(rows) else 0
        coloured = _COLOURS[version % len(_COLOURS)] if most in ("computing", "cancelled") else "default"
        line.append(_LOOKS[most], style=coloured)
    return line


def _table(facts: dict[str, Any]) -> Table:
    table = Table(
        title="where the time went, in seconds; own pace per minibatch; seconds that the team waited for it",
        title_justify="left",
        title_style="",
        box=None,
        padding=(0, 1, 0, 0),  # so that it fits into 80 columns
        pad_edge=False,
    )
    table.add_column("worker", no_wrap=True)
    for head in ("compute", "load", "comm.", "update", "wait", "cancel", "other", "pace", "× others", "blamed"):
        table.add_column(head, justify="right", no_wrap=True)
    for worker in facts["workers"]:
        seconds = [f"{worker['seconds'][kind]:.2f}" for kind in (*KINDS, "elsewhere")]
        pace = "–" if worker["pace"] is None else duration(worker["pace"])
        style = "bold" if worker["slow"] else ""
        table.add_row(
            str(worker["rank"]), *seconds, pace, f"{worker['ratio']:.2f}", f"{worker['blame']:.2f}", style=style
        )
    return table
