"""One page that compares runs: a table of what came out, and a timeline for each."""

from __future__ import annotations

from html import escape
from pathlib import Path

import msgspec

from paceline.events.schema import read
from paceline.events.summary import Summary
from paceline.report.timeline import timeline

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.3rem .9rem;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto;margin:1rem 0}
"""

HEADS = ("run", "samples/s", "ms per update", "computing", "waiting", "accuracy")


def row(name: str, summary: Summary) -> list[str]:
    """What a table says of one run, under `HEADS`."""
    computing = sum(worker.computing for worker in summary.workers.values())
    waiting = sum(worker.waiting for worker in summary.workers.values())
    updating = sum(worker.communicating for worker in summary.workers.values())
    whole = (computing + waiting + updating) or 1.0
    accuracy = summary.last.get("accuracy")
    return [
        name,
        f"{summary.samples_per_second:,.0f}" if summary.samples_per_second else "–",
        f"{summary.seconds_per_update * 1e3:.1f}" if summary.seconds_per_update else "–",
        f"{computing / whole:.0%}",
        f"{waiting / whole:.0%}",
        f"{accuracy:.1%}" if accuracy is not None else "–",
    ]


def write_page(path: Path, title: str, runs: dict[str, Path]) -> None:
    """Write the page for these runs, each named, and each one's timeline beside its events."""
    rows, figures = [], []
    for name, folder in runs.items():
        summary = msgspec.json.decode((folder / "summary.json").read_bytes(), type=Summary)
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row(name, summary))
        rows.append(f"<tr>{cells}</tr>")
        figure = timeline(read(folder / "events.jsonl"), name)
        (folder / "timeline.svg").write_text(figure)
        figures.append(figure)
    heads = "".join(f"<th>{head}</th>" for head in HEADS)
    path.write_text(
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{escape(title)}</h1><table><tr>{heads}</tr>{''.join(rows)}</table>{''.join(figures)}</html>"
    )
