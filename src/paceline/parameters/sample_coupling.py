"""Finds losses in which the samples of a minibatch meet: compared with each other, or selected among.

A worker has its part of a batch, so such a loss is another one than that of one process, and no weight of its gradient
mends that. The graph between the loss and the outputs of the last layers shows it:

1. In a sum over samples, the gradient of one sample's outputs does not depend on another's: second derivatives vanish.
2. A maximum, a sort, the k largest, or items picked by their indices are among items of several samples.
3. Distances of all pairs of samples have no second derivatives, and those of their differences vanish in a hinge.

All is confirmed by derivatives of a random half of the samples with respect to the other half.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from paceline.parameters.layer_outputs import LayerOutputs, edge_shape, find_outputs, nodes, shape_of

_SELECTIONS = nodes("Topk Sort Kthvalue Median Nanmedian Mode Max Min Amax Amin Aminmax Cummax Cummin")
_BY_INDEX = nodes("Index IndexSelect Gather Take")
_DISTANCES, _OWN_DISTANCES = nodes("Cdist EuclideanDist"), nodes("Pdist")
"""Distances of the rows of two tensors, and of one."""
_HINGES = nodes("Relu Clamp ClampMin ClampMax Threshold LeakyRelu Abs Maximum Minimum Hardtanh L1Loss SmoothL1Loss")
_LARGEST = 1 << 22
"""Elements of the outputs above which second derivatives would take too much memory."""
_MOST = 8
"""Selections and pairs that are looked at."""
_ZERO = 1e-5
"""Relative size below which a derivative is taken for rounding."""


class Coupling(enum.Enum):
    """What a loss does with the samples of a minibatch."""

    NONE = "treats each sample by itself"
    COMPARES = "compares the samples of a batch with each other"
    SELECTS = "selects among the samples of a batch"


class CouplingFound(NamedTuple):
    """The result of a look at a loss."""

    coupling: Coupling = Coupling.NONE
    rows: int = 1
    """Rows of the outputs per sample; if not 1, they may be of samples of unlike lengths after all."""


def find_coupling(loss: torch.Tensor, samples: int, seed: int, *, rows_only: bool = False) -> CouplingFound:
    """What a loss does with so many samples; NONE where that cannot be seen. Its graph stays as it is.

    rows_only: samples are rows of the outputs; another dimension of this size is none of samples.
    """
    try:
        found = find_outputs(loss.grad_fn)
        halves = [] if found is None else list(_Halves.all(found, samples, seed, rows_only=rows_only))
        if found is None or not halves:
            return CouplingFound()
        return CouplingFound(_look(loss, found, halves), max(half.rows for half in halves))
    except (RuntimeError, NotImplementedError, AttributeError, IndexError):
        return CouplingFound()  # an operation has no second derivative, or a saved tensor was changed since


def _look(loss: torch.Tensor, found: LayerOutputs, halves: list[_Halves]) -> Coupling:
    probe = _Probe(found.edges, halves)
    selections: dict[Any, list[Any]] = {}
    for node in found.inner:
        if node.name() in _SELECTIONS or _picks(node):
            selections.setdefault((node.name(), node.next_functions[0]), []).append(node)
    for alike in list(selections.values())[:_MOST]:
        if probe.meets(alike[0].next_functions[0], _along(alike[0])) and probe.is_used(loss, alike):
            return Coupling.SELECTS
    hinged = any(node.name() in _HINGES for node in found.inner)
    for node in [one for one in found.inner if one.name() in _DISTANCES or (hinged and _crosses(one))][:_MOST]:
        if probe.meets((node, 0), [-1]):
            return Coupling.COMPARES
    for node in [one for one in found.inner if one.name() in _OWN_DISTANCES][:_MOST]:
        if probe.meets(node.next_functions[0], [0]):
            return Coupling.COMPARES
    if sum(math.prod(edge_shape(edge)) for edge in found.edges) <= _LARGEST and probe.depends(loss):
        return Coupling.COMPARES
    return Coupling.NONE


class _Halves:
    """Two random halves of the samples, as rows of the outputs, if samples are in this dimension of them."""

    def __init__(self, found: LayerOutputs, samples: int, seed: int, dim: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        first = torch.zeros(samples, dtype=torch.bool)
        first[torch.randperm(samples, generator=generator)[: samples // 2]] = True
        self.dims: list[int | None] = []
        """Per output, the dimension of its samples."""
        self.masks: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.rows = 1
        for edge in found.edges:
            shape = edge_shape(edge)
            dims = _sample_dims(shape, samples)
            own = dim if dim in dims else dims[0] if dims else None
            self.dims.append(own)
            number = torch.arange(shape[own] if own is not None else 0)
            rows = max(1, len(number) // samples)
            self.rows = max(self.rows, rows)
            # The rows of a sample are next to each other, or one in every round: both must say which half it is.
            beside, apart = first[number // rows], first[number % samples]
            self.masks.append((beside & apart, ~beside & ~apart))

    @classmethod
    def all(cls, found: LayerOutputs, samples: int, seed: int, *, rows_only: bool) -> Iterator[_Halves]:
        """For each dimension in which the outputs may have their samples."""
        dims = {dim for edge in found.edges for dim in _sample_dims(edge_shape(edge), samples)}
        if rows_only:
            dims &= {0}
        yield from (cls(found, samples, seed, dim) for dim in sorted(dims))

    def pick(self, number: int, tensor: torch.Tensor, half: int) -> torch.Tensor | None:
        """The rows of one half, of a tensor like one of the outputs."""
        dim = self.dims[number]
        return None if dim is None else tensor.movedim(dim, 0)[self.masks[number][half].to(tensor.device)]


def _sample_dims(shape: Sequence[int], samples: int) -> list[int]:
    """Dimensions in which a tensor may have its samples: the first, or one of their number."""
    return [dim for dim, size in enumerate(shape) if size and (size == samples or (not dim and size % samples == 0))]


class _Probe:
    """Derivatives with respect to the outputs of the last layers."""

    def __init__(self, edges: list[GradientEdge], halves: list[_Halves]) -> None:
        self._edges, self._halves = edges, halves

    def depends(self, loss: torch.Tensor) -> bool:
        """True if the gradient of one half of the samples depends on the outputs of the other half."""
        gradients = torch.autograd.grad(loss, self._edges, create_graph=True, allow_unused=True)
        return all(self._depends(gradients, halves) for halves in self._halves)

    def _depends(self, gradients: Sequence[torch.Tensor | None], halves: _Halves) -> bool:
        total = torch.zeros(())
        for number, gradient in enumerate(gradients):
            if gradient is not None and gradient.requires_grad:
                rows = halves.pick(number, gradient, 0)
                if rows is not None:
                    total = total + (rows * _weights(rows)).sum().to(total.device)
        if not total.requires_grad:
            return False
        second = torch.autograd.grad(total, self._edges, retain_graph=True, allow_unused=True)
        return _has(halves, second, 1)

    def meets(self, result: tuple[Any, int], dims: list[int]) -> bool:
        """True if items of a node's result along these dimensions, at one place of the others, are of both halves."""
        node, number = result
        metadata, shape = node._input_metadata[number], shape_of(node, number)
        weights = torch.zeros(shape, dtype=metadata.dtype, device=metadata.device)
        along = {dim % len(shape) for dim in dims}
        place = tuple(slice(None) if dim in along else size // 2 for dim, size in enumerate(shape))
        weights[place] = _weights(weights[place])
        found = self._passed([GradientEdge(node, number)], [weights])
        return all(_has(halves, found, 0) and _has(halves, found, 1) for halves in self._halves)

    def is_used(self, loss: torch.Tensor, alike: list[Any]) -> bool:
        """True if the loss depends on the values that nodes select from one tensor.

        A maximum that is subtracted for numerical reasons makes no difference.
        """
        selected = [GradientEdge(node, 0) for node in alike]
        gradients = torch.autograd.grad(loss, [*selected, *self._edges], retain_graph=True, allow_unused=True)
        own = [(one, gradient) for one, gradient in zip(selected, gradients, strict=False) if gradient is not None]
        passed = self._passed([one for one, _ in own], [gradient for _, gradient in own]) if own else []
        return _largest(passed) > _ZERO * _largest(gradients[len(selected) :])

    def _passed(self, tensors: list[GradientEdge], gradients: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the outputs, if tensors computed from them have these."""
        return torch.autograd.grad(tensors, self._edges, gradients, retain_graph=True, allow_unused=True)


def _largest(tensors: Sequence[torch.Tensor | None]) -> float:
    """The largest magnitude of an element."""
    return max((float(one.abs().max()) for one in tensors if one is not None and one.numel()), default=0.0)


def _has(halves: _Halves, gradients: Sequence[torch.Tensor | None], half: int) -> bool:
    """True if gradients of the outputs have values for one half of the samples."""
    whole = _largest(gradients)
    if not 0.0 < whole < math.inf:
        return False
    rows = [halves.pick(number, one, half) for number, one in enumerate(gradients) if one is not None]
    return _largest(rows) > _ZERO * whole


def _weights(like: torch.Tensor) -> torch.Tensor:
    """Numbers between 0.5 and 1.5 that follow no pattern, without a change to torch's generator."""
    generator = torch.Generator().manual_seed(like.numel())
    return (torch.rand(like.shape, generator=generator) + 0.5).to(like)


def _picks(node: Any) -> bool:
    """True if items are picked by indices that leave some out, and are not in the order of the items."""
    if node.name() not in _BY_INDEX:
        return False
    given = node._saved_indices if hasattr(node, "_saved_indices") else [node._saved_index]
    indices = [index for index in given if index is not None]
    if len(indices) != 1 or indices[0].dtype != torch.int64 or indices[0].dim() != 1:
        return False
    index, shape = indices[0], shape_of(*node.next_functions[0])
    fewer = index.numel() < math.prod(shape[dim] for dim in _along(node))
    return fewer and bool((index.diff() < 0).any()) and index.unique().numel() == index.numel()


def _along(node: Any) -> list[int]:
    """The dimensions that a node selects along."""
    if hasattr(node, "_saved_dim"):
        dim = node._saved_dim
        dims = [one - (1 << 64) if one >= 1 << 63 else one for one in (dim if isinstance(dim, tuple) else [dim])]
        if dims:
            return dims
    elif hasattr(node, "_saved_indices") and isinstance(node._saved_indices, tuple):
        return [dim for dim, index in enumerate(node._saved_indices) if index is not None]
    return list(range(len(shape_of(*node.next_functions[0]))))


def _crosses(node: Any) -> bool:
    """True if two tensors are broadcast against each other, the second along the last dimension: pairs of items."""
    inputs = [shape_of(*one) for one in node.next_functions if one[0] is not None]
    if len(inputs) != 2 or len(inputs[0]) != len(inputs[1]) or len(inputs[0]) < 2:
        return False
    return any(
        wide[-1] > 1 == tall[-1] and any(one > 1 == other for one, other in zip(tall, wide, strict=True))
        for wide, tall in (inputs, inputs[::-1])
    )
