"""Draws a partition: the model's operations in order, the stages, the bytes over each cut, and the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from paceline.config.units import duration, size
from paceline.graph.model_profile import ModelProfile
from paceline.graph.partition import Partition
from paceline.report.svg import COLOURS, LEFT, PASSES, WIDTH, document
from paceline.schedules.timing import ScheduleTiming

_RIGHT, _ROW, _TOP, _BAR = 16, 30, 130, 46


def partition_figure(profile: ModelProfile, cut: Partition, schedule: ScheduleTiming, title: str) -> str:
    """An SVG of a partition and one step of its schedule."""
    inner = WIDTH - LEFT - _RIGHT
    total = sum(cost.seconds for cost in profile.costs) or 1.0
    edges = [0.0]
    for cost in profile.costs:
        edges.append(edges[-1] + cost.seconds / total)
    place = [LEFT + inner * edge for edge in edges]
    shapes = _arcs(profile, cut, place)
    for number, stage in enumerate(cut.stages):
        shapes += _stage(profile, place, number, stage.first, stage.last)
        x = (place[stage.first] + place[stage.last]) / 2
        words = f"stage {number}: {duration(stage.seconds)}"
        shapes.append(f"<text x='{x:.1f}' y='{_TOP + _BAR + 16}' text-anchor='middle' class='small'>{words}</text>")
        detail = f"{stage.parameters / 1e6:.3g} MB of parameters" + (
            f", × {stage.devices}" if stage.devices > 1 else ""
        )
        shapes.append(f"<text x='{x:.1f}' y='{_TOP + _BAR + 30}' text-anchor='middle' class='small'>{detail}</text>")
        if number:
            x = place[stage.first]
            shapes.append(
                f"<line x1='{x:.1f}' y1='{_TOP - 16}' x2='{x:.1f}' y2='{_TOP + _BAR + 6}' stroke='#222' "
                "stroke-width='2' stroke-dasharray='5 3'/>"
                f"<text x='{x:.1f}' y='{_TOP - 20}' text-anchor='middle' class='small'>{size(stage.bytes)}</text>"
            )
    bottom = _TOP + _BAR + 60
    workers = schedule.busy.shape[1]
    shapes += _schedule(schedule, workers, bottom)
    return document(title, bottom + 40 + _ROW * workers, shapes) + "\n"


def _stage(profile: ModelProfile, place: Sequence[float], number: int, first: int, last: int) -> list[str]:
    colour = COLOURS[number % len(COLOURS)]
    shapes = []
    for one in range(first, last):
        cost = profile.costs[one]
        words = (
            f"{profile.names[one]} ({profile.kinds[one]}): {cost.forward * 1e6:.0f} µs forward, "
            f"{cost.backward * 1e6:.0f} µs backward, {size(cost.bytes)} out, {size(cost.parameters)} of parameters"
        )
        width = max(0.2, place[one + 1] - place[one])
        shapes.append(
            f"<rect x='{place[one]:.2f}' y='{_TOP}' width='{width:.2f}' height='{_BAR}' fill='{colour}' "
            f"stroke='#fff' stroke-width='.4'><title>{escape(words)}</title></rect>"
        )
        if width > 7 * len(profile.kinds[one]):
            x = place[one] + width / 2
            shapes.append(
                f"<text x='{x:.1f}' y='{_TOP + 27}' text-anchor='middle' style='fill:#fff;font-size:11px'>"
                f"{escape(profile.kinds[one])}</text>"
            )
    return shapes


def _arcs(profile: ModelProfile, cut: Partition, place: Sequence[float]) -> list[str]:
    """Arcs of values that skip operations, from the producer to the last consumer."""
    last: dict[int, int] = {}
    for number, inputs in enumerate(profile.inputs):
        for one in inputs:
            if one >= 0:
                last[one] = number
    shapes = []
    for one, end in last.items():
        left, right = place[one + 1], place[end]
        if right - left < 4 or not profile.costs[one].bytes:
            continue
        high = _TOP - 6 - min(60.0, (right - left) / 6)
        crosses = any(one < stage.first <= end for stage in cut.stages[1:])
        colour = "#222222" if crosses else "#bbbbbb"
        shapes.append(
            f"<path d='M{left:.1f} {_TOP} Q{(left + right) / 2:.1f} {high:.1f} {right:.1f} {_TOP}' fill='none' "
            f"stroke='{colour}'><title>{escape(profile.names[one])}: {size(profile.costs[one].bytes)}</title></path>"
        )
    return shapes


def _schedule(schedule: ScheduleTiming, workers: int, top: float) -> list[str]:
    inner = WIDTH - LEFT - _RIGHT
    whole = max(timed.end for timed in schedule.operations)
    shapes = [
        f"<text x='{LEFT}' y='{top}' class='small'>one step as predicted: {duration(whole)}, bubble "
        f"{schedule.bubble:.1%}</text>"
    ]
    for worker in range(workers):
        y = top + 10 + worker * _ROW
        shapes.append(
            f"<text x='{LEFT - 8}' y='{y + 16}' text-anchor='end' class='small'>worker {worker}</text>"
            f"<rect x='{LEFT}' y='{y}' width='{inner}' height='{_ROW - 6}' fill='#f0f0f0' stroke='#ddd'/>"
        )
    for timed in schedule.operations:
        x = LEFT + inner * timed.start / whole
        width = inner * (timed.end - timed.start) / whole
        y = top + 10 + timed.device * _ROW
        kind = timed.operation
        shapes.append(
            f"<rect x='{x:.2f}' y='{y}' width='{max(0.3, width):.2f}' height='{_ROW - 6}' fill='{PASSES[kind.kind]}' "
            f"stroke='#fff' stroke-width='.6'><title>{kind.kind}{kind.microbatch}</title></rect>"
        )
        if width > 12:
            shapes.append(
                f"<text x='{x + width / 2:.1f}' y='{y + 16}' text-anchor='middle' style='fill:#fff;font-size:10px'>"
                f"{kind.microbatch}</text>"
            )
    return shapes
