"""Differentiable communication between the workers that shard a model.

A replicated value is equal on all workers, and so is its gradient. Of a sharded value each worker has one shard, and
that shard's gradient. A partial value is one worker's term of a sum.

| function | forward | backward |
|---|---|---|
| replicate | identity, for a computation on shards | all_reduce |
| all_reduce | all-reduce | replicate |
| take_shard | this worker's shard | all_gather |
| all_gather | all-gather | take_shard |
| all_gather_for_shards | all-gather, for a computation on shards | reduce_scatter |
| reduce_scatter | reduce-scatter | all_gather_for_shards |

Each backward pass is another of these functions, so that gradients of gradients can be had.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import Function

from paceline.collectives.communicator import Communicator
from paceline.collectives.operation import Op
from paceline.tensor_parallel.placement import Placement, shard_of, unshard
from paceline.transport.call_log import COLLECTIVES, CallLog


class ShardGroup:
    """The workers that a model is sharded over, seen from one of them."""

    def __init__(self, member: Communicator, seed: int, calls: CallLog, ranks: Sequence[int]) -> None:
        """calls: of the model, by the workers of its replica; ranks: of these workers in the team."""
        self.member, self.calls, self._ranks = member, calls, ranks
        self.rank, self.size = member.rank, member.size
        self.topology = "shared"
        """Topology of its collectives."""
        self._random = torch.Generator().manual_seed(seed + member.rank).get_state()
        """This worker's own random state, for operations on shards; torch's default state is equal on all workers."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        with self._in_one_call():
            self.member.all_reduce(tensor, Op.SUM, self.topology)

    def all_gather(self, tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
        own = tensor.detach().contiguous()
        shards = [torch.empty_like(own) for _ in range(self.size)]
        with self._in_one_call():
            self.member.all_gather(shards, own, self.topology)
        return unshard(shards, placement)

    def reduce_scatter(self, tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
        shards = [shard_of(tensor, placement, rank, self.size).contiguous() for rank in range(self.size)]
        out = torch.empty_like(shards[self.rank])
        with self._in_one_call():
            self.member.reduce_scatter(out, shards, Op.SUM, self.topology)
        return out

    @contextlib.contextmanager
    def _in_one_call(self) -> Iterator[None]:
        """Checks that the others take part in this collective in the same call of the model."""
        self.calls.begin_turn(COLLECTIVES)
        try:
            yield
        finally:
            self.calls.check_turn(COLLECTIVES, self._ranks)

    def shard(self, tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
        """This worker's shard of a whole tensor."""
        return shard_of(tensor, placement, self.rank, self.size).contiguous()

    def swap_random(self) -> None:
        """Exchanges torch's random state with this worker's own."""
        state = torch.get_rng_state()
        torch.set_rng_state(self._random)
        self._random = state


class _Replicate(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ShardGroup) -> torch.Tensor:
        ctx.group = group
        # Not a view, which would refer to the tensor that keeps this one (see `replicate`): neither would be freed.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        # A copy, since another node may use the same gradient.
        return all_reduce(gradient.clone(memory_format=torch.contiguous_format), ctx.group), None


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ShardGroup) -> torch.Tensor:
        ctx.group = group
        total = tensor.detach()
        total = total if total.is_contiguous() else total.contiguous()
        group.all_reduce(total)
        if total.data_ptr() == tensor.data_ptr():
            ctx.mark_dirty(tensor)
            return tensor
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return replicate(gradient, ctx.group), None


def _apply(function: type[Function], *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*arguments)
    return result


Collective = Callable[[torch.Tensor, Placement, ShardGroup], torch.Tensor]
"""A differentiable function of a tensor, a placement and a group."""


def _collective(
    run: Callable[[ShardGroup, torch.Tensor, Placement], torch.Tensor], adjoint: Callable[[], Collective]
) -> Collective:
    """The collective that `run` computes; `adjoint` returns that of its backward pass."""

    class Node(Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor, placement: Placement, group: ShardGroup) -> torch.Tensor:
            ctx.placement, ctx.group = placement, group
            return run(group, tensor, placement)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
            return adjoint()(gradient, ctx.placement, ctx.group), None, None

    # `apply` is looked up in each call: `ShardedModel` replaces it.
    return lambda tensor, placement, group: _apply(Node, tensor, placement, group)


take_shard: Collective = _collective(ShardGroup.shard, lambda: all_gather)
all_gather: Collective = _collective(ShardGroup.all_gather, lambda: take_shard)
all_gather_for_shards: Collective = _collective(ShardGroup.all_gather, lambda: reduce_scatter)
reduce_scatter: Collective = _collective(ShardGroup.reduce_scatter, lambda: all_gather_for_shards)


def replicate(tensor: torch.Tensor, group: ShardGroup) -> torch.Tensor:
    """The tensor itself for a computation on shards; all such uses of it share one all-reduce in the backward pass."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    known: tuple[int, torch.Tensor] | None = getattr(tensor, "_paceline_replicated", None)
    if known is not None and known[0] == tensor._version:
        return known[1]
    result = _apply(_Replicate, tensor, group)
    if tensor.grad_fn is not None:  # a parameter outlives the step, and must not keep its graph
        tensor._paceline_replicated = (tensor._version, result)  # type: ignore[attr-defined]
    return result


def all_reduce(tensor: torch.Tensor, group: ShardGroup) -> torch.Tensor:
    """The sum of all workers' terms; `tensor` itself is overwritten."""
    return _apply(_AllReduce, tensor, group)
