"""Stand-ins in a state dict for tensors whose values are on other machines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AbsentTensor:
    """A tensor that another worker has, until it is fetched."""

    shape: Sequence[int]
    dtype: torch.dtype
    fetch: Callable[[], torch.Tensor]
    """Gets its value; the caller lets go of it before it fetches the next one."""
