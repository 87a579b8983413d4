"""A table in memory with each worker's hyperparameters and the parameters that its gradient covers."""

from __future__ import annotations

SLOT = 64 * 1024
"""Bytes of one worker's hyperparameters."""


class WorkerTable:
    """Views of the table: one slot of hyperparameters per worker, then one row of flags per worker."""

    def __init__(self, memory: memoryview, workers: int, parameters: int) -> None:
        flags = workers * SLOT
        self.slots = [memory[rank * SLOT : (rank + 1) * SLOT] for rank in range(workers)]
        self.used = [memory[flags + rank * parameters : flags + (rank + 1) * parameters] for rank in range(workers)]
        """Per worker and parameter, 1 if the parameter has a gradient."""

    @staticmethod
    def memory_size(workers: int, parameters: int) -> int:
        return workers * (SLOT + parameters)
