"""Batch norm over all replicas: mean and variance of the whole global batch instead of each worker's part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.cluster.compiler import keep_out_of_graphs
from paceline.errors import UsageError

Exchange = Callable[[torch.Tensor], list[torch.Tensor]]
"""Returns the vectors of all workers that have one."""


class TeamBatchNorm(_BatchNorm):
    """A batch norm layer whose statistics are the team's."""

    exchange: Exchange | None = None
    by_channel = True
    """True: it treats each channel by itself."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "exchange": None}  # a copy of the model is not the team's

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    @keep_out_of_graphs
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or self.exchange is None:
            return super().forward(input)
        self._check_input_dim(input)
        statistics: list[torch.Tensor] = []
        output: torch.Tensor = _Normalise.apply(input, self.weight, self.bias, self.eps, self.exchange, statistics)
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            mean, variance, count = statistics
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
            share = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked or 1)
            unbiased = variance * count / (count - 1).clamp(min=1)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        return output


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        exchange: Exchange,
        statistics: list[torch.Tensor],
    ) -> torch.Tensor:
        dims = [0, *range(2, input.dim())]
        shape = [1, -1] + [1] * (input.dim() - 2)
        channels = input.shape[1]
        own = float(input.numel() // max(1, channels))
        wide = input.double()
        local = wide.mean(dims)
        spread = (wide - local.view(shape)).square().sum(dims)
        parts = exchange(torch.cat([torch.tensor([own], dtype=torch.float64), local.cpu(), spread.cpu()]))
        counts = torch.stack([part[0] for part in parts])
        means = torch.stack([part[1 : 1 + channels] for part in parts])
        spreads = torch.stack([part[1 + channels :] for part in parts])
        count = counts.sum()
        mean = (counts[:, None] * means).sum(0) / count
        variance = (spreads + counts[:, None] * (means - mean).square()).sum(0) / count
        statistics += [mean, variance, count]
        inverse = (variance + eps).rsqrt().to(input)
        normal = (input - mean.to(input).view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normal, inverse, weight)
        ctx.exchange, ctx.own, ctx.count = exchange, own, float(count)
        ctx.dims, ctx.shape, ctx.has_bias = dims, shape, bias is not None
        output = normal if weight is None else normal * weight.view(shape)
        return output if bias is None else output + bias.view(shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UsageError("sync_batch_norm has no gradients of gradients; set up without it, or use group norm")
        normal, inverse, weight = ctx.saved_tensors
        dims, shape = ctx.dims, ctx.shape
        for_bias = gradient.sum(dims)
        for_weight = (gradient * normal).sum(dims)
        inner = gradient if weight is None else gradient * weight.view(shape)
        sums = torch.cat([inner.sum(dims), (inner * normal).sum(dims)]).double().cpu()
        parts = ctx.exchange(torch.cat([torch.tensor([ctx.own], dtype=torch.float64), sums]))
        # Each worker's loss is a mean over its own part and will be weighted by the size of that part, so another
        # worker's sums count here by how much larger or smaller its part is.
        total = torch.stack([part[1:] * (part[0] / ctx.own) for part in parts]).sum(0) / ctx.count
        first, second = total.to(gradient).chunk(2)
        for_input = (inner - first.view(shape) - normal * second.view(shape)) * inverse.view(shape)
        return (
            for_input,
            None if weight is None else for_weight,
            for_bias if ctx.has_bias else None,
            None,
            None,
            None,
        )


def has_batch_norm(model: nn.Module) -> bool:
    """True if a layer of the model normalises by the batch that it is given."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def synchronise(model: nn.Module, exchange: Exchange, done: dict[nn.Module, nn.Module] | None = None) -> nn.Module:
    """Replaces every batch norm layer; parameters and buffers stay the same objects, a shared layer stays shared."""
    done = {} if done is None else done
    if model in done:
        return done[model]
    done[model] = model
    if isinstance(model, _BatchNorm) and not isinstance(model, (TeamBatchNorm, nn.modules.batchnorm._LazyNormBase)):
        layer = TeamBatchNorm(model.num_features, model.eps, model.momentum, model.affine, model.track_running_stats)
        layer._parameters, layer._buffers = model._parameters, model._buffers
        layer.training = model.training
        layer.exchange = exchange
        done[model] = layer
        return layer
    for name, child in list(model._modules.items()):
        if child is None:
            continue
        replacement = synchronise(child, exchange, done)
        if replacement is not child:
            setattr(model, name, replacement)
    return model
