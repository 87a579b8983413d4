"""The outputs of a model's last layers in the graph of a loss, and what the loss does with them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge


def nodes(names: str) -> frozenset[str]:
    """The names of autograd's nodes of these operations."""
    return frozenset(f"{name}Backward{number}" for name in names.split() for number in range(3))


LEAF = "torch::autograd::AccumulateGrad"
_LAYERS = nodes(
    "Addmm Mm Bmm Baddbmm Linear MkldnnLinear Convolution MkldnnConvolution CudnnConvolution Embedding EmbeddingBag "
    "NativeLayerNorm NativeGroupNorm NativeBatchNorm CudnnBatchNorm FusedRmsNorm PreluKernel Add Mul"
)
"""Operations of layers: of parameters and data."""
_BY_INDEX = nodes("Embedding EmbeddingBag Index IndexSelect Gather Take MaskedSelect")
"""Operations to which data comes as indices, of which autograd knows nothing."""
_WITH_NUMBERS = nodes("Mul Div Add Sub Rsub Pow")
"""Operations that may have a number as an input, of which autograd knows nothing either."""
_MOST = 4096
"""Operations between the loss and the outputs after which the search is given up."""
_MOST_BELOW = 100_000
"""Operations of the model after which it is."""
_DEPTH = 32
"""Operations on a parameter before a layer uses it."""


class LayerOutputs(NamedTuple):
    """The part of a graph between a loss and the outputs of layers."""

    edges: list[GradientEdge]
    """The outputs."""
    inner: list[Any]
    """The nodes in between."""


class _Marked(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()  # not a view, which could not be changed in place

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def marked(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as an output of the model: hooks below it, which may gather parameters, are not run for a look."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    result: torch.Tensor = _Marked.apply(tensor)
    return result


def shape_of(node: Any, number: int = 0) -> tuple[int, ...]:
    """The shape of one of the results of a node's operation."""
    return tuple(node._input_metadata[number].shape)


def edge_shape(edge: GradientEdge) -> tuple[int, ...]:
    """The shape of the tensor of an edge."""
    return shape_of(edge.node, edge.output_nr)


def find_outputs(root: Any) -> LayerOutputs | None:
    """Searches a graph from the loss down to the first layers; None if it cannot be looked at.

    A function of the user's own may do more in its backward pass than compute, so it must not be run for a look.
    """
    found = LayerOutputs([], [])
    seen, inner, waiting = {(root, 0)}, set(), [(root, 0)]
    while waiting:
        node, number = waiting.pop()
        if _is_output(node):
            found.edges.append(GradientEdge(node, number))
            continue
        if len(seen) > _MOST or isinstance(node, BackwardCFunction):
            return None
        if node not in inner:
            found.inner.append(node)
            inner.add(node)
        fresh = {one for one in node.next_functions if one[0] is not None} - seen
        seen |= fresh
        waiting += fresh
    return _first(found)


def _first(found: LayerOutputs) -> LayerOutputs | None:
    """Without outputs from which another of the outputs was computed: derivatives would go through the model."""
    outputs = {edge.node for edge in found.edges}
    if len(outputs) < 2:
        return found
    waiting = [following for node in outputs for following, _ in node.next_functions if following is not None]
    below = set(waiting)
    while waiting and len(below) < _MOST_BELOW:
        fresh = {one for one, _ in waiting.pop().next_functions if one is not None} - below
        below |= fresh
        waiting += fresh
    if waiting:
        return None
    return found._replace(edges=[edge for edge in found.edges if edge.node not in below])


def _is_output(node: Any) -> bool:
    """True for a layer's operation, of parameters of more than one element and data, and for a tensor made by hand."""
    name = node.name()
    if name == LEAF:
        return not isinstance(node.variable, torch.nn.Parameter)
    if isinstance(node, BackwardCFunction):
        # A compiled model; a marked output; a sum or a gathering over workers that share a layer.
        module: str = type(node)._forward_cls.__module__  # type: ignore[attr-defined]
        return name.startswith("CompiledFunction") or module.startswith("paceline.")
    if name not in _LAYERS:
        return False
    inputs = [one for one, _ in node.next_functions]
    of_parameters = [one is not None and _of_parameters(one) for one in inputs]
    wide = any(own and max(shape_of(one), default=1) > 1 for one, own in zip(inputs, of_parameters, strict=True))
    return wide and (not all(of_parameters) or name in _BY_INDEX)


def _of_parameters(node: Any, depth: int = 0) -> bool:
    """True if a tensor is computed from parameters alone."""
    name = node.name()
    if name == LEAF:
        return isinstance(node.variable, torch.nn.Parameter)
    inputs = [one for one, _ in node.next_functions]
    if depth > _DEPTH or not inputs or name in _BY_INDEX:
        return False
    if None in inputs and (name not in _WITH_NUMBERS or _with_data(node)):
        return False
    return all(one is None or _of_parameters(one, depth + 1) for one in inputs)


def _with_data(node: Any) -> bool:
    """True if an operation on a parameter has data as its other input."""
    saved = (getattr(node, name, None) for name in ("_saved_self", "_saved_other"))
    if any(isinstance(one, torch.Tensor) and one.dim() and not one.requires_grad for one in saved):
        return True
    return shape_of(node) != next(shape_of(one, number) for one, number in node.next_functions if one is not None)
