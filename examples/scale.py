"""Which policy wins with 1,000 to 100,000 workers on uneven links: `python examples/scale.py FOLDER`

Volunteers' machines: paces and links differ by a lot, links are slow, machines come and go. Writes the figures and the
tables of docs/scale.md. Some minutes on one core; `--workers 1000` and `--setting narrow` for a part of it.
"""

import argparse
import math
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config.distributions import Exponential
from paceline.planner.choose import worth
from paceline.simulate.cluster import Failures, SimulatedCluster
from paceline.simulate.predict import simulate
from paceline.simulate.result import Result
from paceline.topologies import Link

SIZES = (1_000, 10_000, 100_000)
SETTINGS: dict[str, tuple[dict[str, Any], int]] = {
    "volunteers": ({}, 100_000),
    "narrow": ({"servers": 1 / 2000}, 10_000),
    "no-links": ({"links": False}, 10_000),
}
"""What differs from `volunteers`, and up to how many workers; with more the others say nothing new."""
ROUNDS = {1_000: 24, 10_000: 12}
"""Steps of every worker, about; of more workers fewer, which tell as much."""
FEW = 3
MEGABIT = 125e3


def volunteers(
    workers: int, *, links: bool = True, failures: bool = True, servers: float = 1 / 200
) -> SimulatedCluster:
    """Steps of 20 s at the median, up to several times as long on slow machines, jitter on top; a model of 25 million
    parameters, pushed as int8; home links of 100 Mbit/s at the median; a server with 10 Gbit/s for every 200 workers.
    """
    source = np.random.default_rng(1)
    count = max(1, math.ceil(workers * servers))
    factors = np.exp(0.5 * source.standard_normal(workers))
    speeds = 100 * MEGABIT * np.exp(source.standard_normal(workers))
    latencies = 0.02 * np.exp(0.7 * source.standard_normal(workers))
    own = tuple(
        (rank, Link(float(latency), float(speed)))
        for rank, (latency, speed) in enumerate(zip(latencies, speeds, strict=True))
    )
    return SimulatedCluster(
        workers=workers,
        compute=Exponential(4.0, 16.0),
        factors=tuple(factors.tolist()),
        size=100e6 if links else 0.0,
        compress="int8",
        link=Link(0.02, 100 * MEGABIT) if links else Link(),
        links=own if links else (),
        servers=str(count),
        server_link=Link(0.0, 10_000 * MEGABIT) if links else None,
        failures=Failures(4 * 3600.0, 300.0) if failures else None,
        update_seconds=0.05 / count if links else 0.0,  # every server updates its own shard
        batch=8,
    )


def policies(workers: int) -> dict[str, str]:
    """Spoken name and spec."""

    def share(part: float) -> int:
        return max(1, round(part * workers))

    return {
        "sync": "sync",
        "k-sync, K = 0.9 P": f"k-sync:k={share(0.9)}",
        "k-sync, K = 0.5 P": f"k-sync:k={share(0.5)}",
        "k-batch-sync, K = P": f"k-batch-sync:k={workers}",
        "k-async, K = 0.1 P": f"k-async:k={share(0.1)}",
        "k-batch-async, K = 0.1 P": f"k-batch-async:k={share(0.1)}",
        "async": "async",
        "groups of 20, async": "groups:size=20",
    }


def updates_for(spec: str, workers: int) -> int:
    """So many that every worker makes some steps."""
    gradients = {"async": 1, "sync": workers}.get(spec) or (
        20 if spec.startswith("groups") else int(spec.split("k=")[1])
    )
    return max(6, ROUNDS.get(workers, FEW) * workers // gradients)


def ask(question: tuple[str, int, str, str]) -> Result:
    setting, workers, name, spec = question
    begin = time.monotonic()
    cluster = volunteers(workers, **SETTINGS[setting][0])
    told, _ = simulate(spec, cluster, updates=updates_for(spec, workers), seed=2)
    print(
        f"{setting}: {workers:,} workers, {name}: {told.samples_per_second / workers:.3f} samples/s and worker, "
        f"simulated in {time.monotonic() - begin:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return told


def figure(path: Path, title: str, y: str, series: dict[str, list[float]], x: list[int], *, log: bool = True) -> None:
    """Lines over the number of workers, as SVG drawn here: docs need no script to show them."""
    colours = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#444444", "#b8a000"]
    values = [value for line in series.values() for value in line if math.isfinite(value) and value > 0]
    low, high = (math.log10(min(values)), math.log10(max(values))) if log else (0.0, max(values))
    low, high = (math.floor(low), math.ceil(high)) if log else (low, high * 1.1)
    width, height, left, right, top, bottom = 760, 380, 70, 230, 40, 50
    inner = (width - left - right, height - top - bottom)

    def place(number: int, value: float) -> tuple[float, float]:
        across = math.log10(x[number] / x[0]) / max(1e-9, math.log10(x[-1] / x[0]))
        up = ((math.log10(value) if log else value) - low) / (high - low)
        return left + inner[0] * across, top + inner[1] * (1 - up)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" '
        'font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{left}" y="22" font-size="15" fill="#222">{title}</text>',
        f'<text x="16" y="{top + inner[1] / 2}" transform="rotate(-90 16 {top + inner[1] / 2})" text-anchor="middle" '
        f'fill="#444">{y}</text>',
        f'<text x="{left + inner[0] / 2}" y="{height - 10}" text-anchor="middle" fill="#444">workers</text>',
    ]
    marks = [10.0**n for n in range(int(low), int(high) + 1)] if log else [high * n / 5 for n in range(6)]
    for mark in marks:
        up = ((math.log10(mark) if log else mark) - low) / (high - low)
        at = top + inner[1] * (1 - up)
        parts.append(f'<line x1="{left}" x2="{left + inner[0]}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end" fill="#444">{mark:.3g}</text>')
    for number, count in enumerate(x):
        at = place(number, marks[0] if log else 0.0)[0]
        parts.append(f'<text x="{at:.1f}" y="{height - 30}" text-anchor="middle" fill="#444">{count:,}</text>')
    names = sorted(series, key=lambda name: -series[name][-1])
    for order, name in enumerate(names):
        colour = colours[list(series).index(name) % len(colours)]
        points = [place(n, value) for n, value in enumerate(series[name]) if math.isfinite(value) and value > 0]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"/>' for a, b in points]
        at = top + 14 + 20 * order
        parts.append(f'<rect x="{width - right + 16}" y="{at - 9}" width="14" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{width - right + 36}" y="{at}" fill="#222">{name}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def table(rows: dict[str, list[Result]], sizes: list[int]) -> str:
    """Per policy and size: samples per second and worker, seconds per update, staleness, progress."""
    head = " | ".join(f"{size:,} workers" for size in sizes)
    lines = [f"| policy | {head} |", "|---|" + "---|" * len(sizes)]
    for name, told in rows.items():
        cells = [
            f"{one.samples_per_second / one.workers:.3f} · {one.seconds_per_update:.3g} s · "
            f"{one.staleness.mean:.1f} · {progress(one):.3g}"
            for one in told
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def progress(told: Result) -> float:
    """Fresh updates that a second is usually worth."""
    gradients = told.minibatches_per_second * told.seconds_per_update
    return worth(gradients, told.staleness.mean) / told.seconds_per_update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the figures go")
    parser.add_argument("--workers", type=int, action="append", help="how many; repeatable")
    parser.add_argument("--setting", choices=SETTINGS, action="append", help="only this one; repeatable")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that simulate side by side")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(options.processes) as pool:
        for setting in options.setting or SETTINGS:
            sizes = options.workers or [size for size in SIZES if size <= SETTINGS[setting][1]]
            asked = [(setting, size, name, spec) for size in sizes for name, spec in policies(size).items()]
            rows: dict[str, list[Result]] = {}
            # Large ones first, so that none is left to be waited for at the end.
            told = dict(zip(asked[::-1], pool.map(ask, asked[::-1]), strict=True))
            for one in asked:
                rows.setdefault(one[2], []).append(told[one])
            draw(setting, sizes, rows, options.folder)


def draw(setting: str, sizes: list[int], rows: dict[str, list[Result]], folder: Path) -> None:
    what = "samples per second and worker · seconds per update · staleness · progress"
    print(f"\n{setting}: {what}\n\n{table(rows, sizes)}\n")
    per_worker = {n: [one.samples_per_second / one.workers for one in told] for n, told in rows.items()}
    figure(
        folder / f"scale-{setting}.svg",
        f"Predicted throughput per worker ({setting})",
        "samples per second and worker",
        per_worker,
        sizes,
        log=False,
    )
    figure(
        folder / f"scale-{setting}-progress.svg",
        f"Predicted progress ({setting})",
        "fresh updates' worth per second",
        {name: [progress(one) for one in told] for name, told in rows.items()},
        sizes,
    )


if __name__ == "__main__":
    main()
