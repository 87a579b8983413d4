"""The bubble of real pipelines with stages of known length, beside the formula's.

`python benchmarks/bubble.py`

The layers sleep, so that devices that share cores do not slow each other down.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

FORWARD, BACKWARD = 0.06, 0.12
"""Seconds of a stage, for a microbatch."""
STEPS = 4
CASES = [
    *((schedule, 2, microbatches) for schedule in ("gpipe", "1f1b") for microbatches in (2, 4, 8)),
    *((schedule, 4, microbatches) for schedule in ("gpipe", "1f1b") for microbatches in (4, 8)),
    ("interleaved", 2, 4),
    ("zero-bubble", 4, 8),
]


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradient, None, None


class Nap(nn.Module):
    """Takes its time, and changes nothing."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.seconds = (forward, backward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Nap.apply(x * self.scale, *self.seconds)  # type: ignore[no-any-return]


def work(stages: int, microbatches: int, share: int) -> None:
    """share: layers in every stage."""
    import paceline

    model: Any = nn.Sequential(*(Nap(FORWARD / share, BACKWARD / share) for _ in range(stages * share)))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
    team = paceline.join()
    model, optimizer = team.setup(model, optimizer)
    x = torch.ones(2 * microbatches, 4)
    for _ in range(STEPS):
        with team.step():
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def measured(schedule: str, stages: int, microbatches: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        spec = f"pipeline:stages={stages},microbatches={microbatches},schedule={schedule}"
        command = [sys.executable, "-m", "paceline", "run", str(Path(__file__).resolve()), "--quiet", "--name", "run"]
        command += ["--workers", str(stages), "--strategy", spec, "--", "--work", str(stages), str(microbatches)]
        command += ["4" if schedule == "interleaved" else "2"]
        subprocess.run(command, check=True, cwd=folder, timeout=200)
        summary = json.loads((Path(folder) / "runs/run/summary.json").read_bytes())
    found: dict[str, float] = summary["bubble"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=int, nargs=3)
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return
    print("schedule      stages  microbatches  measured  formula  apart")
    worst = 0.0
    for schedule, stages, microbatches in CASES:
        found = measured(schedule, stages, microbatches)
        apart = found["measured"] / found["formula"] - 1 if found["formula"] else 0.0
        worst = max(worst, abs(apart)) if schedule in ("gpipe", "1f1b") else worst
        print(
            f"{schedule:<13} {stages:>6} {microbatches:>13} {found['measured']:>9.1%} {found['formula']:>8.1%} "
            f"{apart:>+6.1%}",
            flush=True,
        )
    print(f"GPipe and 1F1B are at most {worst:.1%} from the formula")


if __name__ == "__main__":
    main()
