"""Ways to iterate over data, and habits of scripts that were written for DistributedDataParallel."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

from zoo.loops import epoch, evaluate, load, save, start
from zoo.scripts import Result, noise, ported, script, state, whole_numbers
from zoo.vision import mlp, rows


def step(model: Any, optimizer: Any, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@script("a checkpoint in the middle of an epoch; a second run loads it and skips the batches that are done")
def resume_in_mid_epoch(team: Any) -> Result:
    model, optimizer, loader, test = start(team, torch.optim.Adam, lr=1e-2)
    path = Path(os.environ["ZOO_FOLDER"]) / "checkpoint.pt"

    def run(first: int, done: int, last: int) -> None:
        """Trains from an epoch on, without its first batches, until some batches of the last one."""
        for number in range(first, 3):
            torch.manual_seed(number)
            for i, (x, y) in enumerate(loader):
                if number == first and i < done:
                    continue
                if number == 1 and i == last:
                    return
                step(model, optimizer, F.cross_entropy(model(x), y))

    run(0, 0, 2)
    save(team, path, model, optimizer)
    epoch(model, optimizer, loader)  # what is lost
    load(team, path, model, optimizer)
    run(1, 2, -1)
    return state(model), [evaluate(model, test)]


@script("a `DistributedSampler` with `set_epoch`, as a script for DistributedDataParallel has it")
def distributed_sampler(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    workers, rank = (1, 0) if team is None else (team.world_size, team.rank)
    data, held_out = rows(28), rows(18, seed=6)
    sampler: Any = DistributedSampler(data, workers, rank)
    loader: Any = DataLoader(data, batch_size=8, sampler=sampler)
    test: Any = DataLoader(held_out, batch_size=8, sampler=DistributedSampler(held_out, workers, rank, shuffle=False))
    model, optimizer, loader, test = ported(team, model, optimizer, loader, test)
    for number in range(2):
        (sampler if number else loader.sampler).set_epoch(number)
        epoch(model, optimizer, loader)
    return state(model), [evaluate(model, test)]


@script(
    "`batch_size // world_size` and a rate times `world_size`: another training than the plain one", within=float("inf")
)
def scaled_by_world_size(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = mlp()
    workers = 1 if team is None else team.world_size
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01 * workers)
    loader: Any = DataLoader(rows(28), batch_size=8 // workers, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    epoch(model, optimizer, loader)
    return state(model), []


@script("`random_split` for training and validation, and a `Subset` of the first")
def parts_of_a_dataset(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    train, held_out = random_split(rows(40), [30, 10], generator=torch.Generator().manual_seed(3))
    loader: Any = DataLoader(Subset(train, range(0, 30, 2)), batch_size=6, shuffle=True)
    test: Any = DataLoader(held_out, batch_size=8)
    model, optimizer, loader, test = ported(team, model, optimizer, loader, test)
    epoch(model, optimizer, loader)
    epoch(model, optimizer, loader)
    return state(model), [evaluate(model, test)]


@script("`itertools.islice(loader, n)`: some batches of each epoch")
def some_batches(team: Any) -> Result:
    model, optimizer, loader, _ = start(team)
    for _ in range(3):
        for x, y in itertools.islice(loader, 2):
            step(model, optimizer, F.cross_entropy(model(x), y))
    return state(model), []


@script("`tqdm(loader)` with a postfix")
def progress_bar(team: Any) -> Result:
    model, optimizer, loader, _ = start(team)
    for _ in range(2):
        with tqdm(loader, disable=team is not None and not team.is_lead) as bar:
            for x, y in bar:
                loss = F.cross_entropy(model(x), y)
                step(model, optimizer, loss)
                bar.set_postfix(loss=loss.item())
    return state(model), []


@script("two loaders at once: `zip(labelled, unlabelled)`, the shorter one ends the epoch")
def zipped_loaders(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    labelled: Any = DataLoader(rows(24), batch_size=8, shuffle=True)
    others: Any = DataLoader(TensorDataset(noise(40, 6, seed=9)), batch_size=8, shuffle=True)
    model, optimizer, labelled, others = ported(team, model, optimizer, labelled, others)
    for _ in range(2):
        for (x, y), (z,) in zip(labelled, others, strict=False):
            both = model(torch.cat([x, z]))
            entropy = -(both[len(x) :].softmax(1) * both[len(x) :].log_softmax(1)).sum(1)
            step(model, optimizer, F.cross_entropy(both[: len(x)], y) + 0.1 * entropy.mean())
    return state(model), []


@script("one loader twice at once: `zip(loader, loader)` mixes each batch with another one")
def loader_with_itself(team: Any) -> Result:
    model, optimizer, loader, _ = start(team, samples=24)
    for _ in range(2):
        for (x, y), (other, z) in zip(loader, loader, strict=True):
            output = model(0.7 * x + 0.3 * other)
            step(model, optimizer, 0.7 * F.cross_entropy(output, y) + 0.3 * F.cross_entropy(output, z))
    return state(model), []


@script("`batches = iter(loader)` again after some steps, while the first iterator is still there")
def iterator_anew(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(rows(40), batch_size=8, shuffle=True, num_workers=1)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    batches = iter(loader)
    for number in range(6):
        if number % 3 == 2:
            batches = iter(loader)
        x, y = next(batches)
        step(model, optimizer, F.cross_entropy(model(x), y))
    return state(model), []


@script("only rank 0 evaluates, after each epoch, as scripts for DistributedDataParallel do")
def evaluated_by_lead(team: Any) -> Result:
    model, optimizer, loader, test = start(team)
    printed = []
    for _ in range(2):
        epoch(model, optimizer, loader)
        if team is None or team.rank == 0:
            printed.append(evaluate(model, test))
    return state(model), printed


def alternate(team: Any, samples: int, steps: int = 8) -> Result:
    """Takes batches from two loaders in turn, and begins each anew when it has ended."""
    torch.manual_seed(0)
    model: Any = mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loaders: Any = [DataLoader(rows(n, seed=n), batch_size=b, shuffle=True) for n, b in ((samples, 6), (22, 9))]
    model, optimizer, *loaders = ported(team, model, optimizer, *loaders)
    batches = list(map(iter, loaders))
    for number in range(steps):
        try:
            x, y = next(batches[number % 2])
        except StopIteration:
            batches[number % 2] = iter(loaders[number % 2])
            x, y = next(batches[number % 2])
        step(model, optimizer, F.cross_entropy(model(x), y))
    return state(model), []


@script("batches of two loaders in turn, each begun anew by `iter` when it has ended")
def alternating_loaders(team: Any) -> Result:
    return alternate(team, 15)


@script("batches of two loaders in turn, of which one leaves a single sample: a worker has no part of that")
def alternating_with_one_left(team: Any) -> Result:
    return alternate(team, 13)


@script("mixup within a batch: `x[torch.randperm(len(x))]`, so each worker mixes within its part", within=float("inf"))
def mixup_within_batch(team: Any) -> Result:
    model, optimizer, loader, _ = start(team)
    for x, y in loader:
        order = torch.randperm(len(x))
        output = model(0.3 * x + 0.7 * x[order])
        step(model, optimizer, 0.3 * F.cross_entropy(output, y) + 0.7 * F.cross_entropy(output, y[order]))
    return state(model), []


@script("a curriculum: each epoch has a loader of its own, by `team.loader`, over more samples")
def curriculum(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    data = rows(28)
    first: Any = DataLoader(Subset(data, range(12)), batch_size=4, shuffle=True)
    model, optimizer, first = ported(team, model, optimizer, first)
    epoch(model, optimizer, first)
    for samples in (20, 28):
        loader: Any = DataLoader(Subset(data, range(samples)), batch_size=8, shuffle=True)
        epoch(model, optimizer, loader if team is None else team.loader(loader))
    return state(model), []


class Grown(TensorDataset):
    """A dataset whose samples change from epoch to epoch."""

    scale = 1.0

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x * self.scale, y


@script("a dataset that is changed between epochs: `loader.dataset.scale = …`")
def changed_dataset(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(Grown(*rows(28).tensors), batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    for number in range(3):
        loader.dataset.scale = 1.0 + number
        epoch(model, optimizer, loader)
    return state(model), []


@script("mixup with a share that is drawn for each batch, by one seed")
def mixup(team: Any) -> Result:
    model, optimizer, loader, _ = start(team)
    draw = random.Random(7)
    for _ in range(2):
        for x, y in loader:
            share = draw.betavariate(0.4, 0.4)
            output = model(share * x + (1 - share) * x.flip(1))
            loss = share * F.cross_entropy(output, y) + (1 - share) * F.cross_entropy(output, 3 - y)
            step(model, optimizer, loss)
    return state(model), []


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(6, 12), nn.Linear(12, 3), nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.actor(hidden), self.critic(hidden).squeeze(1)


@script("PPO's loss in one model: a clipped ratio, a value and an entropy, over a loader of played steps")
def actor_critic(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = ActorCritic()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=3e-3)
    played = TensorDataset(
        noise(32, 6), whole_numbers(3, 32), noise(32, seed=3), noise(32, seed=4), -noise(32).abs() - 1
    )
    loader: Any = DataLoader(played, batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    for _ in range(2):
        for x, action, advantage, value, before in loader:
            logits, found = model(x)
            ratio = (logits.log_softmax(1).gather(1, action[:, None]).squeeze(1) - before).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
            optimizer.zero_grad()
            (-gain + 0.5 * F.mse_loss(found, value) - 0.01 * entropy).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return state(model), []


@script("labels spread over one graph, without a loader: a mean over the nodes that are known")
def label_propagation(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = ported(team, model, optimizer)[:2]
    x, labels = noise(12, 6), whole_numbers(4, 12)
    edges = ((noise(12, 12, seed=3) > 1).to(x.dtype) + torch.eye(12)).clamp(max=1)
    spread, known = edges / edges.sum(1, keepdim=True), torch.arange(8)
    for _ in range(4):
        believed = spread @ (spread @ model(x).softmax(1))
        step(model, optimizer, F.nll_loss(believed.log()[known], labels[known]))
    return state(model), []


class Centred(nn.Module):
    """Subtracts a mean of the batches so far, which it keeps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.mean: torch.Tensor
        self.batches: torch.Tensor
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.batches += 1
                self.mean += (x.mean() - self.mean) / self.batches
        output: torch.Tensor = self.body(x - self.mean)
        return output


def train_few(team: Any, model: Any) -> Result:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = ported(team, model, optimizer, DataLoader(rows(28), batch_size=8, shuffle=True))
    for _ in range(2):
        epoch(model, optimizer, loader)
    return state(model), []


@script("a mean of the samples so far in a buffer of the model, which its forward pass changes")
def mean_in_buffer(team: Any) -> Result:
    torch.manual_seed(0)
    return train_few(team, Centred())


@script("`weight_norm` and `spectral_norm`, whose buffers every call changes, in an `nn.Sequential`")
def normalised_weights(team: Any) -> Result:
    torch.manual_seed(0)
    model = mlp()
    for number, layer in enumerate(one for one in model.modules() if isinstance(one, nn.Linear)):
        (parametrizations.weight_norm if number else parametrizations.spectral_norm)(layer)
    return train_few(team, model)
