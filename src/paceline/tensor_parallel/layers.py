"""Sharded layers: the placements of their parameters, and their `forward`.

| role | layers | each worker has | input | output |
|---|---|---|---|---|
| column | Linear, Conv, Embedding | some of the outputs | replicated | sharded, or gathered at once |
| row | Linear, Conv | some of the inputs | sharded | replicated, by a sum |
| vocabulary | Embedding | some of the entries | replicated | replicated, by a sum |
| channels | BatchNorm, GroupNorm, depthwise Conv | some of the channels | sharded | sharded |
| heads | MultiheadAttention | some of the heads | replicated | replicated, by a sum |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from paceline.tensor_parallel import comm_functions as comm
from paceline.tensor_parallel.comm_functions import ShardGroup
from paceline.tensor_parallel.linear_layers import is_linear, multiply, output_dim
from paceline.tensor_parallel.partial_tensor import PartialTensor, full_tensor
from paceline.tensor_parallel.placement import Placement

ROLES = ("column", "row", "vocabulary", "channels", "heads")
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Role(msgspec.Struct, frozen=True):
    """How a layer is sharded."""

    name: str
    blocks: tuple[int, ...] = ()
    """Blocks of the dimension that is cut."""
    sequence: bool = False
    """True if the layer's output is sharded along the sequence."""
    gathered: bool = False
    """True if the output of a column is gathered at once."""


def layer_shards(layer: nn.Module, role: Role) -> dict[str, Placement]:
    """Placements of a layer's sharded parameters and buffers, by name; all others are replicated."""
    found: dict[str, Placement] = {}

    def add(name: str, dim: int, blocks: tuple[int, ...] = role.blocks) -> None:
        if layer._parameters.get(name) is not None or layer._buffers.get(name) is not None:
            found[name] = Placement(dim, blocks)

    match role.name:
        case "column" if isinstance(layer, nn.Embedding):
            add("weight", 1)
        case "column":
            add("weight", output_dim(layer))
            add("bias", 0)
        case "row":
            add("weight", 1 - output_dim(layer))
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
    if is_linear(layer):
        return _column_linear if role.name == "column" else _row_linear
    if isinstance(layer, nn.Embedding):
        return _column_embedding if role.name == "column" else _vocabulary
    if isinstance(layer, nn.MultiheadAttention):
        return _attention
    if isinstance(layer, CONVOLUTIONS):
        return {"column": _column_conv, "row": _row_conv, "channels": _channel_conv}[role.name]
    return _channels


def _layer_input(value: torch.Tensor, group: ShardGroup) -> torch.Tensor:
    """The whole input of a layer that computes a shard of its output."""
    if type(value) is PartialTensor:
        return comm.all_gather_for_shards(value.local, value.placement, group)
    return comm.replicate(value, group)


def _layer_output(term: torch.Tensor, role: Role, group: ShardGroup) -> torch.Tensor:
    """The output of a layer of which each worker computes one term of a sum."""
    if role.sequence and term.dim() >= 3 and term.shape[1] % group.size == 0:
        placement = Placement(1, (term.shape[1],))
        return PartialTensor.of(comm.reduce_scatter(term, placement, group), placement, group)
    return comm.all_reduce(term, group)


def _column_linear(layer: nn.Module, role: Role, group: ShardGroup, value: torch.Tensor) -> torch.Tensor:
    bias: Any = layer._parameters.get("bias")
    return _column_output(multiply(layer, _layer_input(value, group), bias), role, group)


def _column_output(out: torch.Tensor, role: Role, group: ShardGroup) -> torch.Tensor:
    """The output of a layer of which each worker computes some of the last dimension."""
    placement = Placement(out.dim() - 1, role.blocks)
    return comm.all_gather(out, placement, group) if role.gathered else PartialTensor.of(out, placement, group)


def _row_linear(layer: nn.Module, role: Role, group: ShardGroup, value: torch.Tensor) -> torch.Tensor:
    shard = _input_shard(value, Placement(value.dim() - 1, role.blocks), group)
    out = _layer_output(multiply(layer, shard), role, group)
    bias = layer._parameters.get("bias")
    return out if bias is None else out + bias.to(out.dtype)  # autocast changes the output's dtype


def _input_shard(value: torch.Tensor, placement: Placement, group: ShardGroup) -> torch.Tensor:
    """This worker's shard of a layer's input."""
    if type(value) is PartialTensor:
        if value.placement == placement:
            return value.local
        value = value.full_tensor()
    return comm.take_shard(value, placement, group)


def _column_embedding(layer: nn.Embedding, role: Role, group: ShardGroup, value: torch.Tensor) -> torch.Tensor:
    return _column_output(_look_up(layer, full_tensor(value), layer.padding_idx), role, group)


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
    return _layer_output(out.masked_fill(others.unsqueeze(-1), 0.0), role, group)


def _channel_dim(layer: _ConvNd, value: torch.Tensor) -> int:
    return value.dim() - len(layer.kernel_size) - 1


def _column_conv(layer: _ConvNd, role: Role, group: ShardGroup, value: torch.Tensor) -> torch.Tensor:
    out = layer._conv_forward(_layer_input(value, group), layer.weight, layer.bias)
    return PartialTensor.of(out, Placement(_channel_dim(layer, out), role.blocks), group)


def _row_conv(layer: _ConvNd, role: Role, group: ShardGroup, value: torch.Tensor) -> torch.Tensor:
    shard = _input_shard(value, Placement(_channel_dim(layer, value), role.blocks), group)
    out = comm.all_reduce(layer._conv_forward(shard, layer.weight, None), group)
    if layer.bias is None:
        return out
    return out + layer.bias.to(out.dtype).view(-1, *[1] * len(layer.kernel_size))


def _channel_conv(layer: _ConvNd, role: Role, group: ShardGroup, value: torch.Tensor) -> torch.Tensor:
    dim = _channel_dim(layer, value)
    inputs = Placement(dim, tuple(block * layer.in_channels // layer.out_channels for block in role.blocks))
    out = layer._conv_forward(_input_shard(value, inputs, group), layer.weight, layer.bias)
    return PartialTensor.of(out, Placement(dim, role.blocks), group)


def _channels(layer: nn.Module, role: Role, group: ShardGroup, value: torch.Tensor) -> torch.Tensor:
    """`forward` of a norm: the layer's own, on this worker's channels."""
    placement = Placement(1, role.blocks)
    return PartialTensor.of(type(layer).forward(layer, _input_shard(value, placement, group)), placement, group)


# -- attention -------------------------------------------------------------------------------------------------------


def _attention(
    layer: nn.MultiheadAttention,
    role: Role,
    group: ShardGroup,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`forward` of torch's attention on this worker's heads."""
    heads = layer.num_heads // group.size
    inputs = {id(one): _layer_input(one, group) for one in (query, key, value)}
    query, key, value = (inputs[id(one)] for one in (query, key, value))
    single = query.dim() == 2
    if single:
        query, key, value = (one.unsqueeze(0) for one in (query, key, value))
    elif not layer.batch_first:
        query, key, value = (one.transpose(0, 1) for one in (query, key, value))
    q, k, v = (one.unflatten(-1, (heads, -1)).transpose(1, 2) for one in _project(layer, query, key, value))
    mask = _mask(full_tensor(attn_mask), full_tensor(key_padding_mask), q, heads, group)
    probability = layer.dropout if layer.training else 0.0
    if probability:
        group.swap_random()
    try:
        out, weights = _attend(q, k, v, mask, probability, need_weights)
    finally:
        if probability:
            group.swap_random()
    out = functional.linear(out.transpose(1, 2).flatten(2), layer.out_proj.weight)
    if single:
        out = out.squeeze(0)
    elif not layer.batch_first:
        out = out.transpose(0, 1)
    out = _layer_output(out, role, group)
    if layer.out_proj.bias is not None:
        out = out + layer.out_proj.bias.to(out.dtype)  # autocast changes the output's dtype
    if weights is not None:
        if average_attn_weights:
            weights = comm.all_reduce(weights.sum(1) / layer.num_heads, group)
        else:
            weights = comm.all_gather(weights, Placement(1, (layer.num_heads,)), group)
        weights = weights.squeeze(0) if single else weights
    return out, weights


def _project(
    layer: nn.MultiheadAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> list[torch.Tensor]:
    bias = layer.in_proj_bias
    biases: Any = (None, None, None) if bias is None else bias.chunk(3)
    if layer._qkv_same_embed_dim:
        if query is key and key is value:
            return list(functional.linear(query, layer.in_proj_weight, bias).chunk(3, -1))
        weights: Any = layer.in_proj_weight.chunk(3)
    else:
        weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    return [
        functional.linear(one, weight, own)
        for one, weight, own in zip((query, key, value), weights, biases, strict=True)
    ]


def _mask(
    mask: torch.Tensor | None, padding: torch.Tensor | None, q: torch.Tensor, heads: int, group: ShardGroup
) -> torch.Tensor | None:
    """The additive mask: a mask of numbers itself; minus infinity where a mask of flags is true."""
    parts: list[torch.Tensor] = []
    if mask is not None:
        if mask.dim() == 3:  # one per sample and head
            mask = mask.unflatten(0, (q.shape[0], -1))[:, group.rank * heads : (group.rank + 1) * heads]
        parts.append(_additive(mask, q.dtype))
    if padding is not None:
        padding = padding.unsqueeze(0) if padding.dim() == 1 else padding
        parts.append(_additive(padding, q.dtype)[:, None, None, :])
    return None if not parts else parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, float("-inf")) if mask.dtype == torch.bool else mask


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, probability: float, need_weights: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not need_weights:
        return functional.scaled_dot_product_attention(q, k, v, mask, dropout_p=probability), None
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    weights = (scores if mask is None else scores + mask).softmax(-1)
    weights = functional.dropout(weights, probability) if probability else weights
    return weights @ v, weights
