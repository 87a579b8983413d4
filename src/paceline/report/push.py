"""Pushes the metrics of a run to a Prometheus Pushgateway, for clusters where nothing can reach the run's machine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

JOB = "paceline"
_TIMEOUT = 10.0
"""Seconds for a push."""


class MetricsPush:
    """Pushes the newest facts in a thread, so that a slow gateway holds nothing up."""

    def __init__(self, url: str, run: str, say: Callable[[str], None]) -> None:
        """run: its name, by which the gateway groups metrics."""
        self._url, self._run, self._say = url, run, say
        self._facts: dict[str, Any] | None = None
        self._changed, self._ended, self._said = threading.Event(), False, False
        self._thread = threading.Thread(target=self._work, name="push of metrics", daemon=True)
        self._thread.start()

    def push(self, facts: dict[str, Any], *, last: bool = False) -> None:
        """Push these facts, instead of those that wait to be pushed."""
        self._facts, self._ended = facts, last
        self._changed.set()

    def finish(self, seconds: float) -> None:
        """Wait for the last push, for at most so long."""
        self._thread.join(seconds)

    def _work(self) -> None:
        while not self._ended or self._facts is not None:
            self._changed.wait()
            self._changed.clear()
            facts, self._facts = self._facts, None
            if facts is not None:
                try:
                    self._push(facts)
                except (OSError, ValueError) as error:  # it is tried again with the next facts
                    if not self._said:
                        self._said = True
                        self._say(f"metrics cannot be pushed to {self._url}: {error}; the training goes on")

    def _push(self, facts: dict[str, Any]) -> None:
        from prometheus_client.exposition import push_to_gateway

        from paceline.report.metrics import collector

        push_to_gateway(
            self._url, job=JOB, registry=collector(facts), grouping_key={"run": self._run}, timeout=_TIMEOUT
        )
