"""Steps per second of a transformer in two stages: Paceline's pipeline against torch's on gloo, in turns, in one run.

`python benchmarks/pipeline.py`

Both train the same model with the same optimizer on the same batches, under the same schedule. Torch's pipeline is cut
as one does it by hand, with as many blocks in either stage.
"""

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import transformer
from torch import distributed

STEPS, ROUNDS = 6, 15


def ours(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> float:
    loss = transformer.loss_of(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


class Theirs:
    """torch.distributed.pipelining, as its documentation has it."""

    def __init__(self, model: torch.nn.Module, rank: int, x: torch.Tensor, microbatches: int, schedule: str) -> None:
        from torch.distributed import pipelining

        middle = len(model.blocks) // 2  # type: ignore[arg-type]
        few = x[: len(x) // microbatches]
        cut = {f"blocks.{middle}": pipelining.SplitPoint.BEGINNING}
        stage = pipelining.pipeline(model, (few,), split_spec=cut).build_stage(rank, torch.device("cpu"))
        kind = pipelining.ScheduleGPipe if schedule == "gpipe" else pipelining.Schedule1F1B
        self._schedule = kind(stage, microbatches, loss_fn=transformer.loss_of)
        self._rank = rank
        self._optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=3e-4)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        losses: list[torch.Tensor] = []
        if self._rank == 0:
            self._schedule.step(x)
        else:
            self._schedule.step(target=y, losses=losses)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if losses else 0.0


def work(options: argparse.Namespace) -> None:
    import paceline

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = transformer.Transformer(options.width, options.layers, length=options.length)
    source = transformer.Source(options.length)
    pairs = [source[number] for number in range(options.batch)]
    x, y = torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])
    distributed.init_process_group("gloo", init_method=f"file://{options.meet}", rank=rank, world_size=2)
    peer = Theirs(copy.deepcopy(model), rank, x, options.microbatches, options.schedule)
    team = paceline.join()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model, optimizer = team.setup(model, optimizer)
    first, second = ours(model, optimizer, x, y), peer.step(x, y)  # warm
    if rank == 1 and abs(first - second) > 1e-4:
        raise SystemExit(f"the two do not train alike: {first} and {second}")
    rates: dict[str, list[float]] = {"paceline": [], "torch on gloo": []}
    runs = {"paceline": lambda: ours(model, optimizer, x, y), "torch on gloo": lambda: peer.step(x, y)}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            team.barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                run()
            team.barrier()
            rates[name].append(STEPS / (time.perf_counter() - start))
    if rank == 0:
        ratios = [a / b for a, b in zip(*rates.values(), strict=True)]
        told = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "schedule": options.schedule,
            "microbatches": options.microbatches,
            "batch": options.batch,
            "steps_per_second": {name: max(values) for name, values in rates.items()},
            "ratio_of_best": max(rates["paceline"]) / max(rates["torch on gloo"]),
            "ratio_median": statistics.median(ratios),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
        Path(options.answer).write_text(json.dumps(told), encoding="utf-8")
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--schedule", default="1f1b", choices=["1f1b", "gpipe"])
    parser.add_argument("--meet", default="")
    parser.add_argument("--answer", default="")
    options = parser.parse_args()
    if options.meet:
        work(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        spec = f"pipeline:stages=2,microbatches={options.microbatches},schedule={options.schedule}"
        given = sys.argv[1:]
        command = [sys.executable, "-m", "paceline", "run", str(Path(__file__).resolve()), "--workers", "2", "--quiet"]
        command += ["--strategy", spec, "--", *given, "--meet", f"{folder}/meet", "--answer", str(answer)]
        subprocess.run(command, check=True, cwd=folder, timeout=500)
        told = json.loads(answer.read_text(encoding="utf-8"))
    print(json.dumps(told, indent=2))
    print(f"{told['ratio_median']:.2f} times the steps per second of torch's pipeline on gloo")


if __name__ == "__main__":
    main()
