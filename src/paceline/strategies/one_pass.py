"""Lets torch run Adam in one pass over memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


def in_one_pass(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Per group, the options that let torch run Adam in one pass over memory, unless the script has chosen others."""
    return [{"fused": True} if _fusable(optimizer, group) else {} for group in optimizer.param_groups]


def _fusable(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or group["differentiable"] or group["capturable"]:
        return False
    return group["fused"] is None and group["foreach"] is None and all(map(_is_flat, group["params"]))


def _is_flat(parameter: torch.nn.Parameter) -> bool:
    """True if its elements and its gradient's have the same order in memory, as one pass needs; or without gradient."""
    gradient = parameter.grad
    if gradient is None:  # it is not updated, and another worker's has no memory of its own
        return True
    return parameter.is_floating_point() and parameter.is_contiguous() and gradient.is_contiguous()
