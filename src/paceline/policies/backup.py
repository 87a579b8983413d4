"""Backup workers (Chen et al. 2016, 'Revisiting Distributed Synchronous SGD')."""

from __future__ import annotations

from paceline.errors import UsageError
from paceline.policies.synchronous import WorkersOfThisVersion


class Backup(WorkersOfThisVersion):
    """The server updates once all but `b` workers have pushed: K-sync with K = P - b, for any number P of workers."""

    spec = "backup"
    b: int

    def begin(self) -> None:
        workers = len(self.workers)
        if isinstance(self.b, bool) or not isinstance(self.b, int) or not 0 <= self.b < workers:
            raise UsageError(
                f"b is {self.b!r}, with {workers} workers; it must be a whole number from 0 to {workers - 1}"
            )
        self.k = workers - self.b
