"""Models, samples and loops that tests train with, in a team and in one plain process to compare it with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from paceline import Team
from paceline.config import Launch, Timeouts

BATCH = 48
"""Divisible by 2, 3 and 4 workers. 205 samples are four such batches and one of 13, too few for 3 or 4 workers."""
ROUNDS = 5

Make = Callable[[Any], torch.optim.Optimizer]
Values = list[torch.Tensor]


class Net(nn.Module):
    """Tied weights, a frozen layer, a layer that is never used, one that is only used now and then, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 24)
        self.second = nn.Linear(24, 24)
        self.tied = nn.Linear(24, 24)
        self.tied.weight = self.second.weight
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.sometimes = nn.Linear(24, 24)
        self.last = nn.Linear(24, 4)
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.tied(torch.tanh(self.second(x))))
        x = torch.tanh(self.frozen(x))
        if self.uses_all():
            x = x + self.sometimes(x)
        result: torch.Tensor = self.last(x)
        return result

    def uses_all(self) -> bool:
        """Whether it is a turn of the layer that is used now and then."""
        return self.turn % 3 == 0


def build(dtype: torch.dtype = torch.float64, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def data(samples: int = 205, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 10, dtype=dtype, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long() + 2 * (x[:, 0] > 0).long())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.01)


def under(strategy: str, servers: str | None = "lead", *, barrier: float = 60.0, **more: Any) -> Launch:
    where = (
        None if strategy.startswith(("all-reduce", "pipeline", "tensor", "mesh")) else servers
    )  # which has no servers
    return Launch(strategy=strategy, servers=where, timeouts=Timeouts(barrier=barrier, join=60.0), **more)


def loop(model: Net, optimizer: torch.optim.Optimizer, loader: Any, epochs: int, start: int = 0) -> None:
    for epoch in range(start, start + epochs):
        for number, (x, y) in enumerate(loader):
            model.turn = epoch * ROUNDS + number
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()


def values(model: nn.Module) -> Values:
    return [parameter.detach().clone() for parameter in model.parameters()]


def plain(make: Make, dtype: torch.dtype, epochs: int) -> Values:
    model = build(dtype)
    loop(model, make(model.parameters()), DataLoader(data(dtype=dtype), batch_size=BATCH), epochs)
    return values(model)


def in_team(team: Team, make: Make, dtype: torch.dtype, epochs: int, options: dict[str, Any] | None = None) -> Values:
    model = build(dtype, seed=team.rank)  # every worker begins elsewhere; the lead's values must count
    loader = DataLoader(data(dtype=dtype), batch_size=BATCH)
    model, optimizer, loader = team.setup(model, make(model.parameters()), loader, **(options or {}))
    loop(model, optimizer, loader, epochs)
    return values(model)


def apart(ours: Values, theirs: Values) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True) if b.numel())


def same_bits(ours: Values, theirs: Values) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def divided(team: Team | None) -> Values:
    """Each worker uses a branch of its own, and nobody the last one."""
    torch.manual_seed(0)
    branches = nn.ModuleList(nn.Linear(3, 1) for _ in range(4)).double()
    model: Any = branches
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    x = torch.arange(12, dtype=torch.float64).view(4, 3) / 10
    if team:
        model, optimizer = team.setup(model, optimizer)
    for _ in range(4):
        if team:
            branches[team.rank](x).mean().backward()
        else:
            sum(branches[rank](x).mean() / 3 for rank in range(3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def scaling(team: Team, rule: str) -> float:
    model: Any = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), scale_lr=rule, warmup=1)
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(model.weight)
