"""Finds whether a model's results for a sample depend on the other samples of its batch, by leaving some out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from paceline.graph.batch_dim import is_batched
from paceline.graph.module_attributes import preserved_state
from paceline.graph.trace import ModelTrace

_CLOSE = 1e-3
"""Allowed difference, relative to the largest value."""
_FEW = 0.1
"""Allowed share of values beyond that: rounding alone can tip a discrete decision, such as a maximum."""


def mixes_samples(trace: ModelTrace, model: nn.Module, inputs: Sequence[Any], batch: int, few: int) -> bool:
    """True if the first or the last few samples have other results by themselves than within their batch."""
    with preserved_state(model), torch.no_grad():
        whole = _results(trace, inputs)
        if any(not result.dim() or result.shape[0] % batch for result in whole):
            return True
        for rows in (slice(0, few), slice(batch - few, batch)):
            some = [one[rows] if is_batched(one, batch) else one for one in inputs]
            if any(_differ(*pair, rows, batch) for pair in zip(whole, _results(trace, some), strict=True)):
                return True
        return False


def _results(trace: ModelTrace, inputs: Sequence[Any]) -> list[torch.Tensor]:
    values: dict[int, Any] = {-1 - number: value for number, value in enumerate(inputs)}
    last = {needed: number for number, operation in enumerate(trace.operations) for needed in operation.inputs}
    for number, operation in enumerate(trace.operations):
        needed = {one: pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, values[one]) for one in operation.inputs}
        values[number] = trace.execute_deterministic(number, needed)
        for one in operation.inputs:
            if one >= 0 and last[one] == number and one not in trace.results:
                values.pop(one, None)
    return [getattr(values[number], "local", values[number]) for number in trace.results]


def _differ(whole: torch.Tensor, part: torch.Tensor, rows: slice, batch: int) -> bool:
    each = len(whole) // batch
    wanted, got = whole[rows.start * each : rows.stop * each].to(torch.float64), part.to(torch.float64)
    if wanted.shape != got.shape:
        return True
    if not bool(torch.isfinite(wanted).all()):
        return False
    return bool(((wanted - got).abs() > _CLOSE * wanted.abs().max()).double().mean() > _FEW)
