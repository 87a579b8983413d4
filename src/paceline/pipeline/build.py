"""Cuts a model into stages and builds the pipeline's runtime; all workers of the replica do it together."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import torch
from torch import nn

from paceline.cluster.membership import Members
from paceline.collectives.group import Group
from paceline.errors import UsageError
from paceline.graph.model_profile import model_profile, undivided
from paceline.graph.partition import Device, partition
from paceline.graph.trace import ModelTrace, trace
from paceline.pipeline.context import PipelineContext, Traceable
from paceline.pipeline.runtime import PipelineRuntime
from paceline.pipeline.stages import StageAssignment
from paceline.transport import BarrierKind

_SLACK = 0.02
"""How much slower the slowest stage may be, as a share, for fewer bytes over the cuts: the precision of measuring."""


def share_random_state(members: Members) -> int:
    """Sets torch's random state to the first member's, as it may decide what is in a batch; returns a common seed."""
    state = members.gather(bytes(torch.get_rng_state().numpy()), BarrierKind.ALLOCATE)[0]
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return torch.initial_seed() if members.size == 1 else int.from_bytes(state[:8], "little")


def build_runtime(
    model: nn.Module,
    context: PipelineContext,
    traceable: Traceable,
    plain: Traceable,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> PipelineRuntime:
    """plain: the state in which the model computes real values, for measuring its operations."""
    traced = _trace(model, context, traceable, args, kwargs)
    why_undivided(model, traced, context)
    with plain():
        bounds = _agree_on_bounds(traced, model, context, args, kwargs)
    members, ranks = context.members, context.ranks

    def exchange(payload: bytes) -> list[bytes]:
        payloads = members.gather(payload)
        return [payloads[rank] for rank in ranks]

    group = Group(context.rank, len(ranks), exchange, members.barrier.timeouts, context.say)
    group.control.ranks = [members.barrier.ranks[rank] for rank in ranks]
    return PipelineRuntime(model, group, context, traceable, traced, bounds, (args, kwargs))


def why_undivided(model: nn.Module, traced: ModelTrace, context: PipelineContext) -> str:
    """The reason for which batches are not cut into microbatches; empty if they are."""
    spec = context.spec
    why = undivided(model, traced, spec.norm) if spec.microbatches > 1 else ""
    if why and StageAssignment.from_spec(spec).shared:
        raise UsageError(f"the workers of a stage share its microbatches, but {why}")
    return why


def _trace(
    model: nn.Module, context: PipelineContext, traceable: Traceable, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ModelTrace:
    """Traces the model on every worker; raises the error of any worker on all of them."""
    error, traced = None, None
    with traceable():
        try:
            traced = trace(model, args, kwargs, len(StageAssignment.from_spec(context.spec).workers))
        except UsageError as caught:
            error = str(caught)
    digest = hashlib.sha256(repr(traced.operations).encode()).hexdigest() if traced else ""
    own = msgspec.json.encode({"error": error, "operations": digest})
    answers = [msgspec.json.decode(answer) for answer in context.members.gather(own)]
    for answer in answers:
        if answer["error"]:
            raise UsageError(answer["error"])
    if any(answer != answers[0] for answer in answers):
        raise UsageError("the workers have traced different models; all must make the same one")
    assert traced is not None
    return traced


def _agree_on_bounds(
    traced: ModelTrace, model: nn.Module, context: PipelineContext, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[int]:
    """The operation at which each stage ends; the first stage's worker measures and decides."""
    answer: dict[str, Any] = {}
    if context.rank == 0:
        try:
            spec = context.spec
            stages = StageAssignment.from_spec(spec).workers
            profile = model_profile(traced, model, args, kwargs, spec.microbatches, spec.norm)
            found = partition(
                profile.problem(len(stages)),
                [Device(pace=min(context.speeds[rank] for rank in ranks), count=len(ranks)) for ranks in stages],
                schedule=spec.schedule,
                microbatches=spec.microbatches,
                slack=_SLACK,
            )
            answer["bounds"], answer["mixes"] = found.bounds, profile.mixes_samples
        except UsageError as caught:
            answer["error"] = str(caught)
    agreed: dict[str, Any] = msgspec.json.decode(context.members.gather(msgspec.json.encode(answer))[0])
    if "error" in agreed:
        raise UsageError(agreed["error"])
    traced.mixes_samples = agreed["mixes"]
    why_undivided(model, traced, context)
    return list(agreed["bounds"])
