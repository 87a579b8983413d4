"""Cuts a model into stages and builds the pipeline's runtime; all workers of the replica do it together."""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from paceline.cluster.free_memory import free_memory
from paceline.cluster.membership import Members
from paceline.collectives.group import Group
from paceline.collectives.machines_group import MachinesGroup
from paceline.config.units import duration, size
from paceline.errors import UsageError
from paceline.events import Stages
from paceline.graph.model_profile import ModelProfile, model_profile, undivided
from paceline.graph.partition import Device, Partition, Problem
from paceline.graph.predicted_step import predicted_step, quickest_cut, traffic
from paceline.graph.trace import ModelTrace, trace
from paceline.pipeline.context import PipelineContext, Traceable
from paceline.pipeline.model_loss import loss_is_divisible
from paceline.pipeline.runtime import PipelineRuntime, infer_results
from paceline.pipeline.stages import StageAssignment
from paceline.transport import BarrierKind

_SLACK = 0.02
"""How much slower the slowest stage may be, as a share, for fewer bytes over the cuts: the precision of measuring."""

_LINK_BOUND = 1.2
"""How much longer than the slowest stage a link may take before it is said."""

_ROOM = 0.7
"""Share of a machine's free memory that a stage may take."""

_MOST = 0.8
"""Share of the parameters from which on it is said that a stage has them."""


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
    group = _join(context)
    try:
        memories = _memories(model, context)
        with plain():
            bounds = _agree_on_bounds(traced, model, context, memories, args, kwargs)
    except BaseException:
        group.close()
        raise
    return PipelineRuntime(model, group, context, traceable, traced, bounds, (args, kwargs))


def _join(context: PipelineContext) -> Group | MachinesGroup:
    """The group of the pipeline's workers."""
    members, ranks = context.members, context.ranks
    if context.machines is not None:
        return context.machines.part(ranks)

    def exchange(payload: bytes) -> list[bytes]:
        payloads = members.gather(payload)
        return [payloads[rank] for rank in ranks]

    group = Group(context.rank, len(ranks), exchange, members.barrier.timeouts, context.say)
    group.control.ranks = [members.barrier.ranks[rank] for rank in ranks]
    context.calls.watch(group.control)
    return group


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
    error, traced, divisible = None, None, True
    with traceable():
        try:
            traced = trace(model, args, kwargs, len(StageAssignment.from_spec(context.spec).workers))
            if context.rank == 0 and traced.has_tail:
                results, inputs = infer_results(traced, model, args, kwargs), traced.flat_inputs(args, kwargs)
                divisible = loss_is_divisible(traced, results, inputs, context.spec.microbatches, tried=True)
        except UsageError as caught:
            error = str(caught)
    digest = hashlib.sha256(repr(traced.operations).encode()).hexdigest() if traced else ""
    own = msgspec.json.encode([error, digest, divisible])
    answers = [msgspec.json.decode(answer) for answer in context.members.gather(own)]
    for refusal, *_ in answers:
        if refusal:
            raise UsageError(refusal)
    if any(operations != answers[0][1] for _, operations, _ in answers):
        raise UsageError("the workers have traced different models; all must make the same one")
    assert traced is not None
    if not answers[0][2]:
        traced.drop_tail()
    return traced


def _agree_on_bounds(
    traced: ModelTrace,
    model: nn.Module,
    context: PipelineContext,
    memories: list[float],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[int]:
    """The operation at which each stage ends; the first stage's worker measures and decides.

    memories: bytes that each worker can have.
    """
    answer: dict[str, Any] = {}
    spec = context.spec
    stages = StageAssignment.from_spec(spec).workers
    devices = _slowest(context.gather_firsts(msgspec.msgpack.encode(_devices(stages, context, memories))))
    if context.decides:
        try:
            with context.measurable(traced):
                profile = model_profile(traced, model, args, kwargs, spec.microbatches, spec.norm)
            offloaded = spec.offload != "none"
            found = _cut(profile.problem(len(stages), offloaded=offloaded), profile, devices, context)
            answer["bounds"], answer["mixes"] = found.bounds, profile.mixes_samples
            _record(profile, found, devices, context)
            _say_if_uneven(traced, model, found.bounds, context)
            _say_if_link_bound(found, devices, stages, context)
        except UsageError as caught:
            answer["error"] = str(caught)
    agreed: dict[str, Any] = msgspec.json.decode(context.gather_firsts(msgspec.json.encode(answer))[0])
    if "error" in agreed:
        raise UsageError(agreed["error"])
    traced.mixes_samples = agreed["mixes"]
    why_undivided(model, traced, context)
    return list(agreed["bounds"])


def _record(profile: ModelProfile, found: Partition, devices: Sequence[Device], context: PipelineContext) -> None:
    """Records the cut and its predicted step, and says what will cross between machines."""
    # A batch that cannot be divided passes through the stages as one microbatch.
    spec, microbatches = context.spec, max(1, min(context.spec.microbatches, profile.batch // profile.microbatch))
    step = float(predicted_step(profile.costs, found, devices, spec.schedule, microbatches).makespan.mean())
    if context.counts_samples:
        context.recorder.add(
            Stages(
                context.team_ranks[0],
                time.perf_counter(),
                [stage.last - stage.first for stage in found.stages],
                step,
                [microbatches * stage.bytes for stage in found.stages],
                [int(stage.memory) for stage in found.stages],
            )
        )
    crossing = [
        f"{size(link.bytes)} ({duration(link.seconds)}) between stages {link.stage - 1} and {link.stage}"
        for link in traffic(found, devices, microbatches)
        if link.seconds
    ]
    if crossing:
        memory = ", ".join(size(int(stage.memory)) for stage in found.stages)
        context.say(
            f"a step is predicted to take {duration(step)}; over links go, each way, {', '.join(crossing)}; "
            f"{_held(context)} of the stages take {memory}"
        )


def _held(context: PipelineContext) -> str:
    """What the memory of a stage is predicted for."""
    moments = "" if context.spec.offload != "none" else "the two moments of an optimizer such as Adam, "
    return f"parameters, gradients, {moments}and activations"


def _cut(problem: Problem, profile: ModelProfile, devices: list[Device], context: PipelineContext) -> Partition:
    """The fastest cut whose stages fit into their machines' memory; the fastest of all, if none does, and says so."""
    options: Any = {"schedule": context.spec.schedule, "microbatches": context.spec.microbatches, "slack": _SLACK}
    try:
        return quickest_cut(problem, profile.costs, devices, **options)
    except UsageError:
        roomy = [msgspec.structs.replace(one, memory=math.inf) for one in devices]
        found = quickest_cut(problem, profile.costs, roomy, **options)
    over = next(
        (index for index, one in enumerate(devices) if found.stages[index].memory > one.memory), len(devices) - 1
    )
    context.say(
        f"stage {over} may not fit into its machine's memory: {_held(context)} take "
        f"{found.stages[over].memory / 1e6:.0f} MB, and a worker there can have {devices[over].memory / 1e6:.0f} MB; "
        f"more stages need less each{'' if problem.offloaded else ', and so does offload=disk'}"
    )
    return found


def _memories(model: nn.Module, context: PipelineContext) -> list[float]:
    """Bytes that each worker of the pipeline can have for its stages; infinite on one machine, which all share."""
    members = context.members
    if len(members.machines) == 1:
        return [math.inf] * len(context.ranks)
    held = sum(tensor.untyped_storage().nbytes() for tensor in (*model.parameters(), *model.buffers()))
    own = _ROOM * (free_memory(members.local.size) + held)
    found = [msgspec.json.decode(one, type=float) for one in members.gather(msgspec.json.encode(min(own, 1e18)))]
    return [found[rank] for rank in context.ranks]


def _devices(stages: Sequence[Sequence[int]], context: PipelineContext, memories: Sequence[float]) -> list[Device]:
    """The devices of the stages, with their links to the stages before them."""
    found = []
    for before, ranks in zip(((), *stages), stages, strict=False):
        pace, pairs = min(context.speeds[rank] for rank in ranks), list(itertools.product(before, ranks))
        device = Device(pace=pace, count=len(ranks), memory=min(memories[rank] for rank in ranks))
        ways = {
            way
            for pair in pairs
            if len(machines := {_machine(rank, context) for rank in pair}) == 2
            for way in itertools.permutations(machines)
        }
        links = context.links
        if links is not None and ways:
            # Values go one way and gradients the other.
            bandwidth = min(links.bandwidth[a][b] for a, b in ways)
            latency = max(links.latency[a][b] for a, b in ways)
            device = msgspec.structs.replace(device, bandwidth=bandwidth, latency=latency)
        found.append(device)
    return found


def _slowest(payloads: Sequence[bytes]) -> list[Device]:
    """The devices of stages that several replicas have, each as slow and small as the slowest and smallest of them."""
    replicas = [msgspec.msgpack.decode(payload, type=list[Device]) for payload in payloads]
    return [
        Device(
            pace=min(one.pace for one in devices),
            memory=min(one.memory for one in devices),
            bandwidth=min(one.bandwidth for one in devices),
            latency=max(one.latency for one in devices),
            count=devices[0].count,
        )
        for devices in zip(*replicas, strict=True)
    ]


def _machine(rank: int, context: PipelineContext) -> int:
    """The machine of a worker, by its pipeline rank."""
    machines = context.members.machines
    return next(number for number, ranks in enumerate(machines) if context.ranks[rank] in ranks)


def _say_if_link_bound(
    found: Partition, devices: Sequence[Device], stages: Sequence[Sequence[int]], context: PipelineContext
) -> None:
    """Says which link between machines takes longer than any stage."""
    longest = max(stage.seconds for stage in found.stages)
    for stage, device, ranks in zip(found.stages, devices, stages, strict=True):
        seconds = 2 * stage.bytes / device.bandwidth
        if seconds > _LINK_BOUND * longest:
            context.say(
                f"the link to rank {context.team_ranks[ranks[0]]} limits this pipeline: {stage.bytes / 1e6:.3g} MB per "
                f"microbatch cross it each way in {1e3 * seconds:.3g} ms, and the slowest stage takes "
                f"{1e3 * longest:.3g} ms"
            )


def _say_if_uneven(traced: ModelTrace, model: nn.Module, bounds: list[int], context: PipelineContext) -> None:
    """Says which stage has most of the parameters, and which is the largest of these."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    all_names = {name: names[id(one)] for name, one in model.named_parameters(remove_duplicate=False)}
    total, seen = sum(sizes.values()), set[str]()
    for stage, (start, end) in enumerate(itertools.pairwise([0, *bounds])):
        used = {all_names[name] for operation in traced.operations[start:end] for name in operation.parameters} - seen
        seen |= used
        held = sum(sizes[name] for name in used)
        if len(bounds) > 1 and held > _MOST * total:
            largest = max(used, key=lambda name: sizes[name])
            links = " and little may cross slow links" if len(context.members.machines) > 1 else ""
            context.say(
                f"stage {stage} has {held / total:.0%} of the parameters ('{largest}' alone has "
                f"{sizes[largest] / total:.0%}), since stages are cut to take equal times{links}; 'tensor', or 'mesh' "
                "with tensor=2, cuts inside layers"
            )
