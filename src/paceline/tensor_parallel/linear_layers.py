"""Linear layers: torch's own, and others, whose weight may have the inputs first, as in GPT-2's `Conv1D`."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.nn import functional

_CLOSE = 1e-3
"""Allowed difference by rounding."""
_orders: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
"""Cache of `_order`."""


def is_linear(layer: nn.Module) -> bool:
    """True if a layer computes the product of its input and its weight, and adds its bias if it has one."""
    return bool(_order(layer))


def is_own_linear(layer: nn.Module) -> bool:
    """True if that is so by a `forward` that is not torch's."""
    return type(layer).forward is not nn.Linear.forward and is_linear(layer)


def _order(layer: nn.Module) -> str:
    """The order of the weight's dimensions, "oi" or "io" for outputs and inputs; empty if the layer is not linear."""
    if layer not in _orders:
        if type(layer).forward is nn.Linear.forward:
            _orders[layer] = "oi"
        else:
            _orders[layer] = _found_order(layer) if _may_be_linear(layer) else ""
    return _orders[layer]


def _may_be_linear(layer: nn.Module) -> bool:
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    more = set(layer._parameters) - {"weight", "bias"} or layer._modules or layer._buffers or "forward" in vars(layer)
    if weight is None or more or type(layer).__module__.startswith("torch.nn"):
        return False
    return weight.dim() == 2 and weight.is_floating_point() and (bias is None or bias.dim() == 1)


def _found_order(layer: nn.Module) -> str:
    """Finds the order by calling the layer with random inputs and weights."""
    generator = torch.Generator().manual_seed(0)
    drawn: dict[str, torch.Tensor] = {
        name: torch.rand(one.shape, generator=generator).to(one) for name, one in layer.named_parameters()
    }
    for order, weight in (("io", drawn["weight"]), ("oi", drawn["weight"].t())):
        value = torch.rand(2, 3, len(weight), generator=generator).to(weight)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            try:
                found: Any = torch.func.functional_call(layer, drawn, (value,))
                wanted = value @ weight + drawn.get("bias", 0.0)
            except Exception:  # of a class that is no linear layer, or has the other order
                continue
        if isinstance(found, torch.Tensor) and found.shape == wanted.shape and torch.allclose(found, wanted, _CLOSE):
            return order
    return ""


def features(layer: nn.Module) -> tuple[int, int]:
    """Numbers of inputs and outputs."""
    first, second = layer.weight.shape  # type: ignore[misc]
    return (first, second) if output_dim(layer) else (second, first)


def output_dim(layer: nn.Module) -> int:
    """The dimension of the weight that has the outputs."""
    return 1 if _order(layer) == "io" else 0


def multiply(layer: nn.Module, value: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The layer's product of a value with its weight, or with this worker's shard of it."""
    weight: Any = layer.weight
    return functional.linear(value, weight.t() if output_dim(layer) else weight, bias)
