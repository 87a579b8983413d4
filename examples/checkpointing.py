"""Peak memory of a worker with and without activation checkpointing.

`paceline run examples/checkpointing.py --workers 2 -- --checkpoint` recomputes each layer's activations in the backward
pass instead of keeping them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import paceline

WIDTH, LAYERS, BATCH, BATCHES = 512, 32, 4096, 2


class Layers(nn.Module):
    """A deep stack of equal layers."""

    def __init__(self, keeps: bool) -> None:
        """keeps: True if activations are kept for the backward pass, False if they are computed again."""
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(LAYERS)
        )
        self.keeps = keeps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self.keeps else checkpoint(layer, x, use_reentrant=False)
        return x


def memory(entry: str) -> float:
    """Megabytes of this process: now (`VmRSS`), or at its peak since the last reset (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(entry))


def main() -> None:
    """Trains a few steps, and prints the peak of each worker's memory above what it had before."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", action="store_true", help="compute activations again in the backward pass")
    arguments = parser.parse_args()
    checkpoint(nn.Linear(1, 1), torch.ones(1, 1), use_reentrant=False)  # imports what it needs, which is no activation
    team = paceline.join()
    torch.manual_seed(0)
    model = Layers(keeps=not arguments.checkpoint)
    samples = torch.randn(BATCHES * BATCH, WIDTH)
    loader = DataLoader(TensorDataset(samples, samples.flip(0)), batch_size=BATCH)
    model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = memory("VmRSS")
    for x, y in loader:
        with team.step():
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    peaks = team.per_replica(memory("VmHWM") - before).values
    if team.is_lead:
        print(f"loss {loss.item():.4f}; peak memory of the workers: {', '.join(f'{peak:.0f} MB' for peak in peaks)}")


if __name__ == "__main__":
    main()
