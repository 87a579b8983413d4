"""The layers of a model that can be sharded: which they are, their sizes, and how their weights are cut."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from paceline.tensor_parallel.call_graph import GraphCall, Ref
from paceline.tensor_parallel.layers import Role
from paceline.tensor_parallel.linear_layers import features, is_linear, is_own_linear, output_dim

_CALLS: dict[str, type[nn.Module]] = {
    "linear": nn.Linear,
    "embedding": nn.Embedding,
    "conv1d": nn.Conv1d,
    "conv2d": nn.Conv2d,
    "conv3d": nn.Conv3d,
    "batch_norm": _BatchNorm,
    "group_norm": nn.GroupNorm,
    "multi_head_attention_forward": nn.MultiheadAttention,
}
"""Functions that layers of torch call in their `forward`."""
_PRODUCTS = {"addmm": 1, "matmul": 0, "__matmul__": 0, "mm": 0}
"""Functions that other linear layers call, and the position of the input among their arguments."""


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Layers that can be sharded, by name: those of torch's own classes with their own `forward`, and linear ones."""
    return {name: module for name, module in model.named_modules() if _is_torchs(module) or is_own_linear(module)}


def _is_torchs(module: nn.Module) -> bool:
    for kind in _CALLS.values():
        own = type(module).forward is kind.forward or getattr(type(module), "by_channel", False)
        if isinstance(module, kind) and own and "forward" not in vars(module) and _plain(module):
            return True
    return False


def _plain(module: nn.Module) -> bool:
    """True if its weight is a parameter of its own, not computed from others."""
    if isinstance(module, nn.MultiheadAttention):
        return module.bias_k is None and not module.add_zero_attn
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        return False
    return isinstance(module, (_BatchNorm, nn.GroupNorm)) or "weight" in module._parameters


def layer_input(call: GraphCall, layer: nn.Module) -> int | None:
    """The number of the tensor that a layer is given, if a call inside of the layer is its computation."""
    position = 0 if isinstance(layer, _CALLS.get(call.name, ())) else None
    if position is None and is_own_linear(layer):
        position = _PRODUCTS.get(call.name)
    argument = None if position is None else call.args[position]
    return argument.number if isinstance(argument, Ref) else None


def outputs_of(layer: nn.Module) -> int:
    if isinstance(layer, nn.Embedding):
        return layer.embedding_dim
    if isinstance(layer, _ConvNd):
        return layer.out_channels
    return features(layer)[1]


def inputs_of(layer: nn.Module) -> int:
    return layer.in_channels if isinstance(layer, _ConvNd) else features(layer)[0]


def weight_cut(layer: nn.Module, role: Role) -> tuple[int, tuple[int, ...]]:
    """The dimension and the blocks by which a weight is cut."""
    if role.name == "replicated":
        return -1, ()
    column = 1 if isinstance(layer, nn.Embedding) else output_dim(layer) if is_linear(layer) else 0
    return {"column": column, "row": 1 - column, "vocabulary": 0}.get(role.name, 0), role.blocks
