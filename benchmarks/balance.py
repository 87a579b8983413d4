"""What balance=True gains when one of two workers is four times slower. One command: `python benchmarks/balance.py`.

Balanced and unbalanced runs of the same training alternate; what counts is the ratio of their best rounds, and that
both end with the same parameters.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SCRIPT = """
import sys

import paceline
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

team = paceline.join()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256), nn.Tanh(), nn.Linear(256, 10))
data = TensorDataset(torch.randn(4000, 256), torch.randint(0, 10, (4000,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(data, batch_size=128, shuffle=True)
model, optimizer, loader = team.setup(model, optimizer, loader, balance=sys.argv[1] == "balanced")
for _ in range(4):
    for x, y in loader:
        with team.step():
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
team.save(sys.argv[2])
"""


def main() -> None:
    rates: dict[str, list[float]] = {"even": [], "balanced": []}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        for number in range(3):
            for way, rate in rates.items():
                print(f"round {number + 1} of 3: {way}", file=sys.stderr, flush=True)
                options = ["--workers", "2", "--slow", "1:4", "--quiet", "--name", way]
                command = [sys.executable, "-m", "paceline", "run", str(script), *options]
                checkpoint = str(Path(folder) / f"{way}.pt")
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                subprocess.run([*command, "--", way, checkpoint], check=True, cwd=folder, env=environment)
                summary = json.loads((Path(folder) / "runs" / way / "summary.json").read_text())
                rate.append(summary["samples_per_second"])
        even, balanced = (torch.load(Path(folder) / f"{way}.pt")["model"] for way in rates)
    apart = max(float((even[name] - balanced[name]).norm() / even[name].norm()) for name in even)
    print(f"balanced: {max(rates['balanced']) / max(rates['even']):.2f} times the samples per second of an even split")
    print(f"parameters apart by {apart:.1e} (relative)")


if __name__ == "__main__":
    main()
