"""Compares the inputs of workers that share one model, where no loader of the team gives them."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from paceline.cluster.membership import Members
from paceline.errors import Mismatch, names
from paceline.parameters.transforms import refuse_transforms
from paceline.strategies.context import Options

_COMPARED = 3
"""Calls whose inputs are compared."""


class SameInputs:
    """Raises Mismatch if workers that share one model do not train it on the same inputs; looks at a few calls."""

    def __init__(self, model: torch.nn.Module, members: Members, each: int, options: Options) -> None:
        """each: workers of a replica."""
        self._model, self._members, self._each = model, members, each
        self._left = 0 if options.loaders else _COMPARED

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called with these arguments."""
        refuse_transforms(self._model, (args, kwargs))
        if not (self._left and self._model.training and torch.is_grad_enabled()):
            return  # a model may be evaluated by one worker
        self._left -= 1
        digests = self._members.gather(_digest((args, kwargs)))
        others = [rank for rank, digest in enumerate(digests) if digest != digests[rank - rank % self._each]]
        if others:
            raise Mismatch(
                f"{names(others)} did not call the model with the inputs of the other workers that share it; without a "
                "loader of the team all must draw the same data, from one seed",
                others,
            )


def _digest(inputs: Any) -> bytes:
    found = 0
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor):
            found = zlib.crc32(repr((tuple(leaf.shape), leaf.dtype)).encode(), found)
            values = leaf.detach().cpu().contiguous().reshape(-1)
            found = zlib.crc32(bytes(values.view(torch.uint8).numpy()) if values.numel() else b"", found)
        elif isinstance(leaf, str | int | float | bool | None):
            found = zlib.crc32(repr(leaf).encode(), found)
    return found.to_bytes(4, "little")
