"""The time of a step of a model that is split over several devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from paceline.config import Mesh, Pipeline
from paceline.config.distributions import Draws
from paceline.errors import UsageError
from paceline.schedules.timing import ScheduleTiming, evaluate
from paceline.simulate.cluster import SimulatedCluster
from paceline.topologies import Link, quickest, seconds


@dataclasses.dataclass(frozen=True)
class Model:
    """The facts of a model that decide the time of a split."""

    forward: float = 1 / 3
    """The forward pass's share of a step."""
    weights: float = 1 / 3
    """The share of a step that computes the gradients of the weights."""
    layers: int = 1
    """Blocks with two all-reduces forward and two backward each under a tensor split."""
    activations: float = 0.0
    """Bytes of a minibatch's activations between two layers."""
    stages: Mapping[int, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    """The time of each stage over their mean, by number of stages; equal for numbers not given."""

    def __post_init__(self) -> None:
        if not (self.forward > 0 and self.weights >= 0 and self.forward + self.weights <= 1):
            raise UsageError(
                f"the forward pass is {self.forward:g} and the gradients of weights {self.weights:g} of a step; "
                "together they must be at most 1"
            )
        if self.layers < 1 or not 0 <= self.activations < math.inf:
            raise UsageError(f"the model has {self.layers} layers and {self.activations:g} bytes of activations")


def all_reduce_seconds(topology: str, ranks: int, size: float, link: Link) -> float:
    """Seconds of an all-reduce of `size` bytes; `auto` is the topology that a run would choose."""
    return seconds(quickest(ranks, size, link) if topology == "auto" else topology, ranks, size, link)


def pipeline_steps(
    cluster: SimulatedCluster,
    model: Model,
    split: Pipeline | Mesh,
    stages: int,
    degree: int,
    count: int,
    source: np.random.Generator,
) -> ScheduleTiming:
    """`count` drawn steps of one replica. A tensor-parallel stage is as slow as the slowest of its devices.

    A stage whose microbatches n devices share holds n times as much of the model.
    """
    shares = split.by_stage if isinstance(split, Pipeline) and split.shared else (1,) * stages
    devices = sum(shares) * degree
    columns = [(of.draw(source, count) * factor) for of, factor in map(cluster.steps_of, range(devices))]
    draws = np.stack(columns, axis=1)
    lengths = np.repeat(shares, shares) if max(shares) > 1 else np.array(model.stages.get(stages, 1.0))
    per_stage: Draws = draws.reshape(count, -1, degree).max(axis=2) * lengths
    link = cluster.narrowest()
    # Two all-reduces forward and two backward in each layer that is split.
    agree = 4 * model.layers * all_reduce_seconds("auto", degree, model.activations, link)
    share = (per_stage / degree + agree) / (sum(shares) * max(1, split.microbatches))
    transfer = link.latency + model.activations / max(1, split.microbatches) / link.bandwidth
    return evaluate(
        split.schedule,
        split.microbatches,
        share * model.forward,
        share * (1 - model.forward - model.weights),
        share * model.weights,
        chunks=split.chunks,
        transfer=transfer if stages > 1 else 0.0,
        workers=shares,
    )
