"""`tensor` against DTensor on gloo, on a transformer. One command: `python benchmarks/tensor.py [--workers 2]`.

The transformer is as large as that of the examples, but has a layer each for queries, keys and values, as DTensor does
not split one that makes all three. Contestants take turns in the same processes, on the same batches; what counts is
the ratio of their best rounds. Both split the same layers: queries, keys and values and the first half of an MLP by
their outputs, what follows by its inputs, the head by its outputs. `bound` is what the ratio would be if communication
cost nothing: one worker's part of the layers alone, all workers at once, without a word to each other. Nothing else
should run on the machine meanwhile.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

import paceline

WORDS = 256


class Block(nn.Module):
    def __init__(self, width: int, heads: int, parts: int) -> None:
        super().__init__()
        self.each, part = width // heads, width // parts
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, part) for _ in range(3))
        self.project = nn.Linear(part, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * part), nn.GELU(), nn.Linear(4 * part, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.before(x)
        parts = [layer(inner).unflatten(-1, (-1, self.each)) for layer in (self.query, self.key, self.value)]
        query, key, value = (part.transpose(1, 2) for part in parts)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class Transformer(nn.Module):
    """parts: of how many workers' parts of the layers it has one."""

    def __init__(self, width: int, layers: int, heads: int, length: int, parts: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads, parts) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS // parts, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def by_dtensor(model: Transformer, mesh: Any) -> Callable[[], None]:
    """The model split by torch itself; returns what updates it."""
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
    for number in range(len(model.blocks)):
        for name in ("query", "key", "value", "mlp.0"):
            plan[f"blocks.{number}.{name}"] = ColwiseParallel()
        for name in ("project", "mlp.2"):
            plan[f"blocks.{number}.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    split = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    rest = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    optimizers = [torch.optim.AdamW(parameters, lr=1e-3) for parameters in (split, rest)]

    def update() -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return update


def work(options: argparse.Namespace) -> None:
    team = paceline.join()
    where = f"tcp://127.0.0.1:{os.environ['BENCH_PORT']}"
    distributed.init_process_group("gloo", init_method=where, rank=team.rank, world_size=team.world_size)
    mesh = init_device_mesh("cpu", (team.world_size,))

    def made(parts: int = 1) -> Transformer:
        torch.manual_seed(0)
        return Transformer(options.width, options.layers, options.heads, options.length, parts)

    torch.manual_seed(1)
    x = torch.randint(0, WORDS, (max(options.batch), options.length))
    y = (x * 7 + 3) % WORDS
    ours: Any = made()
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
    ours, optimizer, _ = team.setup(ours, optimizer, DataLoader(TensorDataset(x, y), batch_size=len(x)))
    theirs, part = made(), made(team.world_size)

    def updating(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return update

    contestants = {
        "tensor": (ours, updating(optimizer)),
        "DTensor on gloo": (theirs, by_dtensor(theirs, mesh)),
        "a part alone": (part, updating(torch.optim.AdamW(part.parameters(), lr=1e-3))),
    }
    for batch in options.batch:
        best = dict.fromkeys(contestants, 0.0)
        losses: dict[str, list[float]] = {name: [] for name in contestants}
        for number in range(options.rounds + 1):
            for name, (model, step) in contestants.items():
                team.barrier()
                start = time.perf_counter()
                for _ in range(options.steps):
                    out = model(x[:batch]).flatten(0, 1)
                    loss = cross_entropy(out, y[:batch].flatten() % out.shape[1])
                    loss.backward()
                    step()
                    losses[name].append(loss.item())
                team.barrier()
                if number:  # the first round is to warm up
                    best[name] = max(best[name], options.steps / (time.perf_counter() - start))
        if team.is_lead:
            same = losses["tensor"], losses["DTensor on gloo"]
            told = {
                "batch": batch,
                "steps_per_second": best,
                "ratio": best["tensor"] / best["DTensor on gloo"],
                "bound": best["a part alone"] / best["DTensor on gloo"],
                "apart": max(abs(a - b) for a, b in zip(*same, strict=True)),
            }
            print(json.dumps(told), flush=True)
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1, 4, 8, 16], help="sequences in a step, one or several"
    )
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()
    if "BENCH_PORT" in os.environ:
        work(options)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "paceline", "run", __file__, "--workers", str(options.workers), "--strategy"]
    command += [f"tensor:degree={options.workers}", "--no-record", "--quiet", "--", *sys.argv[1:]]
    subprocess.run(command, check=True, env={**os.environ, "BENCH_PORT": str(port), "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
