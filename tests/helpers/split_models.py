"""Models that tests split over several workers, and the loop that trains them, in a team and in one plain process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from paceline import Team, TeamError
from paceline.config import Launch, Timeouts

WORDS, LENGTH = 61, 12


class Block(nn.Module):
    """Of a transformer; x goes around both of its halves."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.join(seen.transpose(1, 2).reshape(batch, length, width)))
        result: torch.Tensor = x + self.think(self.between(x))
        return result


class Transformer(nn.Module):
    """With tied weights at its two ends."""

    def __init__(self, width: int = 16, blocks: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Parameter(torch.randn(LENGTH, width) / 10)
        self.blocks = nn.ModuleList(Block(width, 2, dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x) + self.places[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(self.norm(x))
        return result


def small() -> nn.Module:
    """One block of a transformer: what traces it takes its time for every one."""
    return Transformer(blocks=1)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.inner(x))


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        Residual(8),
        nn.MaxPool2d(2),
        Residual(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, WORDS),
    )


def chain(width: int = 12, layers: int = 5) -> nn.Module:
    inner = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*inner, nn.Linear(width, WORDS))


def words(samples: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, WORDS, (samples, LENGTH), generator=generator)
    return TensorDataset(x, (x * 7 + 3) % WORDS)


def images(samples: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 3, 8, 8, generator=generator)
    return TensorDataset(x, torch.randint(0, WORDS, (samples,), generator=generator))


def vectors(samples: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 12, generator=generator)
    return TensorDataset(x, torch.randint(0, WORDS, (samples,), generator=generator))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], TensorDataset]]] = {
    "transformer": (Transformer, words),
    "small": (small, words),
    "convnet": (convnet, images),
    "chain": (chain, vectors),
}


def score(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.view(-1, output.size(-1)), y.view(-1))


def made(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[kind][0]()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def train(team: Team | None, kind: str, steps: int, *, batch: int = 16, seed: int = 0, **options: Any) -> list[float]:
    """The loss of every step."""
    model: Any = made(kind, seed if team is None else seed + team.rank)  # the lead's values must count
    optimizer = adam(model)
    loader: Any = DataLoader(MODELS[kind][1](), batch_size=batch, shuffle=True)
    torch.manual_seed(5)
    if team is not None:
        model, optimizer, loader = team.setup(model, optimizer, loader, loss=cross_entropy, **options)
    losses: list[float] = []
    while len(losses) < steps:
        for x, y in loader:
            loss = score(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == steps:
                break
    return losses


def learned(
    team: Team | None, before: Path | None, after: Path | None, *, decay: float = 1.0
) -> dict[str, torch.Tensor]:
    """The model's values after two epochs, from a checkpoint and to one; in the last batch of each is one sample.

    decay: the script multiplies the parameters with it after each update but the last.
    """
    model: Any = made("small", 0 if team is None else team.rank).double()
    optimizer: Any = adam(model)
    loader: Any = DataLoader(words(41), batch_size=20)
    if team is not None:
        model, optimizer, loader = team.setup(model, optimizer, loader)
        if before is not None:
            team.load(before)
    elif before is not None:
        content = torch.load(before, weights_only=True)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
    left = 2 * 3
    for _ in range(2):
        for x, y in loader:
            left -= 1
            score(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for parameter in model.parameters() if decay < 1.0 and left else ():
                    parameter.mul_(decay)
    if team is not None:
        team.barrier()
        if after is not None and team.is_lead:
            team.save(after)
        team.barrier()
    return {name: value.clone() for name, value in model.state_dict().items()}


def same_values(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = 1e-9) -> bool:
    assert list(ours) == list(theirs)
    return all(torch.allclose(ours[name], theirs[name], rtol=tolerance, atol=tolerance) for name in ours)


def struck(team: Team, victim: int, epochs: int) -> tuple[str, str, tuple[int, ...]]:
    """Name, message and ranks of the error that a worker ends with, if it does, after another died in its third."""
    model: Any = made("small")
    loader: Any = DataLoader(MODELS["small"][1](), batch_size=20)
    model, optimizer, loader = team.setup(model, adam(model), loader)
    done = 0
    try:
        for _ in range(epochs):
            for x, y in loader:
                loss = score(model(x), y)
                if done == 2 and team.rank == victim:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                done += 1
    except TeamError as error:
        return type(error).__name__, str(error), tuple(error.ranks)
    return "", "", ()


def dies(team: Team, victim: int) -> None:
    """One worker dies in its third step."""
    model: Any = made("small")
    loader: Any = DataLoader(words(), batch_size=10)
    model, optimizer, loader = team.setup(model, adam(model), loader)
    for step, (x, y) in enumerate(loader):
        loss = score(model(x), y)
        if step == 2 and team.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


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
    """Takes its time, and changes nothing: layers that sleep do not slow each other down on few cores."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.scale, self.seconds = nn.Parameter(torch.ones(1)), (forward, backward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Nap.apply(x * self.scale, *self.seconds)  # type: ignore[no-any-return]


def launched(strategy: str, **more: Any) -> Launch:
    return Launch(strategy=strategy, timeouts=Timeouts(barrier=60.0, join=60.0), **more)


def apart(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours, theirs, strict=True))
