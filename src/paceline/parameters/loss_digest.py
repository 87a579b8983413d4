"""Digests of how losses are computed, by which workers notice that their scripts compute them in different ways.

A script that decides by its loss (`if loss.item() > 2: loss = 0.1 * loss`) does so by that of its part of the batch:
the operations and factors between the loss and its reduction to a scalar are not the same on all workers.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import torch

from paceline.parameters.layer_outputs import nodes
from paceline.parameters.loss_weight import is_number

_CHAIN = nodes("Neg View UnsafeView Squeeze Unsqueeze ToCopy Clone Alias Expand Add Sub Mul Div")
_LONGEST = 16
"""Operations on a scalar that are looked at."""
_known: dict[tuple[str, ...], int] = {}
"""Digests of names of operations."""
_MOST = 256
"""Digests, or factors, that are remembered."""


class LossDigest:
    """The digest of all losses of a step."""

    def __init__(self) -> None:
        self.value = 0
        self.by_samples = False
        """True if the last loss was multiplied by the number of its samples, or a constant that is equal to it."""

    def add(self, loss: Any, samples: int) -> int:
        """A backward pass begins from this loss, of so many samples; returns the digest of its operations alone."""
        self.by_samples = False
        node: Any = loss.grad_fn if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None
        if node is None:
            return 0
        names: list[str] = []
        computed = factors = 0
        for _ in range(_LONGEST):
            name = node.name()
            names.append(name)
            if name not in _CHAIN:
                break
            inputs = [following for following, _ in node.next_functions if following is not None]
            if len(inputs) != 1:
                break
            factor = _factor(node) if name == "MulBackward0" else None
            if factor is not None:
                counts = float(factor) == samples
                # The number of a worker's samples may be another one on each.
                own = struct.pack("=d", -1.0 if counts else float(factor))
                if not is_number(factor):
                    computed = zlib.crc32(own, computed)
                else:
                    factors = zlib.crc32(own, factors)
                    self.by_samples |= counts and not factor.is_floating_point()
            node = inputs[0]
        weights = getattr(node, "_saved_weight", None) if names[-1].startswith("NllLoss") else None
        if weights is not None:
            computed = zlib.crc32(struct.pack("=d", float(weights.sum())), computed)
        operations = _of_names(tuple(names))
        way = ((self.value >> 32) * 31 + (operations ^ computed)) & 0x7FFFFFFF
        self.value = way << 32 | (self.value * 31 + factors) & 0xFFFFFFFF
        return operations


def _factor(node: Any) -> torch.Tensor | None:
    """The number, or tensor of one element, that a scalar is multiplied by."""
    other = node._saved_other
    factor: torch.Tensor | None = node._saved_self if other is None else other
    return factor if factor is not None and factor.numel() == 1 else None


def _of_names(names: tuple[str, ...]) -> int:
    if names not in _known:
        if len(_known) >= _MOST:
            _known.clear()
        _known[names] = zlib.crc32(" ".join(names).encode())
    return _known[names]


class LossComparison:
    """Finds workers that have computed their losses of a step in another way than the first one."""

    def __init__(self) -> None:
        self._factors: set[int] = set()
        """Digests of factors of earlier steps."""

    def unlike(self, digests: dict[int, int]) -> int:
        """A rank whose loss was computed in another way, given the digests by rank; -1 if there is none.

        Factors that differ may be random. Those that the script decides for by a loss are used again.
        """
        different = set(digests.values())
        factors = {digest & 0xFFFFFFFF for digest in different}
        if len(different) < 2 and factors <= self._factors:
            return -1
        again = not factors.isdisjoint(self._factors)
        if len(self._factors) < _MOST:
            self._factors |= factors
        first = digests[min(digests)] if digests else 0
        for rank, digest in digests.items():
            if digest != first and (again or digest >> 32 != first >> 32):
                return rank
        return -1
