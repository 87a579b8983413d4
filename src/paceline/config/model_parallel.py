"""Strategies that split the model over workers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.config.checks import listed, positive
from paceline.config.strategy import AllReduce, Strategy, parse_strategy
from paceline.errors import UsageError
from paceline.schedules import SCHEDULES, shareable

NORMS = ("batch", "microbatch")
OFFLOADS = ("none", "disk")


class Pipeline(Strategy):
    """The model is cut between its layers; microbatches of every batch follow each other through the stages."""

    spec = "pipeline"
    stages: int
    """Parts of the model, one after the other."""
    microbatches: int = 8
    """Parts into which every batch is cut, one after the other."""
    schedule: str = "1f1b"
    """The order of the passes: gpipe, 1f1b, interleaved, zero-bubble or zero-bubble-2p."""
    chunks: int = 2
    """Parts of the model on each device, where the schedule is interleaved."""
    norm: str = "batch"
    """What batch norm layers take statistics of; a `batch` is then not cut into microbatches."""
    workers: str = ""
    """Workers of each stage, as in `1+2`: those of one stage share its microbatches. One each if not given."""
    recompute: bool = False
    """True if a stage keeps only its inputs, and computes its forward pass again before each backward pass."""
    offload: str = "none"
    """`disk`: the optimizer's state is in a file, not in memory, where stages are on several machines."""
    order: str = ""
    """On which of the replica's workers each stage is, as in `0+2+1`, where they are on several machines; by the
    measured links if not given."""

    def __post_init__(self) -> None:
        _split_checked(self, "stages", "microbatches", "chunks")
        _pipeline_checked(self, self.stages)
        _workers_checked(self)
        _order_checked(self, sum(self.by_stage))

    @property
    def by_stage(self) -> tuple[int, ...]:
        """How many workers each stage has."""
        return tuple(map(int, self.workers.split("+"))) if self.workers else (1,) * self.stages

    @property
    def shared(self) -> bool:
        """True if some stage has several workers."""
        return max(self.by_stage) > 1


def _roles(strategy: Tensor | Mesh) -> dict[str, str] | None:
    """The plan as a dictionary."""
    assert not isinstance(strategy.plan, str)
    return None if strategy.plan is None else dict(strategy.plan)


class Tensor(Strategy):
    """The model is cut inside its layers."""

    spec = "tensor"
    degree: int
    """Workers over which each layer is split."""
    plan: Mapping[str, Any] | str | None = None
    """How layers are split, by name or pattern, where it should not be found from the model's graph: a mapping such as
    `{"blocks.*.up": "column", "head": "replicated"}`, or as text `blocks.*.up:column+head:replicated`."""
    sequence_parallel: bool = False
    """True if norms, dropout and other layers between split ones are in parts along the sequence."""

    def __post_init__(self) -> None:
        _split_checked(self, "degree")
        _plan_parsed(self)

    roles = property(_roles)


class Mesh(Strategy):
    """Replicas that are split themselves, and a data-parallel strategy between them."""

    spec = "mesh"
    data: int
    """Replicas."""
    pipeline: int = 1
    """Stages of each replica."""
    tensor: int = 1
    """Workers over which each layer of a replica is split."""
    microbatches: int = 8
    """As `Pipeline.microbatches`."""
    schedule: str = "1f1b"
    """As `Pipeline.schedule`."""
    chunks: int = 2
    """As `Pipeline.chunks`."""
    norm: str = "batch"
    """As `Pipeline.norm`."""
    recompute: bool = False
    """As `Pipeline.recompute`."""
    offload: str = "none"
    """As `Pipeline.offload`."""
    order: str = ""
    """As `Pipeline.order`, in numbers of `tensor` workers with consecutive ranks."""
    plan: Mapping[str, Any] | str | None = None
    """As `Tensor.plan`."""
    sequence_parallel: bool = False
    """As `Tensor.sequence_parallel`."""
    sync: Strategy | str = AllReduce()
    """The strategy between replicas: all-reduce, or any policy of a parameter server."""

    def __post_init__(self) -> None:
        _split_checked(self, "data", "pipeline", "tensor", "microbatches", "chunks")
        _pipeline_checked(self, self.pipeline)
        _order_checked(self, self.pipeline)
        _plan_parsed(self)
        for name in ("plan", "sequence_parallel"):
            if getattr(self, name) and self.tensor == 1:
                raise UsageError(
                    f"option '{name}' of strategy 'mesh' is about layers that are split, and tensor is 1; write "
                    "tensor=2 or more"
                )
        sync = parse_strategy(self.sync)
        if isinstance(sync, Pipeline | Tensor | Mesh):
            raise UsageError(
                f"sync of strategy 'mesh' is '{sync}'; between replicas it must be 'all-reduce' or a policy of a "
                "parameter server, such as 'k-sync:k=1'"
            )
        self.__dict__["sync"] = sync

    roles = property(_roles)


def _plan_parsed(strategy: Tensor | Mesh) -> None:
    """Makes the plan a dictionary of texts, by pattern."""
    plan = strategy.plan
    if isinstance(plan, str):
        pairs = [part.rpartition(":") for part in plan.split("+")]
        if not all(pattern and role for pattern, _, role in pairs):
            raise UsageError(
                f"option 'plan' of strategy '{strategy.spec}' is '{plan}'; write PATTERN:ROLE+…, as in "
                "blocks.*.up:column+head:replicated"
            )
        plan = {pattern: role for pattern, _, role in pairs}
    if plan is not None:
        # torch's ColwiseParallel() and its like are known by their names.
        plan = {pattern: role if isinstance(role, str) else type(role).__name__ for pattern, role in plan.items()}
    strategy.__dict__["plan"] = plan


def _split_checked(strategy: Strategy, *names: str) -> None:
    for name in names:
        positive(f"option '{name}' of strategy '{strategy.spec}'", getattr(strategy, name))


def _pipeline_checked(strategy: Pipeline | Mesh, stages: int) -> None:
    strategy.check_option("schedule", SCHEDULES)
    strategy.check_option("norm", NORMS)
    strategy.check_option("offload", OFFLOADS)
    if SCHEDULES[strategy.schedule].has_chunks and strategy.microbatches % stages:
        raise UsageError(
            f"an interleaved pipeline of {stages} stages has {strategy.microbatches} microbatches; it must be a "
            "multiple of the stages"
        )


def _workers_checked(pipeline: Pipeline) -> None:
    if not pipeline.workers:
        return
    said = f"option 'workers' of strategy 'pipeline' is {pipeline.workers!r}"
    counts = str(pipeline.workers).split("+")
    if len(counts) != pipeline.stages or not all(re.fullmatch("[1-9][0-9]{0,5}", count) for count in counts):
        example = "+".join(["1"] * (pipeline.stages - 1) + ["2"])
        raise UsageError(
            f"{said}; it must be how many workers each of the {pipeline.stages} stages has, at least 1, as in {example}"
        )
    most = max(pipeline.by_stage)
    if most > 1 and pipeline.schedule not in shareable():
        raise UsageError(
            f"{said}, but under the schedule '{pipeline.schedule}' a stage has one worker; several share one under "
            f"{listed(shareable())}"
        )
    if most > pipeline.microbatches:
        raise UsageError(
            f"{said}, but {most} workers cannot share {pipeline.microbatches} microbatch"
            f"{'es' * (pipeline.microbatches > 1)}; write microbatches={most} or more"
        )


def _order_checked(strategy: Pipeline | Mesh, count: int) -> None:
    places = str(strategy.order).split("+")
    if strategy.order and (places[0] != "0" or sorted(places) != sorted(map(str, range(count)))):
        example = "+".join(map(str, [0, *reversed(range(1, count))]))
        raise UsageError(
            f"option 'order' of strategy '{strategy.spec}' is {strategy.order!r}; it must have each number from 0 to "
            f"{count - 1} once and begin with 0, where the script's first worker is, as in {example}"
        )


def workers_of(strategy: Strategy) -> int | None:
    """How many workers a strategy that splits the model needs; None if any number will do."""
    match strategy:
        case Pipeline():
            return sum(strategy.by_stage)
        case Tensor():
            return strategy.degree
        case Mesh():
            return strategy.data * strategy.pipeline * strategy.tensor
    return None


def between_replicas(strategy: Strategy, workers: int) -> tuple[Strategy, int]:
    """The strategy between a team's replicas, and the number of replicas of so many workers."""
    if isinstance(strategy, Mesh):
        return parse_strategy(strategy.sync), strategy.data
    return strategy, 1 if isinstance(strategy, Pipeline | Tensor) else workers


def replicas_by_machine(strategy: Strategy, machines: Sequence[Sequence[int]]) -> list[list[int]] | None:
    """The numbers of the replicas on each machine; None if the workers of one are on several machines.

    machines: the ranks on each of them.
    """
    each = (workers_of(strategy) or 1) // between_replicas(strategy, 1)[1]
    found = [sorted({rank // each for rank in ranks}) for ranks in machines]
    return found if sum(map(len, found)) == sum(map(len, machines)) // each else None


def check_workers(strategy: Strategy, workers: int) -> None:
    """Refuses a team of the wrong size for its strategy, and names one that would do."""
    needed = workers_of(strategy)
    if needed is None or needed == workers:
        return
    if isinstance(strategy, Pipeline) and strategy.shared:
        raise UsageError(
            f"'{strategy}' needs {needed} workers, the sum of its option 'workers'; this team has {workers}: start "
            f"{needed} workers, or change 'workers'"
        )
    what = {"pipeline": "stages", "tensor": "degree"}.get(strategy.spec)
    advice = f"start {needed} workers"
    if what is not None and workers > 1:
        advice += f", or write {strategy.spec}:{what}={workers}"
    if what is not None and needed > 1 and workers % needed == 0:
        advice += f", or mesh:data={workers // needed},{strategy.spec}={needed}"
    raise UsageError(f"'{strategy}' needs {needed} workers, one for each part; this team has {workers}: {advice}")
