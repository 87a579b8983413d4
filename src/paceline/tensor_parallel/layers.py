"""Sharded layers: the placements of their parameters, and their `forward`.

| role | layers | each worker has | input | output |
|---|---|---|---|---|
| column | Linear, Conv, Embedding | some of the outputs | replicated | sharded |
| row | Linear, Conv | some of the inputs | sharded | replicated, by a sum |
| vocabulary | Embedding | some of the entries | replicated | replicated, by a sum |
| channels | BatchNorm, GroupNorm, depthwise Conv | some of the channels | sharded | sharded |
| heads | MultiheadAttention | some of the heads | replicated | replicated, by a sum |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from paceline.tensor_parallel.attention import attention_forward
from paceline.tensor_parallel.comm_functions import ShardGroup, all_reduce, take_shard
from paceline.tensor_parallel.partial_tensor import PartialTensor, full_tensor
from paceline.tensor_parallel.placement import Placement
from paceline.tensor_parallel.roles import Role, layer_input, layer_output

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class LayerShard(NamedTuple):
    """A parameter or buffer of a layer, and its placement."""

    name: str
    placement: Placement


def layer_shards(layer: nn.Module, role: Role) -> list[LayerShard]:
    """A layer's sharded parameters and buffers; all others are replicated."""
    blocks, found = role.blocks, []

    def add(name: str, dim: int, own: tuple[int, ...] = blocks) -> None:
        if layer._parameters.get(name) is not None or layer._buffers.get(name) is not None:
            found.append(LayerShard(name, Placement(dim, own)))

    match role.name:
        case "column" if isinstance(layer, nn.Embedding):
            add("weight", 1)
        case "column":
            add("weight", 0)
            add("bias", 0)
        case "row":
            add("weight", 1)
        case "vocabulary":
            add("weight", 0)
        case "channels":
            for name in ("weight", "bias", "running_mean", "running_var"):
                add(name, 0)
        case "heads" if isinstance(layer, nn.MultiheadAttention):
            width = layer.embed_dim
            add("in_proj_weight", 0, (width,) * 3)
            add("in_proj_bias", 0, (width,) * 3)
            for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
                add(name, 0, (width,))
    return found


def install(layer: nn.Module, role: Role, group: ShardGroup) -> Callable[[], None]:
    """Replaces the `forward` of a layer whose parameters are sharded; the returned function restores it."""
    layer.forward = partial(_forward(layer, role), layer, role, group)
    groups = "num_groups" if isinstance(layer, nn.GroupNorm) else "groups"
    shared = role.name == "channels" and isinstance(layer, (nn.GroupNorm, _ConvNd))
    if shared:
        setattr(layer, groups, getattr(layer, groups) // group.size)

    def undo() -> None:
        vars(layer).pop("forward", None)
        if shared:
            setattr(layer, groups, getattr(layer, groups) * group.size)

    return undo


def _forward(layer: nn.Module, role: Role) -> Callable[..., Any]:
    """The function of a layer, its role, its group and its inputs that computes the layer's output."""
    if isinstance(layer, nn.Linear):
        return _column_linear if role.name == "column" else _row_linear
    if isinstance(layer, nn.Embedding):
        return _column_embedding if role.name == "column" else _vocabulary
    if isinstance(layer, nn.MultiheadAttention):
        return attention_forward
    if isinstance(layer, CONVOLUTIONS):
        return {"column": _column_conv, "row": _row_conv, "channels": _channel_conv}[role.name]
    return _channels


def _column_linear(layer: nn.Linear, role: Role, group: ShardGroup, value: torch.Tensor) -> torch.Tensor:
    out = functional.linear(layer_input(value, group), layer.weight, layer.bias)
    return PartialTensor.of(out, Placement(out.dim() - 1, role.blocks), group)


def _row_linear(layer: nn.Linear, role: Role, group: ShardGroup, value: torch.Tensor) -> torch.Tensor:
    shard = _input_shard(value, Placement(value.dim() - 1, role.blocks), group)
    out = layer_output(functional.linear(shard, layer.weight), role, group)
    return out if layer.bias is None else out + layer.bias.to(out.dtype)  # autocast changes the output's dtype


def _input_shard(value: torch.Tensor, placement: Placement, group: ShardGroup) -> torch.Tensor:
    """This worker's shard of a layer's input."""
    if type(value) is PartialTensor:
        if value.placement == placement:
            return value.local
        value = value.full_tensor()
    return take_shard(value, placement, group)


def _column_embedding(layer: nn.Embedding, role: Role, group: ShardGroup, value: torch.Tensor) -> torch.Tensor:
    out = _look_up(layer, full_tensor(value), layer.padding_idx)
    return PartialTensor.of(out, Placement(out.dim() - 1, role.blocks), group)


def _look_up(layer: nn.Embedding, value: torch.Tensor, padding: int | None) -> torch.Tensor:
    return functional.embedding(
        value, layer.weight, padding, layer.max_norm, layer.norm_type, layer.scale_grad_by_freq, layer.sparse
    )


def _vocabulary(layer: nn.Embedding, role: Role, group: ShardGroup, value: torch.Tensor) -> torch.Tensor:
    value = full_tensor(value)
    own = layer.weight.shape[0]
    first = own * group.rank
    others = (value < first) | (value >= first + own)
    padding = layer.padding_idx
    if padding is not None:
        padding = padding - first if first <= padding < first + own else None
    out = _look_up(layer, (value - first).masked_fill(others, 0), padding)
    return layer_output(out.masked_fill(others.unsqueeze(-1), 0.0), role, group)


def _convolve(layer: _ConvNd, value: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The layer's own computation, with this bias."""
    kind: Any = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}[len(layer.kernel_size)]
    padding: Any = layer.padding
    if layer.padding_mode != "zeros":
        value = functional.pad(value, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        padding = 0
    out: torch.Tensor = kind(value, layer.weight, bias, layer.stride, padding, layer.dilation, layer.groups)
    return out


def _channel_dim(layer: _ConvNd, value: torch.Tensor) -> int:
    return value.dim() - len(layer.kernel_size) - 1


def _column_conv(layer: _ConvNd, role: Role, group: ShardGroup, value: torch.Tensor) -> torch.Tensor:
    out = _convolve(layer, layer_input(value, group), layer.bias)
    return PartialTensor.of(out, Placement(_channel_dim(layer, out), role.blocks), group)


def _row_conv(layer: _ConvNd, role: Role, group: ShardGroup, value: torch.Tensor) -> torch.Tensor:
    dim = _channel_dim(layer, value)
    out = all_reduce(_convolve(layer, _input_shard(value, Placement(dim, role.blocks), group), None), group)
    if layer.bias is None:
        return out
    return out + layer.bias.to(out.dtype).view(-1, *[1] * len(layer.kernel_size))


def _channel_conv(layer: _ConvNd, role: Role, group: ShardGroup, value: torch.Tensor) -> torch.Tensor:
    dim = _channel_dim(layer, value)
    out = _convolve(layer, _input_shard(value, Placement(dim, _inputs(layer, role)), group), layer.bias)
    return PartialTensor.of(out, Placement(dim, role.blocks), group)


def _inputs(layer: _ConvNd, role: Role) -> tuple[int, ...]:
    """Blocks of a grouped convolution's inputs, from those of its outputs."""
    return tuple(block * layer.in_channels // layer.out_channels for block in role.blocks)


def _channels(layer: nn.Module, role: Role, group: ShardGroup, value: torch.Tensor) -> torch.Tensor:
    """`forward` of a norm: the layer's own, on this worker's channels."""
    placement = Placement(1, role.blocks)
    return PartialTensor.of(type(layer).forward(layer, _input_shard(value, placement, group)), placement, group)
