"""Where a value goes from all workers having it whole to each having a part, and back.

A whole value is equal on all workers, and so is its gradient. Of a value in parts each worker has its part, and the
gradient of that. What each worker makes of its part alone may also be one term of a sum.

| function | forward | backward |
|---|---|---|
| copied | the same, for computing parts with | sum over all workers |
| summed | sum over all workers | the same |
| sliced | this worker's part | all parts together |
| gathered | all parts together | this worker's part |
| collected | all parts together, for computing parts with | sum, of which this worker's part |
| scattered | sum, of which this worker's part | all parts together |
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from paceline.collectives.communicator import Communicator
from paceline.collectives.operation import Op
from paceline.tensor_parallel.placement import Placement, cut, join


class ShardSpace:
    """The workers among whom a model is split, seen from one of them."""

    def __init__(self, member: Communicator, seed: int) -> None:
        self.member = member
        self.rank, self.size = member.rank, member.size
        self.topology = "shared"
        """How they reduce and gather."""
        self._random = torch.Generator().manual_seed(seed + member.rank).get_state()
        """This worker's own random numbers, for what it has a part of; all others are the same on all workers."""

    def sum(self, tensor: torch.Tensor) -> None:
        self.member.all_reduce(tensor, Op.SUM, self.topology)

    def parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's, of the same shape."""
        own = tensor.detach().contiguous()
        outs = [torch.empty_like(own) for _ in range(self.size)]
        self.member.all_gather(outs, own, self.topology)
        return outs

    def part_of_sum(self, tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
        parts = [cut(tensor, placement, rank, self.size).contiguous() for rank in range(self.size)]
        out = torch.empty_like(parts[self.rank])
        self.member.reduce_scatter(out, parts, Op.SUM, self.topology)
        return out

    def swap_random(self) -> None:
        """Draw from this worker's own random numbers instead of the common ones, or from those again."""
        state = torch.get_rng_state()
        torch.set_rng_state(self._random)
        self._random = state


class _Copied(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, space: ShardSpace) -> torch.Tensor:
        ctx.space = space
        # No view, which would hold on to the tensor that keeps this one (see `copied`): neither would ever be freed.
        return tensor.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        # A copy: the same gradient may be on its way elsewhere.
        total = gradient.clone(memory_format=torch.contiguous_format)
        ctx.space.sum(total)
        return total, None


class _Summed(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, space: ShardSpace) -> torch.Tensor:
        total = tensor.detach()
        total = total if total.is_contiguous() else total.contiguous()
        space.sum(total)
        if total.data_ptr() == tensor.data_ptr():
            ctx.mark_dirty(tensor)
            return tensor
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient, None


class _Sliced(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, placement: Placement, space: ShardSpace) -> torch.Tensor:
        ctx.placement, ctx.space = placement, space
        return cut(tensor, placement, space.rank, space.size).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return join(ctx.space.parts(gradient), ctx.placement), None, None


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, placement: Placement, space: ShardSpace) -> torch.Tensor:
        ctx.placement, ctx.space = placement, space
        return join(space.parts(tensor), placement)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return cut(gradient, ctx.placement, ctx.space.rank, ctx.space.size).contiguous(), None, None


class _Collected(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, placement: Placement, space: ShardSpace) -> torch.Tensor:
        ctx.placement, ctx.space = placement, space
        return join(space.parts(tensor), placement)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return ctx.space.part_of_sum(gradient, ctx.placement), None, None


class _Scattered(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, placement: Placement, space: ShardSpace) -> torch.Tensor:
        ctx.placement, ctx.space = placement, space
        return space.part_of_sum(tensor.detach(), placement)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return join(ctx.space.parts(gradient), ctx.placement), None, None


def copied(tensor: torch.Tensor, space: ShardSpace) -> torch.Tensor:
    """As it is, for computing parts with: several who do so share one sum of gradients."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    known: tuple[int, torch.Tensor] | None = getattr(tensor, "_paceline_copied", None)
    if known is not None and known[0] == tensor._version:
        return known[1]
    result: torch.Tensor = _Copied.apply(tensor, space)
    if tensor.grad_fn is not None:  # a parameter lives on, and must not keep its graph
        tensor._paceline_copied = (tensor._version, result)  # type: ignore[attr-defined]
    return result


def summed(tensor: torch.Tensor, space: ShardSpace) -> torch.Tensor:
    """The sum of what all workers have; `tensor` itself is used up."""
    result: torch.Tensor = _Summed.apply(tensor, space)
    return result


def sliced(tensor: torch.Tensor, placement: Placement, space: ShardSpace) -> torch.Tensor:
    result: torch.Tensor = _Sliced.apply(tensor, placement, space)
    return result


def gathered(tensor: torch.Tensor, placement: Placement, space: ShardSpace) -> torch.Tensor:
    result: torch.Tensor = _Gathered.apply(tensor, placement, space)
    return result


def collected(tensor: torch.Tensor, placement: Placement, space: ShardSpace) -> torch.Tensor:
    result: torch.Tensor = _Collected.apply(tensor, placement, space)
    return result


def scattered(tensor: torch.Tensor, placement: Placement, space: ShardSpace) -> torch.Tensor:
    result: torch.Tensor = _Scattered.apply(tensor, placement, space)
    return result
