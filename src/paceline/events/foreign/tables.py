"""Tables of what ranks did: CSV or Parquet with the columns rank, step, kind, start and end, in seconds."""

from __future__ import annotations

import csv
import importlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import UsageError
from paceline.events import Collective, Compute, Event, Load, Update

KINDS = ("computing", "forward", "backward", "loading", "communicating", "updating")
_COLUMNS = ("rank", "step", "kind", "start", "end")
_ALIKE = {
    **{"compute": "computing", "load": "loading", "data": "loading", "fwd": "forward", "bwd": "backward"},
    **{"communicate": "communicating", "communication": "communicating", "comm": "communicating"},
    **{"all_reduce": "communicating", "allreduce": "communicating", "collective": "communicating"},
    **{"update": "updating", "optimizer": "updating"},
}


class Row(NamedTuple):
    """Something that a rank did; the step is -1 where it is not known."""

    rank: int
    step: int
    kind: str
    start: float
    end: float


def read_table(path: Path, notes: list[str]) -> list[Event]:
    """The events of a table; a row that cannot be read is left out, and said."""
    rows, bad = [], 0
    for one in _parquet(path) if path.suffix == ".parquet" else _csv(path):
        try:
            kind = str(one["kind"]).strip().lower()
            row = Row(
                int(one["rank"]), int(one["step"]), _ALIKE.get(kind, kind), float(one["start"]), float(one["end"])
            )
        except (TypeError, ValueError):
            bad += 1
            continue
        if row.kind not in KINDS or row.end < row.start or row.rank < 0:
            bad += 1
            continue
        rows.append(row)
    if bad:
        noun = "row" if bad == 1 else "rows"
        notes.append(f"{bad:,} {noun} of {path} could not be read (kinds are {', '.join(KINDS)}); the others are shown")
    return rows_to_events(rows)


def rows_to_events(rows: Iterable[Row]) -> list[Event]:
    """Events of rows: a step's last computing is that of its gradient; exchanges of ranks belong together in order."""
    found: list[Event] = []
    by_rank: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_rank[row.rank].append(row)
    for rank, own in by_rank.items():
        own.sort(key=lambda row: row.start)
        found += _of_rank(rank, own)
    return found


def _of_rank(rank: int, rows: Sequence[Row]) -> list[Event]:
    found: list[Event] = []
    steps = [row.step for row in rows]
    ends = [number for number, row in enumerate(rows) if _ends_step(rows, number)]
    version = exchanges = 0
    explicit = any(row.kind == "updating" for row in rows)
    for number, row in enumerate(rows):
        seconds = row.end - row.start
        last = number in ends
        match row.kind:
            case "loading":
                found.append(Load(rank, row.start, seconds))
            case "communicating":
                found.append(Collective(rank, row.start, seconds, row.kind, "table", exchanges, 0, seconds))
                exchanges += 1
            case "updating":
                version += 1
                found.append(Update(rank, row.start, seconds, version))
            case _:
                forward = 0.0 if row.kind == "backward" else seconds
                found.append(Compute(rank, row.start, seconds, version, int(last), 0, 0.0, forward))
        if not explicit and (number + 1 == len(rows) or steps[number + 1] != steps[number]):
            version += 1
            found.append(Update(rank, row.end, 0.0, version))
    return found


def _ends_step(rows: Sequence[Row], number: int) -> bool:
    """True for the last computing of a step: before the step's number changes or, without numbers, before an update."""
    if rows[number].kind in ("loading", "communicating", "updating"):
        return False
    for row in rows[number + 1 :]:
        if row.step != rows[number].step or (row.step < 0 and row.kind == "updating"):
            return True
        if row.kind in ("computing", "forward", "backward"):
            return False
    return True


def _csv(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            _check(path, reader.fieldnames or ())
            return list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None


def _parquet(path: Path) -> list[dict[str, Any]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UsageError(
            f"{path} is a Parquet file, which needs pyarrow: pip install 'paceline[parquet]', or give a CSV"
        ) from None
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    _check(path, table.column_names)
    rows: list[dict[str, Any]] = table.select(list(_COLUMNS)).to_pylist()
    return rows


def _check(path: Path, names: Sequence[str]) -> None:
    missing = [name for name in _COLUMNS if name not in names]
    if missing:
        raise UsageError(f"{path} has no column {missing[0]}; a table has the columns {', '.join(_COLUMNS)}")
