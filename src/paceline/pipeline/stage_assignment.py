"""Assignment of a pipeline's workers to its stages. Workers that share a stage take its microbatches in turn.

A pipeline rank is the index of a worker within its pipeline, which is also its rank in the pipeline's mailbox.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paceline.config import Pipeline
from paceline.schedules import SCHEDULES


@dataclasses.dataclass(frozen=True)
class StageAssignment:
    """The pipeline ranks of every stage's workers."""

    workers: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, counts: Sequence[int], chunks: int = 1) -> StageAssignment:
        """Assigns ranks to stages in order, `counts[stage]` to each, and repeats that for every chunk of the model."""
        ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
        once = tuple(tuple(range(end - count, end)) for end, count in zip(ends, counts, strict=True))
        return cls(once * chunks)

    @classmethod
    def from_spec(cls, spec: Pipeline) -> StageAssignment:
        return cls.of(spec.by_stage, spec.chunks if SCHEDULES[spec.schedule].has_chunks else 1)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of workers of each stage."""
        return tuple(map(len, self.workers))

    @property
    def shared(self) -> bool:
        """True if some stage has several workers."""
        return max(self.counts) > 1

    def worker(self, stage: int, microbatch: int) -> int:
        """The worker that runs a microbatch through a stage."""
        workers = self.workers[stage]
        return workers[microbatch % len(workers)]

    def stages_of(self, worker: int) -> list[int]:
        return [stage for stage, workers in enumerate(self.workers) if worker in workers]

    def peers_of(self, worker: int) -> list[int]:
        """The other workers of a worker's stages."""
        known = {peer for workers in self.workers if worker in workers for peer in workers}
        return sorted(known - {worker})
