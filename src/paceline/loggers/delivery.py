"""Delivers values to loggers, each in a thread of its own, so that a slow or broken one holds nothing up."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.events.scalars import Values
from paceline.loggers.base import Logger

_NOTICE = 5.0
"""Seconds at the end of a run after which it is said which logger is waited for."""
_MOST = 2000
"""Values that a logger is given at once."""


class Delivery:
    """Delivers to one logger, until it fails."""

    def __init__(self, kind: type[Logger], folder: Path, say: Callable[[str], None]) -> None:
        self.name, self._kind, self._folder, self._say = kind.NAME, kind, folder, say
        self._waiting: queue.SimpleQueue[dict[str, Any] | list[Values] | None] = queue.SimpleQueue()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name=f"logger {self.name}", daemon=True)
        self._thread.start()

    def configure(self, config: dict[str, Any]) -> None:
        self._put(config)

    def log(self, values: list[Values]) -> None:
        if values:
            self._put(values)

    def _put(self, item: dict[str, Any] | list[Values]) -> None:
        if not self._failed:
            self._waiting.put(item)

    def _run(self) -> None:
        try:
            logger = self._kind(self._folder)
            while (item := self._waiting.get()) is not None:
                if isinstance(item, dict):
                    logger.configure(item)
                    continue
                for first in range(0, len(item), _MOST):
                    logger.log(item[first : first + _MOST])
            logger.close()
        except BaseException as error:
            self._failed = True
            why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self._say(f"logging to {self.name} stops: {why}; the training goes on, and the run's events stay")

    def end(self) -> None:
        """There are no more values."""
        self._waiting.put(None)

    def finish(self, seconds: float) -> bool:
        """Wait until all values have arrived; returns False if they have not within so many seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()


def finish_all(deliveries: Sequence[Delivery], patience: float, say: Callable[[str], None], again: str) -> bool:
    """Ends deliveries, and waits for them; returns True if all have ended.

    patience: seconds to wait; again: how the run can be logged once more.
    """
    for delivery in deliveries:
        delivery.end()
    until, notice = time.monotonic() + patience, time.monotonic() + min(_NOTICE, patience)
    for delivery in deliveries:
        if delivery.finish(max(0.0, notice - time.monotonic())):
            continue
        if patience > _NOTICE:
            say(f"waiting for {delivery.name} to take the last values")
        if not delivery.finish(max(0.0, until - time.monotonic())):
            say(f"{delivery.name} did not take all values within {patience:g} s; to log them again: {again}")
    return all(delivery.finish(0.0) for delivery in deliveries)
