"""`paceline plan --partition`: the best cut of a script's model into stages, and its predicted speed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from paceline.cli import quantities
from paceline.config import Pipeline, one_of
from paceline.errors import UsageError
from paceline.graph.model_profile import ModelProfile
from paceline.graph.partition import Device, Partition, partition, replicated
from paceline.pipeline.script_profile import profile_script
from paceline.report.partition import partition_figure
from paceline.schedules import SCHEDULES, bubble, shareable
from paceline.schedules.timing import ScheduleTiming, evaluate


class PartitionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the command."""

    stages: int
    microbatches: int
    schedule: str
    paces: list[str]
    memory: str | None
    latency: str | None
    bandwidth: str | None
    replicate: bool
    figure: Path | None
    json: bool


def show_partition(script: Path, arguments: Sequence[str], options: PartitionOptions) -> None:
    asked = Pipeline(stages=options.stages, microbatches=options.microbatches, schedule=options.schedule)
    devices = _devices(options)
    if options.replicate:
        one_of("with --replicate, --schedule", options.schedule, shareable())
    latency = 0.0 if options.latency is None else quantities.seconds("--latency", options.latency)
    console = Console(stderr=True)
    with console.status("tracing the model and measuring its operations"):
        profile = profile_script(script, arguments, options.microbatches)
    # A batch that cannot be divided passes through the stages as one microbatch.
    microbatches = max(1, min(options.microbatches, profile.batch // profile.microbatch))
    if options.replicate:
        same = {"bandwidth": devices[0].bandwidth, "memory": devices[0].memory}
        found = replicated(profile.problem(), options.stages, microbatches=microbatches, latency=latency, **same)
        devices = [msgspec.structs.replace(devices[0], count=stage.devices) for stage in found.stages]
    # As a run does it, so that the cut is the same.
    cut = partition(
        profile.problem(len(devices)),
        devices,
        latency=latency,
        schedule=options.schedule,
        microbatches=microbatches,
        slack=0.02,
    )
    counts = [device.count for device in devices]
    workers = "+".join(map(str, counts)) if max(counts) > 1 else ""
    spec = dataclasses.replace(asked, stages=len(counts), workers=workers)
    schedule = predicted(profile, cut, devices, spec.schedule, microbatches, latency)
    formula = None if spec.shared else bubble(options.schedule, len(cut.stages), microbatches)
    title = f"{script.name} in {len(cut.stages)} stages, {microbatches} microbatches, {options.schedule}"
    if options.figure is not None:
        options.figure.write_text(partition_figure(profile, cut, schedule, title), encoding="utf-8")
    if options.json:
        told = {
            "stages": msgspec.to_builtins(cut.stages),
            "slowest": cut.slowest,
            "seconds_per_step": float(schedule.makespan.mean()),
            "bubble": schedule.bubble,
            "formula": formula,
            "strategy": str(spec),
            "workers": sum(spec.by_stage),
            "operations": [
                {"name": name, "kind": kind, **msgspec.to_builtins(cost)}
                for name, kind, cost in zip(profile.names, profile.kinds, profile.costs, strict=True)
            ],
        }
        print(msgspec.json.format(msgspec.json.encode(told), indent=2).decode())
        return
    _print(profile, cut, schedule, formula, title)
    if options.figure is not None:
        print(f"figure: {options.figure}")
    text = f"pipeline:stages={spec.stages},microbatches={spec.microbatches},schedule={spec.schedule}"
    text += f",workers={spec.workers}" if spec.shared else ""
    print(f"\npaceline run {script} --workers {sum(spec.by_stage)} --strategy {text}")


def _devices(options: PartitionOptions) -> list[Device]:
    def pace(name: str, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise UsageError(f"{name} is '{text}'; it must be a number above 0")
        return value

    paces = _of_each(options.stages, "--pace", options.paces, 1.0, pace)
    memories = _of_each(options.stages, "--memory", _listed(options.memory), math.inf, quantities.size)
    rates = _of_each(options.stages, "--bandwidth", _listed(options.bandwidth), math.inf, quantities.rate)
    devices = [
        Device(pace=pace, memory=memory, bandwidth=rate)
        for pace, memory, rate in zip(paces, memories, rates, strict=True)
    ]
    if options.replicate and any(device != devices[0] for device in devices):
        raise UsageError(
            "--replicate is for devices and links that are all equal: it decides which of them share a stage"
        )
    return devices


def _listed(text: str | None) -> list[str]:
    return [] if text is None else text.split(",")


def _of_each(
    stages: int, name: str, texts: Sequence[str], default: float, read: Callable[[str, str], float]
) -> list[float]:
    """A value for each stage; a value without a stage holds for all stages that have none of their own."""
    values: dict[int, float] = {}
    for text in texts:
        who, colon, value = text.strip().rpartition(":")
        if not colon:
            default = read(name, value)
            continue
        if not who.isdecimal() or int(who) >= stages:
            raise UsageError(f"{name} '{text}': write STAGE:VALUE, with a stage from 0 to {stages - 1}")
        values[int(who)] = read(name, value)
    return [values.get(stage, default) for stage in range(stages)]


def predicted(
    profile: ModelProfile,
    cut: Partition,
    devices: Sequence[Device],
    schedule: str,
    microbatches: int,
    latency: float = 0.0,
) -> ScheduleTiming:
    """The timing of one step, by the simulator."""
    forward, backward = [], []
    for stage, device in zip(cut.stages, devices, strict=True):
        costs = profile.costs[stage.first : stage.last]
        forward += [sum(cost.forward for cost in costs) / device.pace] * device.count
        backward += [sum(cost.backward for cost in costs) / device.pace] * device.count
    weights = np.array([backward]) / 2 if SCHEDULES[schedule].splits_backward else None
    rest = np.array([backward]) / 2 if weights is not None else np.array([backward])
    over = max(stage.bytes / device.bandwidth for stage, device in zip(cut.stages, devices, strict=True))
    return evaluate(
        "1f1b" if SCHEDULES[schedule].has_chunks else schedule,
        microbatches,
        np.array([forward]),
        rest,
        weights,
        transfer=latency + over,
        workers=[device.count for device in devices],
    )


def _print(profile: ModelProfile, cut: Partition, schedule: ScheduleTiming, formula: float | None, title: str) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, 120)
    cuts = len(profile.cuts)
    console.print(
        f"{title}: {len(profile.names)} operations, {cuts} places to cut, {profile.microbatch} samples measured"
    )
    table = Table(box=None, pad_edge=False)
    for head in ("stage", "operations", "from", "to"):
        table.add_column(head, no_wrap=True)
    for head in ("ms forward", "ms backward", "parameters", "memory", "over the cut"):
        table.add_column(head, justify="right", no_wrap=True)
    for number, stage in enumerate(cut.stages):
        costs = profile.costs[stage.first : stage.last]
        name = f"{number}" + (f" × {stage.devices}" if stage.devices > 1 else "")
        table.add_row(
            name,
            str(stage.last - stage.first),
            profile.names[stage.first],
            profile.names[stage.last - 1],
            f"{1e3 * sum(cost.forward for cost in costs):.3g}",
            f"{1e3 * sum(cost.backward for cost in costs):.3g}",
            f"{stage.parameters / 1e6:.3g} MB",
            f"{stage.memory / 1e6:.3g} MB",
            f"{stage.bytes / 1e3:.3g} kB" if number else "–",
        )
    console.print(table)
    step = float(schedule.makespan.mean())
    usual = "" if formula is None else f", with stages of equal length {formula:.1%}"
    console.print(
        f"slowest stage {cut.slowest * 1e3:.3g} ms per microbatch; a step {step * 1e3:.3g} ms; "
        f"bubble {schedule.bubble:.1%}{usual}"
    )
