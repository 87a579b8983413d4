"""Who runs what: where several workers share a stage, they take its microbatches in turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class StageAssignment:
    """The workers of every stage, by their places in the pipeline."""

    workers: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, replicas: Sequence[int], chunks: int = 1) -> StageAssignment:
        """So many workers per stage, one stage after the other; and each has a stage again for each of its chunks."""
        ends = [sum(replicas[: number + 1]) for number in range(len(replicas))]
        once = tuple(tuple(range(end - count, end)) for end, count in zip(ends, replicas, strict=True))
        return cls(once * chunks)

    @property
    def replicas(self) -> tuple[int, ...]:
        """How many workers each stage has."""
        return tuple(map(len, self.workers))

    @property
    def shared(self) -> bool:
        """Whether some stage has several workers."""
        return max(self.replicas) > 1

    def at(self, stage: int, microbatch: int) -> int:
        """The worker that runs a microbatch through a stage."""
        workers = self.workers[stage]
        return workers[microbatch % len(workers)]

    def stages_of(self, worker: int) -> list[int]:
        return [stage for stage, workers in enumerate(self.workers) if worker in workers]

    def peers_of(self, worker: int) -> list[int]:
        """Those with whom a worker shares its stages."""
        known = {peer for workers in self.workers if worker in workers for peer in workers}
        return sorted(known - {worker})
