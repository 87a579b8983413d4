"""torch's MultiheadAttention, with some of its heads on each worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from paceline.tensor_parallel.comm_functions import ShardSpace, gathered, summed
from paceline.tensor_parallel.partial_tensor import whole
from paceline.tensor_parallel.placement import Placement
from paceline.tensor_parallel.roles import Role, entering, leaving


def attending(role: Role, space: ShardSpace) -> Callable[..., Any]:
    """Its forward."""

    def forward(
        self: nn.MultiheadAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        heads = self.num_heads // space.size
        inputs = {id(one): entering(one, space) for one in (query, key, value)}
        query, key, value = (inputs[id(one)] for one in (query, key, value))
        single = query.dim() == 2
        if single:
            query, key, value = (one.unsqueeze(0) for one in (query, key, value))
        elif not self.batch_first:
            query, key, value = (one.transpose(0, 1) for one in (query, key, value))
        q, k, v = (_in_heads(one, heads) for one in _projected(self, query, key, value))
        mask = _mask(whole(attn_mask), whole(key_padding_mask), q, k, heads, space)
        chance = self.dropout if self.training else 0.0
        if chance:
            space.swap_random()
        try:
            out, weights = _attended(q, k, v, mask, chance, need_weights)
        finally:
            if chance:
                space.swap_random()
        out = functional.linear(out.transpose(1, 2).flatten(2), self.out_proj.weight)
        if single:
            out = out.squeeze(0)
        elif not self.batch_first:
            out = out.transpose(0, 1)
        out = leaving(out, role, space)
        if self.out_proj.bias is not None:
            out = out + self.out_proj.bias.to(out.dtype)  # under autocast it is of another
        if weights is not None:
            weights = _shown(weights, self.num_heads, average_attn_weights, space)
            weights = weights.squeeze(0) if single else weights
        return out, weights

    return forward


def _projected(
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


def _in_heads(value: torch.Tensor, heads: int) -> torch.Tensor:
    shape = value.shape
    return value.view(shape[0], shape[1], heads, shape[2] // heads).transpose(1, 2)


def _mask(
    mask: torch.Tensor | None,
    padding: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    heads: int,
    space: ShardSpace,
) -> torch.Tensor | None:
    """What is added to the scores: for masks of numbers themselves, for masks of flags minus infinity where true."""
    parts: list[torch.Tensor] = []
    if mask is not None:
        if mask.dim() == 3:  # one per sample and head
            mask = mask.unflatten(0, (q.shape[0], -1))[:, space.rank * heads : (space.rank + 1) * heads]
        parts.append(_as_numbers(mask, q.dtype))
    if padding is not None:
        padding = padding.unsqueeze(0) if padding.dim() == 1 else padding
        parts.append(_as_numbers(padding, q.dtype)[:, None, None, :])
    return None if not parts else parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _as_numbers(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, float("-inf")) if mask.dtype == torch.bool else mask


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, chance: float, need_weights: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not need_weights:
        return functional.scaled_dot_product_attention(q, k, v, mask, dropout_p=chance), None
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    weights = (scores if mask is None else scores + mask).softmax(-1)
    weights = functional.dropout(weights, chance) if chance else weights
    return weights @ v, weights


def _shown(weights: torch.Tensor, heads: int, average: bool, space: ShardSpace) -> torch.Tensor:
    if average:
        return summed(weights.sum(1) / heads, space)
    return gathered(weights, Placement(1, (heads,)), space)
