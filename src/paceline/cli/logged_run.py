"""Follows a run, and passes its values to loggers and its metrics to a Pushgateway."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from paceline.events.follower import EventFollower
from paceline.events.scalars import RunScalars, Values
from paceline.loggers import logger_class
from paceline.loggers.delivery import Delivery, finish_all
from paceline.loggers.process import PATIENCE
from paceline.report.push import MetricsPush
from paceline.report.source import RunSource

_INTERVAL = 0.5
"""Seconds between two looks at the records."""
_PUSH_INTERVAL = 5.0
"""Seconds between two pushes of metrics."""
_ORPHANED = 3.0
"""Seconds in which loggers may take the last values if the launcher is gone."""


class LoggedRun:
    """A run whose values go to loggers, and whose metrics are pushed."""

    def __init__(self, path: Path, names: list[str], url: str | None) -> None:
        self._events = EventFollower(path)
        self._scalars = RunScalars()
        folder = self._events.folder.resolve()
        self._again = f"paceline log {os.path.relpath(folder)} --to {','.join(names)}"
        self._deliveries = [Delivery(logger_class(name), folder, _say) for name in names]
        self._configured = False
        self._source = None if url is None else RunSource(path)
        self._push = None if url is None else MetricsPush(url, self._events.name, _say)
        self._next_push = 0.0

    def follow(self, *, until_over: bool) -> None:
        """Pass on everything that is recorded, until the run is over, or was read once."""
        parent = os.getppid()
        while True:
            over, orphaned = self._events.over or not until_over, os.getppid() != parent
            self._read()
            if orphaned or (over and self._events.share == 1.0):
                break
            time.sleep(_INTERVAL if self._events.share == 1.0 else 0.0)
        self._deliver(self._scalars.settle())
        patience = _ORPHANED if orphaned else PATIENCE
        self._push_metrics(last=True)
        ended = finish_all(self._deliveries, patience, _say, self._again)
        if self._push is not None:
            self._push.finish(patience)
        if not ended:
            os._exit(0)  # a package's own clean-up could wait as long

    def _read(self) -> None:
        for events, settled in self._events.follow(1.0):
            if self._source is not None:
                self._source.take([(events, settled)])
            self._deliver(self._scalars.add(events))
            self._deliver(self._scalars.settle(settled))
            if time.monotonic() >= self._next_push:
                self._push_metrics()

    def _deliver(self, values: list[Values]) -> None:
        """Pass on values; first, once, the configuration."""
        if values and not self._configured:
            self._configured = True
            config = self._config()
            for delivery in self._deliveries:
                delivery.configure(config)
        for delivery in self._deliveries:
            delivery.log(values)

    def _config(self) -> dict[str, Any]:
        """Of the run's folder and its events, without what was not given."""
        try:
            known = msgspec.json.decode((self._events.folder / "config.json").read_bytes())
        except (OSError, msgspec.DecodeError):
            known = {}
        known = {name: value for name, value in known.items() if value not in (None, [], False)}
        return {**known, **self._scalars.config}

    def _push_metrics(self, *, last: bool = False) -> None:
        if self._push is None or self._source is None:
            return
        self._next_push = time.monotonic() + _PUSH_INTERVAL
        self._push.push(self._source.facts(pictures=False) | {"over": last}, last=last)


def _say(sentence: str) -> None:
    print(f"paceline: {sentence}", file=sys.stderr, flush=True)
