"""Whether what a model makes of a sample depends on the other samples of its batch, as one sees by leaving some out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from paceline.graph.batch_dim import has_rows
from paceline.graph.module_attributes import untouched
from paceline.graph.trace import ModelTrace

_CLOSE = 1e-3
_FEW = 0.1
"""Which part of the values may be others: a decision on a knife's edge falls otherwise by rounding alone."""


def mixes(trace: ModelTrace, model: nn.Module, inputs: Sequence[Any], batch: int, few: int) -> bool:
    """Whether the first or the last few samples have other results by themselves than within their batch."""
    with untouched(model), torch.no_grad():
        whole = _results(trace, inputs)
        if any(not result.dim() or result.shape[0] % batch for result in whole):
            return True
        for place in (slice(0, few), slice(batch - few, batch)):
            some = [one[place] if has_rows(one, batch) else one for one in inputs]
            if any(_differ(*pair, place, batch) for pair in zip(whole, _results(trace, some), strict=True)):
                return True
        return False


def _results(trace: ModelTrace, inputs: Sequence[Any]) -> list[torch.Tensor]:
    values: dict[int, Any] = {-1 - number: value for number, value in enumerate(inputs)}
    last = {needed: number for number, operation in enumerate(trace.operations) for needed in operation.inputs}
    for number, operation in enumerate(trace.operations):
        needed = {one: pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, values[one]) for one in operation.inputs}
        values[number] = trace.execute_calmly(number, needed)
        for one in operation.inputs:
            if one >= 0 and last[one] == number and one not in trace.results:
                values.pop(one, None)
    return [getattr(values[number], "local", values[number]) for number in trace.results]


def _differ(whole: torch.Tensor, part: torch.Tensor, place: slice, batch: int) -> bool:
    each = len(whole) // batch
    wanted, got = whole[place.start * each : place.stop * each].to(torch.float64), part.to(torch.float64)
    if wanted.shape != got.shape:
        return True
    if not bool(torch.isfinite(wanted).all()):
        return False
    return bool(((wanted - got).abs() > _CLOSE * wanted.abs().max()).double().mean() > _FEW)
