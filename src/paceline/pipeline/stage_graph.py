"""The stages of a traced model, and which values go from stage to stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from paceline.errors import UsageError
from paceline.graph.trace import ModelPart, ModelTrace
from paceline.pipeline.stage_assignment import StageAssignment


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
