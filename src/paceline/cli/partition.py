"""`paceline plan --partition`: the best cut of a script's model into stages, and its predicted speed."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from paceline.cli import quantities
from paceline.config import Pipeline, one_of
from paceline.config.units import duration, size
from paceline.doctor.findings import Diagnosis
from paceline.errors import UsageError
from paceline.graph.model_profile import ModelProfile
from paceline.graph.partition import Device, Partition, replicated
from paceline.graph.predicted_step import LinkTraffic, predicted_step, quickest_cut, traffic
from paceline.pipeline.script_profile import profile_script
from paceline.report.partition import partition_figure
from paceline.schedules import bubble, shareable
from paceline.schedules.timing import ScheduleTiming


class PartitionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the command."""

    stages: int
    microbatches: int
    schedule: str
    paces: list[str]
    memory: str | None
    latency: str | None
    bandwidth: str | None
    links: Path | None
    replicate: bool
    offload: bool
    figure: Path | None
    json: bool


def show_partition(script: Path, arguments: Sequence[str], options: PartitionOptions) -> None:
    offload = "disk" if options.offload else "none"
    asked = Pipeline(
        stages=options.stages, microbatches=options.microbatches, schedule=options.schedule, offload=offload
    )
    devices = _devices(options)
    if options.replicate:
        one_of("with --replicate, --schedule", options.schedule, shareable())
    console = Console(stderr=True)
    with console.status("tracing the model and measuring its operations"):
        profile = profile_script(script, arguments, options.microbatches)
    # A batch that cannot be divided passes through the stages as one microbatch.
    microbatches = max(1, min(options.microbatches, profile.batch // profile.microbatch))
    if options.replicate:
        same = {name: getattr(devices[0], name) for name in ("bandwidth", "latency", "memory")}
        found = replicated(
            profile.problem(offloaded=options.offload), options.stages, microbatches=microbatches, **same
        )
        devices = [msgspec.structs.replace(devices[0], count=stage.devices) for stage in found.stages]
    # As a run does it, so that the cut is the same.
    cut = quickest_cut(
        profile.problem(len(devices), offloaded=options.offload),
        profile.costs,
        devices,
        schedule=options.schedule,
        microbatches=microbatches,
        slack=0.02,
    )
    counts = [device.count for device in devices]
    workers = "+".join(map(str, counts)) if max(counts) > 1 else ""
    spec = dataclasses.replace(asked, stages=len(counts), workers=workers)
    schedule = predicted_step(profile.costs, cut, devices, spec.schedule, microbatches)
    links = traffic(cut, devices, microbatches)
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
            "links": msgspec.to_builtins(links),
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
    _print(profile, cut, schedule, formula, title, links)
    if options.figure is not None:
        print(f"figure: {options.figure}")
    text = f"pipeline:stages={spec.stages},microbatches={spec.microbatches},schedule={spec.schedule}"
    text += f",workers={spec.workers}" if spec.shared else ""
    text += f",offload={offload}" if options.offload else ""
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
    delays = _of_each(options.stages, "--latency", _listed(options.latency), 0.0, quantities.seconds)
    if options.links is not None:
        if options.bandwidth is not None or options.latency is not None:
            raise UsageError("--links has bandwidths and latencies; leave out --bandwidth and --latency")
        measured = _measured(options.links, options.stages)
        rates, delays = [rate for rate, _ in measured], [delay for _, delay in measured]
    devices = [
        Device(pace=pace, memory=memory, bandwidth=rate, latency=delay)
        for pace, memory, rate, delay in zip(paces, memories, rates, delays, strict=True)
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
            raise UsageError(f"{name} is '{text}'; it must be STAGE:VALUE, a stage from 0 to {stages - 1}")
        values[int(who)] = read(name, value)
    return [values.get(stage, default) for stage in range(stages)]


def _measured(path: Path, stages: int) -> list[tuple[float, float]]:
    """Bandwidth and latency of each stage's link to the one before, as `paceline doctor --json` has measured them."""
    try:
        links = msgspec.json.decode(path.read_bytes(), type=Diagnosis).links
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"--links is '{path}', which is no output of paceline doctor --json: {error}") from None
    if links is None or len(links.hosts) < stages:
        found = 0 if links is None else len(links.hosts)
        raise UsageError(f"'{path}' has links between {found} workers, and there are {stages} stages; measure as many")
    found_links = [(math.inf, 0.0)]
    for before, stage in itertools.pairwise(range(stages)):
        ways = ((before, stage), (stage, before))  # values go one way and gradients the other
        if links.hosts[before] == links.hosts[stage]:
            found_links.append((math.inf, 0.0))  # through memory
        else:
            rates, delays = [links.bandwidth[a][b] for a, b in ways], [links.latency[a][b] for a, b in ways]
            found_links.append((min(rate or math.inf for rate in rates), max(delay or 0.0 for delay in delays)))
    return found_links


def _print(
    profile: ModelProfile,
    cut: Partition,
    schedule: ScheduleTiming,
    formula: float | None,
    title: str,
    links: Sequence[LinkTraffic],
) -> None:
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
            size(stage.bytes) if number else "–",
        )
    console.print(table)
    step = float(schedule.makespan.mean())
    for link in links:
        busy = f", {duration(link.seconds)} of each step" if link.seconds else ""
        console.print(f"stage {link.stage - 1} to {link.stage}: {size(link.bytes)} per step each way{busy}")
    usual = "" if formula is None else f", with stages of equal length {formula:.1%}"
    console.print(
        f"slowest stage {duration(cut.slowest)} per microbatch; a step {duration(step)}; "
        f"bubble {schedule.bubble:.1%}{usual}"
    )
