"""Several hosts on links of a given speed: how close all-reduce comes to what the wires allow, and a step of training.

`python benchmarks/network.py` (as root: hosts are network namespaces on a bridge, made and removed here)

Every part is run by the same processes on the same links, one after the other: an all-reduce of the gradients of
`mlp25m` against the bound 2(N−1)/N·S/B of N machines, and steps of training it in a team and under
DistributedDataParallel on gloo, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORKLOAD = "mlp25m"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="on each host")
    parser.add_argument("--rate", type=float, default=1e9, help="of each host's link, in bits per second each way")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64, help="samples of a worker's minibatch")
    parser.add_argument("--servers", action="store_true", help="then the same for servers: network_servers.py")
    parser.add_argument("--json", type=Path, help="where to write the results, too")
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options)
        return
    found = measure(options)
    tell(options, found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    if options.servers:
        beside = Path(__file__).with_name("network_servers.py")
        same = ["--hosts", str(options.hosts), "--workers", str(options.workers), "--rate", str(options.rate)]
        subprocess.run([sys.executable, str(beside), *same, "--rounds", str(options.rounds)], check=True)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start the workers on their hosts; returns the results of rank 0."""
    from harness.on_hosts import hosts, run_workers

    with hosts(options.hosts, f"{options.rate:.0f}bit") as made:
        return dict(run_workers(made, options.workers, 29400))


def work(options: argparse.Namespace) -> None:
    """What every worker does."""
    import torch
    from torch import distributed

    import paceline

    torch.set_num_threads(1)
    team = paceline.join(timeouts=paceline.Timeouts(join=120.0, barrier=120.0))
    distributed.init_process_group("gloo")
    size, ours = all_reduce(team)
    theirs = torch.full((size // 4,), team.rank + 1.0)
    step, ddp = steps(team, options.batch)
    parts: dict[str, Callable[[], Any]] = {
        "all-reduce": ours,
        "gloo": lambda: distributed.all_reduce(theirs),
        "step": step,
        "ddp": ddp,
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for number in range(options.rounds + 1):
        for name, part in parts.items():
            distributed.barrier()
            start = time.perf_counter()
            part()
            distributed.barrier()
            if number:  # the first time warms up
                seconds[name].append(time.perf_counter() - start)
    if team.is_lead:
        print(json.dumps({"bytes": size, "seconds": seconds}))
    distributed.barrier()
    distributed.destroy_process_group()


def all_reduce(team: Any) -> tuple[int, Callable[[], None]]:
    """The mean gradient of the model, from everybody's buffer into everybody's; with how many bytes it has."""
    from paceline.bench.workloads import WORKLOADS
    from paceline.parameters.gradients import Gradients
    from paceline.parameters.layout import Layout
    from paceline.parameters.machines_reduction import MachinesReduction
    from paceline.transport import BarrierKind

    members = team._members
    layout = Layout(WORKLOADS[WORKLOAD].build().named_parameters(), members.local.size)
    memory = members.share(Gradients.memory_size(layout, members.local.size))
    gradients = Gradients.shared(layout, memory, members.local.rank, members.local.size)
    reduction = MachinesReduction(layout, gradients, members, "auto")
    weights = [(rank, 1.0 / team.world_size) for rank in range(team.world_size)]
    mean = (team.world_size + 1) / 2
    for flat in gradients.own:
        flat.fill_(team.rank + 1.0)  # whose mean stays what it is, however often it is made
    members.barrier.wait(BarrierKind.BARRIER)

    def once() -> None:
        reduction.shard(weights, None)
        members.barrier.wait(BarrierKind.PUBLISH)
        reduction.gather()
        members.barrier.wait(BarrierKind.PUBLISH)
        assert all(abs(float(flat[place]) - mean) < 1e-3 for flat in gradients.own for place in (0, -1))

    return layout.size, once


def steps(team: Any, samples: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """A step of training in the team, and one under DistributedDataParallel."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from paceline.bench.workloads import WORKLOADS

    workload = WORKLOADS[WORKLOAD]
    x, y = workload.batch_of(samples, seed=team.rank)

    def training(net: Any, optimizer: Any) -> Callable[[], None]:
        def once() -> None:
            workload.loss(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        return once

    own = workload.build()
    plain = DistributedDataParallel(workload.build(), gradient_as_bucket_view=True)
    return (
        training(*team.setup(own, torch.optim.SGD(own.parameters(), lr=0.01))),
        training(plain, torch.optim.SGD(plain.parameters(), lr=0.01)),
    )


def tell(options: argparse.Namespace, found: dict[str, Any]) -> None:
    machines, size = options.hosts, found["bytes"]
    bound = 2 * (machines - 1) / machines * size / (options.rate / 8)
    middle = {name: statistics.median(values) for name, values in found["seconds"].items()}
    found.update(bound=bound, median=middle, share=bound / middle["all-reduce"], faster=middle["ddp"] / middle["step"])
    print(f"{machines} hosts x {options.workers} workers, links of {options.rate / 1e6:g} Mbit/s, {size / 1e6:.1f} MB")
    print(f"bound 2(N-1)/N*S/B         {bound:7.3f} s")
    for name, what in (("all-reduce", "all-reduce of a team"), ("gloo", "all-reduce of gloo")):
        print(f"{what:<26} {middle[name]:7.3f} s  {bound / middle[name]:6.1%} of the bound")
    print(f"step of {WORKLOAD} in a team  {middle['step']:7.3f} s")
    print(f"step under DDP on gloo     {middle['ddp']:7.3f} s  the team is {found['faster']:.2f} times as fast")


if __name__ == "__main__":
    main()
