"""Profile of a model: its operations, the costs of each, and the positions where it may be cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils import _pytree as pytree

from paceline.graph.batch_dim import batch_size, is_batched
from paceline.graph.costs import Cost, measure
from paceline.graph.module_attributes import preserved_state
from paceline.graph.partition import Problem
from paceline.graph.trace import ModelTrace

_CLOSE = 1e-3
"""Allowed difference of a sample's results, relative to the largest value."""
_FEW = 0.1
"""Allowed share of values beyond that: rounding alone can tip a discrete decision, such as a maximum."""


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Operations of a model in the order in which they are computed; lists are by operation."""

    names: list[str]
    kinds: list[str]
    inputs: list[list[int]]
    costs: list[Cost]
    cuts: list[int]
    """Operations before which the model may be cut."""
    crossing: list[list[int]]
    """The values that would cross a cut before each operation."""
    batch: int
    """Samples."""
    microbatch: int
    """Samples that the costs are measured with."""
    mixes_samples: bool = False
    """True if the results for a sample depend on the others of its batch, so that a batch is not cut."""

    def problem(self, stages: int = 1, *, offloaded: bool = False) -> Problem:
        """The partitioning problem; cuts that sharded values cross are left out if there are enough others.

        offloaded: the optimizer's state is not in memory.
        """
        whole = [cut for cut in self.cuts if all(self.costs[value].whole for value in self.crossing[cut])]
        problem = Problem(self.costs, whole if len(whole) >= stages - 1 else self.cuts, self.crossing)
        problem.offloaded = offloaded
        return problem


def undivided(model: nn.Module, traced: ModelTrace, norm: str) -> str:
    """The reason for which a model's batches are not cut into microbatches; empty if they are."""
    if traced.fixed_batch:
        return (
            "the model computes with the number of samples itself, so a batch is not cut into microbatches; let it "
            "take sizes from its input's shape only"
        )
    if traced.reduces_batch:
        return (
            "the model returns a value of the whole batch that is no sum over its samples, so it is not cut into "
            "microbatches; let it return a row for every sample, and compute the loss from that"
        )
    if norm == "batch" and _has_statistics(model):
        return (
            "batch norm layers take their statistics of the whole batch, so it is not cut into microbatches; "
            "norm=microbatch gives each microbatch its own"
        )
    if norm == "batch" and traced.mutates_buffers:
        return (
            "the model changes its buffers with every call, so a batch is not cut into microbatches; norm=microbatch "
            "lets each microbatch change them"
        )
    if norm == "batch" and traced.mixes_samples:
        return (
            "the model's result for a sample depends on the others of its batch, so this is not cut into "
            "microbatches; norm=microbatch computes each microbatch by itself"
        )
    return ""


def _has_statistics(model: nn.Module) -> bool:
    """True if it has layers that take statistics of the whole batch."""
    return any(
        module.training
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        or (isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats)
    )


def model_profile(
    traced: ModelTrace, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], microbatches: int, norm: str
) -> ModelProfile:
    """Measures a traced model on as many samples as a microbatch has."""
    inputs = traced.flat_inputs(args, kwargs)
    batch = batch_size(inputs)
    few = max(1, batch // microbatches)
    some = [one[:few] if is_batched(one, batch) else one for one in inputs]
    if few < batch and norm == "batch" and not undivided(model, traced, norm):
        traced.mixes_samples = _mixes_samples(traced, model, inputs, batch, few)
    if undivided(model, traced, norm):
        few, some = batch, inputs
    return ModelProfile(
        names=[operation.name for operation in traced.operations],
        kinds=[operation.kind for operation in traced.operations],
        inputs=[list(operation.inputs) for operation in traced.operations],
        costs=measure(traced, model, some),
        cuts=traced.cuts(),
        crossing=traced.crossing(),
        batch=batch,
        microbatch=few,
        mixes_samples=traced.mixes_samples,
    )


def _mixes_samples(trace: ModelTrace, model: nn.Module, inputs: Sequence[Any], batch: int, few: int) -> bool:
    """True if the first or the last few samples have other results by themselves than within their batch."""
    with preserved_state(model), torch.no_grad():
        whole = _results(trace, inputs)
        if any(not result.dim() or result.shape[0] % batch for result in whole):
            return True
        for rows in (slice(0, few), slice(batch - few, batch)):
            some = [one[rows] if is_batched(one, batch) else one for one in inputs]
            try:
                alone = _results(trace, some)
            except (IndexError, RuntimeError):  # a graph's edges lead to nodes that are left out
                return True
            if any(_differ(*pair, rows, batch) for pair in zip(whole, alone, strict=True)):
                return True
        return False


def _results(trace: ModelTrace, inputs: Sequence[Any]) -> list[torch.Tensor]:
    values: dict[int, Any] = {-1 - number: value for number, value in enumerate(inputs)}
    last = {needed: number for number, operation in enumerate(trace.operations) for needed in operation.inputs}
    for number, operation in enumerate(trace.operations):
        needed = {one: pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, values[one]) for one in operation.inputs}
        with trace.with_values(number):
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
