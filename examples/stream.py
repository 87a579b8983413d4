"""Trains on data without a length: an endless stream of samples, or shards on disk.

paceline run examples/stream.py --workers 4 --strategy k-sync:k=3
paceline run examples/stream.py --workers 4 --strategy async -- --shards runs/shards
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset

import paceline
from paceline.data import ShardedDataset

Sample = tuple[torch.Tensor, torch.Tensor]


class Endless(IterableDataset[Sample]):
    """Points and the sum of their squares, for ever; from a generator of its own, so that all workers draw the same."""

    def __iter__(self) -> Iterator[Sample]:
        generator = torch.Generator().manual_seed(0)
        while True:
            x = torch.randn(8, generator=generator)
            yield x, x.square().sum().view(1)


def write_shards(folder: Path, count: int = 12) -> list[Path]:
    """Shards of different lengths, one file each."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:02}.pt" for number in range(count)]
    for number, path in enumerate(paths):
        if not path.exists():
            torch.save(torch.randn(200 + 20 * number, 8, generator=torch.Generator().manual_seed(number)), path)
    return paths


def read_shard(path: Path) -> Iterator[Sample]:
    for x in torch.load(path):
        yield x, x.square().sum().view(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", type=Path, help="write shards into this folder, and train on them")
    parser.add_argument("--steps", type=int, default=50, help="steps of an epoch of the endless stream")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    team = paceline.join()
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    dataset: IterableDataset[Sample] = Endless()
    steps: int | None = options.steps
    if options.shards is not None:
        if team.is_lead:
            write_shards(options.shards)
        team.barrier()
        dataset, steps = ShardedDataset(sorted(options.shards.glob("*.pt")), read_shard), None
    loader = DataLoader(dataset, batch_size=64)
    model, optimizer, loader = team.setup(model, optimizer, loader, steps_per_epoch=steps)

    for epoch in range(options.epochs):
        samples, loss = 0, torch.zeros(())
        for x, y in loader:
            with team.step():
                loss = mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                samples += len(x)
            optimizer.zero_grad()
        team.report(loss=loss)
        print(f"epoch {epoch}: rank {team.rank} trained on {samples} samples, last loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
