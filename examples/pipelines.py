"""Draws what each schedule of a pipeline does, from real runs of stages that sleep for known times.

`python examples/pipelines.py docs/figures` writes SVG files there.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

STAGES, MICROBATCHES = 4, 8
SECONDS = 0.03
"""Of a forward pass of a microbatch on a stage, of its backward pass, and of the gradients of its weights."""
FIGURES = {
    "gpipe": "GPipe: all forward, then all backward",
    "1f1b": "1F1B: backward as soon as possible, so that few activations are kept",
    "interleaved": "interleaved: every worker has two chunks of the model, so it is sooner its turn",
    "zero-bubble": "zero bubble: the gradients of weights fill the gaps",
    "shared": "1F1B in two stages: three workers take turns at the second",
}


class Nap(torch.autograd.Function):
    """Sleeps on the way forward and on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradient, None, None


class Layer(nn.Module):
    """A layer whose forward pass, gradient of the input and gradient of the weight take known times."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = Nap.apply(self.weight, 0.0, self.seconds)
        return Nap.apply(x, self.seconds, self.seconds) * weight  # type: ignore[no-any-return]


def work() -> None:
    import paceline

    layers = 4  # for every worker
    model: Any = nn.Sequential(*(Layer(SECONDS / layers) for _ in range(layers * STAGES)))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
    team = paceline.join()
    model, optimizer = team.setup(model, optimizer)
    for _ in range(5):
        with team.step():
            model(torch.ones(MICROBATCHES, 4)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def main(folder: Path, names: list[str]) -> int:
    from paceline.events import read
    from paceline.report import timeline

    folder.mkdir(parents=True, exist_ok=True)
    for name, title in FIGURES.items():
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as place:
            options = "stages=2,workers=1+3" if name == "shared" else f"stages={STAGES},schedule={name}"
            spec = f"pipeline:{options},microbatches={MICROBATCHES}"
            command = [sys.executable, "-m", "paceline", "run", str(Path(__file__).resolve()), "--quiet"]
            command += ["--workers", str(STAGES), "--strategy", spec, "--name", "figure"]
            code = subprocess.run(command, check=False, cwd=place).returncode
            if code:
                return code
            run = Path(place) / "runs" / "figure"
            events = list(read(run / "events.jsonl"))
            bubble = json.loads((run / "summary.json").read_bytes())["bubble"]
        formula = "" if bubble["formula"] is None else f", by the formula {bubble['formula']:.1%}"
        words = f"bubble {bubble['measured']:.1%}{formula}"
        (folder / f"pipeline-{name}.svg").write_text(timeline(events, f"{title} ({words})", 2))
        print(f"{name}: {words}", flush=True)
    return 0


if __name__ == "__main__":
    if "RANK" in os.environ:
        work()
    else:
        sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "figures"), sys.argv[2:]))
