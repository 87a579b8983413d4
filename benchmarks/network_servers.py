"""Sharded parameter servers over hosts: how close pushes and pulls come to what the wires allow, beside torch's rpc.

`python benchmarks/network_servers.py` (as root: hosts are network namespaces on a bridge, made and removed here)

Three parts, on the same hosts and links, one after the other: pushes and pulls of `mlp25m` under `sync` with a server
on each host, against 2·max(1, N/k)·S/B of N machines and k servers; the same exchange written with torch's own rpc;
and steps of training with one worker a host, for how much of a push is hidden behind the backward pass.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORKLOAD = "mlp25m"
_PART = "NETWORK_PART"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="on each host")
    parser.add_argument("--rate", type=float, default=1e9, help="of each host's link, in bits per second each way")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=2048, help="samples of a minibatch, for what is hidden")
    parser.add_argument("--steps", type=int, default=4, help="of training, for what is hidden")
    parser.add_argument("--parts", default="servers,rpc,hidden")
    parser.add_argument("--json", type=Path, help="where to write the results, too")
    options = parser.parse_args()
    if _PART in os.environ:
        {"servers": servers, "rpc": rpc, "hidden": hidden}[os.environ[_PART]](options)
        return
    found = measure(options)
    tell(options, found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start the workers of each part on their hosts; returns the results of rank 0, by part."""
    from harness.on_hosts import hosts, run_workers

    from paceline.transport.keys import VARIABLE, new_key

    found: dict[str, Any] = {}
    with hosts(options.hosts, f"{options.rate:.0f}bit") as made, tempfile.TemporaryDirectory() as folder:
        for number, part in enumerate(options.parts.split(",")):
            workers = 1 if part == "hidden" else options.workers
            more = {"FOLDER": folder, VARIABLE: new_key(), _PART: part}
            found[part] = run_workers(made, workers, 29400 + number, more)
    return found


def _model() -> Any:
    import torch

    from paceline.bench.workloads import WORKLOADS

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return WORKLOADS[WORKLOAD].build()


def _timed(what: Callable[[], None], barrier: Callable[[], None], rounds: int) -> list[float]:
    found = []
    for _ in range(rounds + 1):  # the first one takes memory for the first time
        barrier()
        start = time.perf_counter()
        what()
        barrier()
        found.append(time.perf_counter() - start)
    return found[1:]


def servers(options: argparse.Namespace) -> None:
    """Pushes and pulls alone: the gradient is there, and is pushed again and again."""
    import torch

    import paceline

    model = _model()
    team = paceline.join("sync:servers=each", timeouts=paceline.Timeouts(join=120.0, barrier=120.0))
    model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    sum(parameter.sum() for parameter in model.parameters()).backward()
    seconds = _timed(optimizer.step, team.barrier, options.rounds)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    if team.is_lead:
        print(json.dumps({"bytes": size, "seconds": seconds}))


class Shard:
    """A shard on a server of torch's rpc: sums what all workers push, makes the step, and answers all with it."""

    def __init__(self, values: Any, workers: int) -> None:
        import threading

        import torch

        self.values, self.workers, self.come = values, workers, 0
        self.total = torch.zeros_like(values)
        self.lock = threading.Lock()
        self.future: Any = torch.futures.Future()


_shards: dict[int, Shard] = {}


def _exchange(index: int, gradient: Any) -> Any:
    import torch

    shard = _shards[index]
    with shard.lock:
        shard.total.add_(gradient, alpha=1.0 / shard.workers)
        shard.come += 1
        future = shard.future
        if shard.come == shard.workers:
            shard.values = shard.values - 1e-6 * shard.total
            shard.total.zero_()
            shard.come, shard.future = 0, torch.futures.Future()
            future.set_result(shard.values)
    return future


if os.environ.get(_PART) == "rpc":
    import torch.distributed.rpc

    # Found by its name on the other side.
    exchange = torch.distributed.rpc.functions.async_execution(_exchange)
    exchange.__qualname__ = exchange.__name__ = "exchange"


def rpc(options: argparse.Namespace) -> None:
    """The same exchange as in torch's own tutorial of a parameter server by rpc, with a shard on each host."""
    import torch
    import torch.distributed.rpc as remote

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in _model().parameters()])
    parts = list(flat.chunk(options.hosts))
    if rank % options.workers == 0:
        index = rank // options.workers
        _shards[index] = Shard(parts[index].clone(), world)
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    # Left to itself it copies between processes of one kernel, whatever their network; these must use their links.
    backend = remote.TensorPipeRpcBackendOptions(
        init_method=address, num_worker_threads=16, rpc_timeout=300, _transports=["uv"], _channels=["mpt_uv", "basic"]
    )
    remote.init_rpc(f"worker{rank}", rank=rank, world_size=world, rpc_backend_options=backend)
    gradient = [torch.ones_like(part) for part in parts]

    def once() -> None:
        waits = [
            remote.rpc_async(f"worker{index * options.workers}", exchange, args=(index, part))
            for index, part in enumerate(gradient)
        ]
        for wait in waits:
            wait.wait()

    def barrier() -> None:
        from torch.distributed.rpc.api import _wait_all_workers

        _wait_all_workers(120.0)

    seconds = _timed(once, barrier, options.rounds)
    remote.shutdown()
    if rank == 0:
        print(json.dumps({"seconds": seconds}))


def hidden(options: argparse.Namespace) -> None:
    """Training with one worker a host: what of a push is on its way while the backward pass goes on."""
    import torch

    import paceline
    from paceline.bench.workloads import WORKLOADS
    from paceline.events import Compute, Send, read

    workload = WORKLOADS[WORKLOAD]
    model = _model()
    os.chdir(os.environ["FOLDER"])
    team = paceline.join("sync:servers=each", name="hidden", timeouts=paceline.Timeouts(join=120.0, barrier=120.0))
    model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    x, y = workload.batch_of(options.batch, seed=team.rank)
    for _ in range(options.steps + 1):
        workload.loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    lead = team.is_lead
    team.close()
    if not lead:
        return
    events = list(read(Path("runs/hidden/events.jsonl")))
    exposed = total = 0.0
    rows = []
    for rank in range(options.hosts):
        computed = [event for event in events if isinstance(event, Compute) and event.rank == rank][1:]
        sent = [event for event in events if isinstance(event, Send) and event.rank == rank][1:]
        for one, push in zip(computed, sent, strict=True):
            # What it would take by itself, and what is left of that when the gradient is complete.
            total += push.bytes / (options.rate / 8)
            exposed += max(0.0, push.start + push.seconds - one.start - one.seconds)
            rows.append((rank, one.seconds, one.forward, push.start - one.start, push.seconds, push.bytes))
    print(json.dumps({"hidden": 1.0 - exposed / total, "rows": rows}))


def tell(options: argparse.Namespace, found: dict[str, Any]) -> None:
    print(f"{options.hosts} hosts, links of {options.rate / 1e6:g} Mbit/s, a server on each")
    if "servers" in found:
        size = found["servers"]["bytes"]
        bound = 2 * size / (options.rate / 8)
        middle = statistics.median(found["servers"]["seconds"])
        found["servers"].update(bound=bound, median=middle, share=bound / middle)
        print(f"{options.workers} workers a host, {size / 1e6:.1f} MB; 2*max(1,N/k)*S/B of machines: {bound:.3f} s")
        print(f"push and pull               {middle:7.3f} s  {bound / middle:6.1%} of it")
    if "rpc" in found:
        other = found["rpc"]["median"] = statistics.median(found["rpc"]["seconds"])
        beside = ""
        if "servers" in found:
            found["rpc"]["faster"] = other / middle
            beside = f"  the servers are {other / middle:.2f} times as fast"
        print(f"the same with torch's rpc   {other:7.3f} s{beside}")
    if "hidden" in found:
        print(f"hidden behind the backward pass, one worker a host: {found['hidden']['hidden']:.1%} of a push")


if __name__ == "__main__":
    main()
