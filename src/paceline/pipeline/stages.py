"""The stages of a split model: the workers of each, and the values that go from stage to stage.

Workers that share a stage take its microbatches in turn. A pipeline rank is the index of a worker within its pipeline,
which is also its rank in the pipeline's mailbox.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from paceline.config import Pipeline
from paceline.errors import UsageError
from paceline.graph.trace import ModelPart, ModelTrace
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


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """One of the stages that this worker runs."""

    index: int
    part: ModelPart
    inputs: tuple[int, ...]
    """Values that it takes; the last stage also takes the model's results that other stages produce."""


@dataclasses.dataclass(frozen=True)
class StageGraph:
    """This worker's stages, and by value the stages that produce and consume it."""

    stages: list[Stage]
    """This worker's chunks, in order."""
    producers: dict[int, int]
    consumers: dict[int, list[int]]
    results: Sequence[int]
    """The values that the model returns."""
    last: int
    """Index of the last stage."""


def stage_graph(trace: ModelTrace, bounds: Sequence[int], own: Iterable[int]) -> StageGraph:
    """bounds: the operation at which each stage ends; own: indices of this worker's stages."""
    last = len(bounds) - 1
    starts = [0, *bounds[:-1]]
    interfaces = [trace.interface(start, end) for start, end in zip(starts, bounds, strict=True)]
    producers = {value: stage for stage, (_, outputs) in enumerate(interfaces) for value in outputs}
    inputs = [list(taken) for taken, _ in interfaces]
    inputs[-1] += [value for value in trace.results if producers[value] != last and value not in inputs[-1]]
    consumers: dict[int, list[int]] = {}
    for stage, values in enumerate(inputs):
        for value in values:
            consumers.setdefault(value, []).append(stage)
    stages = [Stage(stage, trace.part(starts[stage], bounds[stage]), tuple(inputs[stage])) for stage in sorted(own)]
    return StageGraph(stages, producers, consumers, trace.results, last)


def check_buffers(trace: ModelTrace, bounds: Sequence[int], assignment: StageAssignment) -> None:
    """Refuses a shared stage that changes buffers: its workers would end up with different ones."""
    for stage, (start, end) in enumerate(zip([0, *bounds[:-1]], bounds, strict=True)):
        workers = assignment.counts[stage]
        if workers > 1 and trace.changes_buffers(start, end):
            raise UsageError(
                f"stage {stage} has {workers} workers, and its part of the model may change buffers with every "
                "microbatch, as batch norm does, so that the workers would disagree on them; give the stage one "
                "worker, or no such layers"
            )
