"""Layers of which each worker has a part: their parameters cut, and what they then do.

| role | layers | each worker has | what goes in | what comes out |
|---|---|---|---|---|
| column | Linear, Conv, Embedding | some of the outputs | the whole | parts |
| row | Linear, Conv | some of the inputs | parts | the whole, as a sum |
| vocabulary | Embedding | some of the entries | the whole | the whole, as a sum |
| channels | BatchNorm, GroupNorm, depthwise Conv | some of the channels | parts | parts |
| heads | MultiheadAttention | some of the heads | the whole | the whole, as a sum |
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from paceline.tensor_parallel.attention import attending
from paceline.tensor_parallel.comm_functions import ShardSpace, sliced, summed
from paceline.tensor_parallel.partial_tensor import PartialTensor, whole
from paceline.tensor_parallel.placement import Placement
from paceline.tensor_parallel.roles import Role, entering, leaving

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class LayerPiece(NamedTuple):
    """A parameter or buffer of a layer, and how it is cut."""

    name: str
    placement: Placement


def pieces(layer: nn.Module, role: Role) -> list[LayerPiece]:
    """What of a layer is cut; all else of it stays whole."""
    blocks, found = role.blocks, []

    def add(name: str, dim: int, own: tuple[int, ...] = blocks) -> None:
        if layer._parameters.get(name) is not None or layer._buffers.get(name) is not None:
            found.append(LayerPiece(name, Placement(dim, own)))

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


def install(layer: nn.Module, role: Role, space: ShardSpace) -> Callable[[], None]:
    """Let a layer, whose parameters are cut already, do its part; returns what undoes it."""
    layer.forward = types.MethodType(_forward(layer, role, space), layer)
    groups = "num_groups" if isinstance(layer, nn.GroupNorm) else "groups"
    shared = role.name == "channels" and isinstance(layer, (nn.GroupNorm, _ConvNd))
    if shared:
        setattr(layer, groups, getattr(layer, groups) // space.size)

    def undo() -> None:
        vars(layer).pop("forward", None)
        if shared:
            setattr(layer, groups, getattr(layer, groups) * space.size)

    return undo


def _forward(layer: nn.Module, role: Role, space: ShardSpace) -> Callable[..., Any]:
    if isinstance(layer, nn.Linear):
        return _column_linear(role, space) if role.name == "column" else _row_linear(role, space)
    if isinstance(layer, nn.Embedding):
        return _column_embedding(role, space) if role.name == "column" else _vocabulary(role, space)
    if isinstance(layer, nn.MultiheadAttention):
        return attending(role, space)
    if isinstance(layer, CONVOLUTIONS):
        return {"column": _column_conv, "row": _row_conv, "channels": _channel_conv}[role.name](role, space)
    return _channels(role, space)


def _column_linear(role: Role, space: ShardSpace) -> Callable[..., Any]:
    def forward(self: nn.Linear, value: torch.Tensor) -> torch.Tensor:
        out = functional.linear(entering(value, space), self.weight, self.bias)
        return PartialTensor.of(out, Placement(out.dim() - 1, role.blocks), space)

    return forward


def _row_linear(role: Role, space: ShardSpace) -> Callable[..., Any]:
    def forward(self: nn.Linear, value: torch.Tensor) -> torch.Tensor:
        part = _input_part(value, Placement(value.dim() - 1, role.blocks), space)
        out = leaving(functional.linear(part, self.weight), role, space)
        return out if self.bias is None else out + self.bias.to(out.dtype)  # under autocast it is of another

    return forward


def _input_part(value: torch.Tensor, placement: Placement, space: ShardSpace) -> torch.Tensor:
    if type(value) is PartialTensor:
        if value.placed == placement:
            return value.local
        value = value.whole()
    return sliced(value, placement, space)


def _column_embedding(role: Role, space: ShardSpace) -> Callable[..., Any]:
    def forward(self: nn.Embedding, value: torch.Tensor) -> torch.Tensor:
        out = _looked_up(self, whole(value), self.padding_idx)
        return PartialTensor.of(out, Placement(out.dim() - 1, role.blocks), space)

    return forward


def _looked_up(layer: nn.Embedding, value: torch.Tensor, padding: int | None) -> torch.Tensor:
    return functional.embedding(
        value, layer.weight, padding, layer.max_norm, layer.norm_type, layer.scale_grad_by_freq, layer.sparse
    )


def _vocabulary(role: Role, space: ShardSpace) -> Callable[..., Any]:
    def forward(self: nn.Embedding, value: torch.Tensor) -> torch.Tensor:
        value = whole(value)
        own = self.weight.shape[0]
        first = own * space.rank
        others = (value < first) | (value >= first + own)
        padding = self.padding_idx
        if padding is not None:
            padding = padding - first if first <= padding < first + own else None
        out = _looked_up(self, (value - first).masked_fill(others, 0), padding)
        return leaving(out.masked_fill(others.unsqueeze(-1), 0.0), role, space)

    return forward


def _convolved(
    layer: _ConvNd, value: torch.Tensor, bias: torch.Tensor | None, groups: int | None = None
) -> torch.Tensor:
    """As the layer's own forward, with this bias."""
    kind: Any = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}[len(layer.kernel_size)]
    padding: Any = layer.padding
    if layer.padding_mode != "zeros":
        value = functional.pad(value, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        padding = 0
    out: torch.Tensor = kind(
        value, layer.weight, bias, layer.stride, padding, layer.dilation, layer.groups if groups is None else groups
    )
    return out


def _channel_dim(layer: _ConvNd, value: torch.Tensor) -> int:
    return value.dim() - len(layer.kernel_size) - 1


def _column_conv(role: Role, space: ShardSpace) -> Callable[..., Any]:
    def forward(self: _ConvNd, value: torch.Tensor) -> torch.Tensor:
        out = _convolved(self, entering(value, space), self.bias)
        return PartialTensor.of(out, Placement(_channel_dim(self, out), role.blocks), space)

    return forward


def _row_conv(role: Role, space: ShardSpace) -> Callable[..., Any]:
    def forward(self: _ConvNd, value: torch.Tensor) -> torch.Tensor:
        dim = _channel_dim(self, value)
        out = summed(_convolved(self, _input_part(value, Placement(dim, role.blocks), space), None), space)
        if self.bias is None:
            return out
        return out + self.bias.to(out.dtype).view(-1, *[1] * len(self.kernel_size))

    return forward


def _channel_conv(role: Role, space: ShardSpace) -> Callable[..., Any]:
    def forward(self: _ConvNd, value: torch.Tensor) -> torch.Tensor:
        dim = _channel_dim(self, value)
        out = _convolved(self, _input_part(value, Placement(dim, _inputs(self, role, space)), space), self.bias)
        return PartialTensor.of(out, Placement(dim, role.blocks), space)

    return forward


def _inputs(layer: _ConvNd, role: Role, space: ShardSpace) -> tuple[int, ...]:
    """Blocks of the inputs of a convolution in groups, of whose outputs the role's blocks are."""
    return tuple(block * layer.in_channels // layer.out_channels for block in role.blocks)


def _channels(role: Role, space: ShardSpace) -> Callable[..., Any]:
    """Norms: the layer's own forward on this worker's channels."""

    def forward(self: nn.Module, value: torch.Tensor) -> torch.Tensor:
        placement = Placement(1, role.blocks)
        return PartialTensor.of(type(self).forward(self, _input_part(value, placement, space)), placement, space)

    return forward
