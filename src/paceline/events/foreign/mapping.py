"""A mapping file: what the slices of any trace in Chrome's format are.

    {"rank": "pid", "kinds": {"forward": "^fwd", "backward": "^bwd", "loading": "batch", "communicating": "allreduce",
     "updating": "optim"}}

`rank` is the field that tells the rank (`pid`, `tid`, or a key of `args` as `args.rank`); without it, every file is one
rank, in their order. A kind's pattern is searched in the names of slices. The first that matches counts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import UsageError
from paceline.events import Event
from paceline.events.foreign.tables import KINDS, Row, rows_to_events


class Mapping:
    """Patterns by kind, and where the rank is."""

    def __init__(self, rank: str | None, kinds: dict[str, str]) -> None:
        self._rank = rank
        try:
            self._kinds = [(kind, re.compile(pattern)) for kind, pattern in kinds.items()]
        except re.error as error:
            raise UsageError(f"the mapping has a pattern that is no regular expression: {error}") from None
        unknown = sorted(set(kinds) - set(KINDS))
        if unknown or not kinds:
            raise UsageError(f"the mapping has the kinds {', '.join(unknown) or 'none'}; known are {', '.join(KINDS)}")

    @classmethod
    def read(cls, path: Path) -> Mapping:
        try:
            known = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
            kinds = msgspec.convert(known.get("kinds"), dict[str, str])
        except OSError as error:
            raise UsageError(f"--mapping {path} cannot be read: {error.strerror or error}") from None
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise UsageError(f'--mapping {path} is no mapping, as {{"rank": "pid", "kinds": {{…}}}}: {error}') from None
        rank = known.get("rank")
        return cls(None if rank is None else str(rank), kinds)

    def events(self, trace: dict[str, Any], place: int) -> list[Event]:
        """The events of a trace; place: the rank of a file if the mapping has no field for it."""
        rows = []
        ranks: dict[Any, int] = {}
        for one in trace["traceEvents"]:
            if not isinstance(one, dict) or one.get("ph") != "X":
                continue
            kind = next((kind for kind, pattern in self._kinds if pattern.search(str(one.get("name")))), None)
            if kind is None:
                continue
            value = place if self._rank is None else self._field(one)
            if isinstance(value, str) and value.isdecimal():
                value = int(value)
            rank = value if isinstance(value, int) and self._rank not in ("pid", "tid") else None
            rank = ranks.setdefault(value, len(ranks)) if rank is None else rank
            start = float(one["ts"]) / 1e6
            rows.append(Row(rank, -1, kind, start, start + float(one.get("dur") or 0.0) / 1e6))
        return rows_to_events(rows)

    def _field(self, one: dict[str, Any]) -> Any:
        assert self._rank is not None
        found: Any = one
        for part in self._rank.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if found is None:
            raise UsageError(f"a slice of the trace has no '{self._rank}', in which the mapping says that the rank is")
        return found
