"""Trains on Fashion-MNIST, in a team or under DistributedDataParallel, and says how accurate it was when.

`paceline run examples/train_fashion.py --workers 4 --strategy k-batch-async:k=4 --slow 3:4 -- --epochs 3`
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from fashion import accuracy, datasets, network
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import paceline

BATCH = 32
"""Samples of a worker's minibatch."""
RATE = 1e-3
"""The learning rate per gradient in an update: multiplied by how many there are, in a team and under DDP."""


class Clock:
    """Counts the seconds of training; tests do not count."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = time.perf_counter()

    def stop(self) -> float:
        self.seconds += time.perf_counter() - self._since
        return self.seconds

    def start(self) -> None:
        self._since = time.perf_counter()


class Judge:
    """Lets the lead test the model now and then, while the others wait."""

    def __init__(self, lead: bool, model: torch.nn.Module, test: torch.utils.data.TensorDataset) -> None:
        self.scores: list[tuple[float, float]] = []
        self._lead, self._model, self._test = lead, model, test
        self._clock = Clock()

    def look(self) -> None:
        seconds = self._clock.stop()
        if self._lead:
            self.scores.append((seconds, accuracy(self._model, self._test)))
            print(f"after {seconds:.1f} s: test accuracy {self.scores[-1][1]:.2%}", flush=True)

    def go_on(self) -> None:
        self._clock.start()


def train_team(team: paceline.Team, epochs: int) -> list[tuple[float, float]]:
    train, test = datasets()
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    loader = DataLoader(train, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = team.setup(
        model, optimizer, loader, global_batch=BATCH * team.world_size, scale_lr="linear"
    )
    team.barrier()
    judge = Judge(team.is_lead, model, test)
    for _ in range(epochs):
        for images, labels in loader:
            with team.step():
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
        judge.look()
        team.barrier()
        judge.go_on()
    return judge.scores


def train_ddp(team: paceline.Team, epochs: int, factor: float) -> list[tuple[float, float]]:
    """The same; the last worker's computing takes `factor` times as long."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo")
    train, test = datasets()
    plain = network()
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE * team.world_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(train)
    loader = DataLoader(train, batch_size=BATCH, sampler=sampler)
    slow = factor - 1 if team.rank == team.world_size - 1 else 0.0
    distributed.barrier()
    judge = Judge(team.is_lead, plain, test)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            start = time.perf_counter()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            if slow:
                # Forward is about a third of the computing; DDP exchanges gradients within the rest.
                time.sleep(3 * slow * (time.perf_counter() - start))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        judge.look()
        distributed.barrier()
        judge.go_on()
    distributed.destroy_process_group()
    return judge.scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--ddp", type=float, metavar="FACTOR", help="use DDP, with the last worker this much slower")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    team = paceline.join()
    torch.manual_seed(0)
    scores = train_team(team, options.epochs) if options.ddp is None else train_ddp(team, options.epochs, options.ddp)
    if team.is_lead and options.output:
        options.output.write_text(json.dumps(scores))


main()
