"""Derives the facts that a plan needs to split a model, from the profile of the script's operations."""

from __future__ import annotations

import msgspec

from paceline.errors import UsageError
from paceline.graph.model_profile import ModelProfile
from paceline.graph.partition import Device, partition
from paceline.simulate.replica import Model

MICROBATCHES = 8
"""Microbatches of a batch in the measurement."""
_WEIGHTY = ("linear", "conv", "embedding", "bilinear")
"""Kinds of operations that a tensor split shards."""
_BLOCK = 4
"""Such operations per layer, as in a transformer."""


class SplitKnowledge(msgspec.Struct, frozen=True, kw_only=True):
    """The cut of a model into stages, and the time of each stage as a share of a step."""

    before: list[str]
    """The first operation of every stage but the first."""
    shares: list[float]

    @property
    def spoken(self) -> str:
        where = ", ".join(f"'{name}'" for name in self.before)
        return f"cut before {where} (stages {' / '.join(f'{share:.0%}' for share in self.shares)})"


def learn(profile: ModelProfile, workers: int) -> tuple[Model, dict[int, SplitKnowledge]]:
    """The facts for the simulation, and the best cut into each number of stages that divides `workers`."""
    found: dict[int, SplitKnowledge] = {}
    over = [0]
    for stages in range(2, workers + 1):
        if workers % stages:
            continue
        try:
            best = partition(profile.problem(), [Device()] * stages, microbatches=MICROBATCHES, slack=0.02).stages
        except UsageError:
            continue  # the model has too few places to cut
        whole = sum(stage.seconds for stage in best)
        found[stages] = SplitKnowledge(
            before=[profile.names[stage.first] for stage in best[1:]], shares=[stage.seconds / whole for stage in best]
        )
        over += [stage.bytes for stage in best[1:]]
    forward = sum(cost.forward for cost in profile.costs) / sum(cost.seconds for cost in profile.costs)
    weighty = sum(kind.lower().startswith(_WEIGHTY) for kind in profile.kinds)
    model = Model(
        forward=forward,
        weights=(1 - forward) / 2,
        layers=max(1, round(weighty / _BLOCK)),
        activations=max(over) * profile.batch / profile.microbatch,
        stages={stages: tuple(stages * share for share in cut.shares) for stages, cut in found.items()},
    )
    return model, found
