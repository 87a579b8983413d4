"""What a plan knows of a model that may be split, from the operations of a script's own."""

from __future__ import annotations

import msgspec

from paceline.errors import UsageError
from paceline.graph.model_profile import ModelProfile
from paceline.graph.partition import Device, partition
from paceline.simulate.replica import Model

MICROBATCHES = 8
"""Of a batch, in the measurement."""
_WEIGHTY = ("linear", "conv", "embedding", "bilinear")
"""Operations that a tensor split cuts."""
_BLOCK = 4
"""Of them in a layer, as in a transformer's: two agree on one result."""


class SplitKnowledge(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model is cut into so many stages, and how long each takes, as a share of a step."""

    before: list[str]
    """The operations that stages begin with, but for the first."""
    shares: list[float]

    @property
    def spoken(self) -> str:
        where = ", ".join(f"'{name}'" for name in self.before)
        return f"cut before {where} (stages {' / '.join(f'{share:.0%}' for share in self.shares)})"


def learn(sheet: ModelProfile, workers: int) -> tuple[Model, dict[int, SplitKnowledge]]:
    """What the simulation asks for, and the best cut into every number of stages that so many workers could have."""
    found: dict[int, SplitKnowledge] = {}
    over = [0]
    for stages in range(2, workers + 1):
        if workers % stages:
            continue
        try:
            best = partition(sheet.problem(), [Device()] * stages, microbatches=MICROBATCHES, slack=0.02).stages
        except UsageError:
            continue  # there are not so many places to cut
        whole = sum(stage.seconds for stage in best)
        found[stages] = SplitKnowledge(
            before=[sheet.names[stage.first] for stage in best[1:]], shares=[stage.seconds / whole for stage in best]
        )
        over += [stage.bytes for stage in best[1:]]
    forward = sum(cost.forward for cost in sheet.costs) / sum(cost.seconds for cost in sheet.costs)
    weighty = sum(kind.lower().startswith(_WEIGHTY) for kind in sheet.shown)
    model = Model(
        forward=forward,
        weights=(1 - forward) / 2,
        layers=max(1, round(weighty / _BLOCK)),
        activations=max(over) * sheet.batch / sheet.microbatch,
        stages={stages: tuple(stages * share for share in cut.shares) for stages, cut in found.items()},
    )
    return model, found
