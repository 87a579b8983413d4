"""Training over several hosts: how much of the exchange of gradients the backward pass hides, and steps against DDP.

`python benchmarks/overlap.py` (as root: hosts are network namespaces on a bridge, made and removed here)

A model with 8.4 MB of gradients, whose backward pass sleeps before each of its eight layers, as one on an accelerator
leaves the CPU idle. Each row is one run: steps of a team, steps that exchange nothing, and steps of
DistributedDataParallel on gloo with each bucket size take turns. `hidden` is the part of the exchange, as long as a
step without sleep is longer than one that exchanges nothing, that does not make the step with sleep longer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAYERS, WIDTH, BATCH = 8, 512, 8
BUCKETS = (0.25, 1.0, 4.0, 25.0)
"""Megabytes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="2x1,3x1,2x2", help="hosts x workers on each")
    parser.add_argument("--rates", default="200e6,1e9", help="of each host's link, in bits per second each way")
    parser.add_argument("--sleep", type=float, default=0.45, help="seconds that a backward pass sleeps")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--strategy", default="all-reduce")
    parser.add_argument("--json", type=Path, help="where to write the results, too")
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options)
        return
    found = []
    for shape in options.shapes.split(","):
        for rate in map(float, options.rates.split(",")):
            count, workers = map(int, shape.split("x"))
            found.append(row(count, workers, rate))
            tell(found[-1])
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


def row(count: int, workers: int, rate: float) -> dict[str, Any]:
    """The results of one row."""
    from harness.on_hosts import hosts, run_workers

    with hosts(count, f"{rate:.0f}bit") as made:
        seconds = run_workers(made, workers, 29400)
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    link = 2 * (count - 1) / count * LAYERS * (WIDTH + 1) * WIDTH * 4 / (rate / 8)
    facts: dict[str, Any] = {"hosts": count, "workers": workers, "rate": rate, "link": link, "seconds": seconds}
    for kind in ("bare", "sleeping"):
        ddp = {bucket: middle[f"{kind} ddp {bucket}"] for bucket in BUCKETS}
        best = min(ddp, key=lambda bucket: ddp[bucket])
        facts[kind] = {"team": middle[f"{kind} team"], "alone": middle[f"{kind} alone"], "ddp": ddp[best]}
        facts[kind] |= {"bucket": best, "faster": ddp[best] / middle[f"{kind} team"]}
    for who in ("team", "ddp"):
        exchange = facts["bare"][who] - facts["bare"]["alone"]
        facts[f"hidden {who}"] = 1 - (facts["sleeping"][who] - facts["sleeping"]["alone"]) / exchange
    return facts


def tell(found: dict[str, Any]) -> None:
    print(f"{found['hosts']}x{found['workers']} {found['rate'] / 1e6:g} Mbit/s", end="")
    for kind in ("bare", "sleeping"):
        one = found[kind]
        print(f"  {kind}: team {one['team']:.3f} s, DDP {one['ddp']:.3f} s ({one['bucket']:g} MB),", end="")
        print(f" alone {one['alone']:.3f} s: {one['faster']:.2f} times DDP", end="")
    print(f"  hidden: team {found['hidden team']:.0%}, DDP {found['hidden ddp']:.0%}", flush=True)


def work(options: argparse.Namespace) -> None:
    """The steps of every worker."""
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    import paceline

    torch.set_num_threads(1)
    team = paceline.join(options.strategy, timeouts=paceline.Timeouts(join=120.0, barrier=120.0))
    distributed.init_process_group("gloo")
    pause = [0.0]
    """Seconds before each layer."""

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
            time.sleep(pause[0])
            return gradient

    class Layer(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            asleep: torch.Tensor = Sleep.apply(super().forward(x))
            return asleep.relu()

    def build() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Sequential(*[Layer(WIDTH, WIDTH) for _ in range(LAYERS)])

    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(team.rank))

    def training(model: Any, optimizer: Any) -> Callable[[], None]:
        def once() -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return once

    def descent(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    own = build()
    steps = {"team": training(*team.setup(own, descent(own))), "alone": training(plain := build(), descent(plain))}
    for bucket in BUCKETS:
        wrapped = DistributedDataParallel(build(), gradient_as_bucket_view=True, bucket_cap_mb=bucket)
        steps[f"ddp {bucket}"] = training(wrapped, descent(wrapped))
    seconds: dict[str, list[float]] = {}
    for number in range(-3, options.rounds):  # the first ones warm up
        for kind, pause[0] in (("bare", 0.0), ("sleeping", options.sleep / LAYERS)):
            for name, step in steps.items():
                distributed.barrier()
                start = time.perf_counter()
                step()
                distributed.barrier()
                if number >= 0:
                    seconds.setdefault(f"{kind} {name}", []).append(time.perf_counter() - start)
    if team.is_lead:
        print(json.dumps(seconds))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
