"""The gradients that a worker is making: one for each optimizer of the team."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.parameters.gradient_weight import Exchange, GradientWeight
from paceline.parameters.gradients import GRAD, Gradients
from paceline.parameters.joint import parts_of
from paceline.parameters.layout import Layout, Slot
from paceline.parameters.loss_reader import LossReader
from paceline.parameters.loss_weight import LossWeight


@dataclasses.dataclass(slots=True, eq=False)
class GradientState:
    """The gradient that a worker is making for one optimizer, until that has stepped."""

    gradients: Gradients
    """Of the optimizer's parameters."""
    weight: GradientWeight
    exposed: int = 0
    """The number of workers whose gradients are in `.grad`, if that is the team's gradient; else 0."""
    pending: bool = False
    """True if there is a gradient that no update has used."""
    stepped: bool = False
    """True if there was an update since the minibatch was taken."""
    clip_factor: float | None = None
    """The factor on the mean gradient, once it has been reduced and clipped."""
    clip: tuple[float, float] | None = None
    """The limit and the kind of norm by which a server will clip the mean gradient."""

    def take_batch(self, share: float) -> None:
        """The script has a minibatch with this share of the samples of all workers."""
        if not share and self.weight.share and self.pending and self.gradients.any:
            raise UsageError(
                "gradients of several batches are summed, and a worker has no part of the next one, which has fewer "
                "samples than there are workers; let the loader's batch sampler make no such batches"
            )
        self.weight.take_batch(share)
        self.stepped = False


def gradient_states(
    optimizer: Optimizer,
    gradients: Gradients,
    share: float,
    reader: LossReader,
    exchange: Exchange | None = None,
    *,
    together: bool = False,
) -> list[GradientState]:
    """The state of each optimizer's gradient; together: the same one for all, since they are exchanged together."""
    masks = part_masks(optimizer, gradients.layout)
    if together or len(masks) < 2:
        weight = GradientWeight(share, gradients, reader, exchange)
        return [GradientState(gradients, weight)] * max(1, len(masks))
    parts = [gradients.restricted(mask) for mask in masks]
    return [GradientState(part, GradientWeight(share, part, reader, exchange)) for part in parts]


def add_loss(states: Sequence[GradientState], found: LossWeight) -> None:
    """A backward pass from a loss of this weight begins."""
    for state in states:
        exposed, state.exposed = state.exposed, 0
        # Of several optimizers, one that has stepped may keep its gradient while the script goes on with another.
        stale = len(states) > 1 and not state.pending
        state.pending = True
        state.weight.add(found, exposed, stale=stale)


def clear_gradients(optimizer: Optimizer, slots: Sequence[Slot], set_to_none: bool) -> None:
    """As the optimizer's `zero_grad`, for its parameters, and faster."""
    if set_to_none:
        for slot in slots:
            GRAD.__set__(slot.parameter, None)
    else:
        type(optimizer).zero_grad(optimizer, set_to_none=False)


def part_slots(optimizer: Optimizer, layout: Layout) -> list[tuple[Slot, ...]]:
    """The parameters of each optimizer."""
    masks = part_masks(optimizer, layout) or [bytes([1]) * len(layout.slots)]
    return [tuple(slot for slot in layout.slots if mask[slot.index]) for mask in masks]


def both(flags: bytes, mask: bytes) -> bytes:
    """A byte per parameter: 1 where both have it."""
    return (int.from_bytes(flags, "little") & int.from_bytes(mask, "little")).to_bytes(len(flags), "little")


def part_masks(optimizer: Optimizer, layout: Layout) -> list[bytes]:
    """For each of several optimizers, a byte per parameter: 1 if it updates that; empty for a single one."""
    parts = parts_of(optimizer)
    if len(parts) < 2:
        return []
    held = [{id(own) for group in part.param_groups for own in group["params"]} for part in parts]
    return [bytes(id(slot.parameter) in own for slot in layout.slots) for own in held]
