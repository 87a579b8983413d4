"""torch's MultiheadAttention with some of its heads on each worker."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from paceline.tensor_parallel.comm_functions import ShardGroup, all_gather, all_reduce
from paceline.tensor_parallel.partial_tensor import full_tensor
from paceline.tensor_parallel.placement import Placement
from paceline.tensor_parallel.roles import Role, layer_input, layer_output


def attention_forward(
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
    """The layer's `forward` on this worker's heads."""
    heads = layer.num_heads // group.size
    inputs = {id(one): layer_input(one, group) for one in (query, key, value)}
    query, key, value = (inputs[id(one)] for one in (query, key, value))
    single = query.dim() == 2
    if single:
        query, key, value = (one.unsqueeze(0) for one in (query, key, value))
    elif not layer.batch_first:
        query, key, value = (one.transpose(0, 1) for one in (query, key, value))
    q, k, v = (_split_heads(one, heads) for one in _project(layer, query, key, value))
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
    out = layer_output(out, role, group)
    if layer.out_proj.bias is not None:
        out = out + layer.out_proj.bias.to(out.dtype)  # autocast changes the output's dtype
    if weights is not None:
        weights = _weights(weights, layer.num_heads, average_attn_weights, group)
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


def _split_heads(value: torch.Tensor, heads: int) -> torch.Tensor:
    shape = value.shape
    return value.view(shape[0], shape[1], heads, shape[2] // heads).transpose(1, 2)


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


def _weights(weights: torch.Tensor, heads: int, average: bool, group: ShardGroup) -> torch.Tensor:
    if average:
        return all_reduce(weights.sum(1) / heads, group)
    return all_gather(weights, Placement(1, (heads,)), group)
