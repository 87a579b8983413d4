"""Reads a run for a report, from its folder or from a file of events."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import UsageError
from paceline.events.follower import Block, EventFollower
from paceline.report.aggregate import RunAggregate
from paceline.report.facts import facts


class RunSource:
    """A run that is read at once with `read`, or while it goes on with `follow`."""

    def __init__(self, path: Path, limit: int = 100_000) -> None:
        """limit: single intervals to keep for the zoomed timeline."""
        self._follower = EventFollower(path)
        self.folder, self.name = self._follower.folder, self._follower.name
        self.run = RunAggregate(limit)

    @property
    def files(self) -> list[Path]:
        return self._follower.files

    @property
    def going(self) -> bool:
        """True if events are still written, or the run was killed before they were merged."""
        return self._follower.going

    @property
    def over(self) -> bool:
        """True if the run has ended, and not only not begun."""
        return self._follower.over

    @property
    def share(self) -> float:
        """The share of the recorded bytes that is read."""
        return self._follower.share

    def read(self, tick: Callable[[], None] = lambda: None) -> None:
        """Reads all recorded events; `tick` is called after each block of them."""
        for block in self._follower.read():
            self.take([block])
            tick()

    def follow(self, seconds: float = math.inf) -> None:
        """Reads new events of all streams evenly, for at most `seconds`."""
        self.take(self._follower.follow(seconds))

    def take(self, blocks: Iterable[Block]) -> None:
        """Adds events that were read."""
        for events, settled in blocks:
            self.run.feed(events)
            if settled > -math.inf:
                self.run.advance(settled)

    @property
    def notes(self) -> list[str]:
        """A sentence per file that could not be read completely."""
        return self._follower.notes

    def config(self) -> dict[str, Any]:
        try:
            known = msgspec.json.decode((self.folder / "config.json").read_bytes())
        except (OSError, msgspec.DecodeError):
            return {}
        return known if isinstance(known, dict) else {}

    def facts(self, *, name: str | None = None, pictures: bool = True, **more: Any) -> dict[str, Any]:
        return facts(
            self.run, name=name or self.name, config=self.config(), notes=self.notes, pictures=pictures, **more
        )


def open_run(path: Path, limit: int = 100_000, tick: Callable[[], None] = lambda: None) -> RunSource:
    """A run with all its events read; an error if there are none. `tick` is called now and then while it reads."""
    source = RunSource(path, limit)
    source.read(tick)
    if not source.run.tallies:
        raise UsageError(source.notes[0] if source.notes else f"{path} has no events: nothing was recorded")
    return source
