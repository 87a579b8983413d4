"""Gradients of gradients are those of one process where layers are split over workers, or refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.split_models import launched
from helpers.teams import run_team
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Team


class Attended(nn.Module):
    """Attention by hand, since torch's fused one has no second gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + self.attention(x, x, x)[0])
        result: torch.Tensor = self.head(x + self.down(torch.tanh(self.up(x)))).mean(1)
        return result


def convolved(norm: nn.Module) -> nn.Module:
    inner = [nn.Conv2d(2, 8, 3, padding=1), norm, nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()]
    return nn.Sequential(*inner, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layers": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Softmax(-1), nn.Linear(8, 1)), (6,)),
    "attention": (Attended, (4, 8)),
    "convolutions": (lambda: convolved(nn.GroupNorm(4, 8)), (2, 4, 4)),
    "batch norm": (lambda: convolved(nn.BatchNorm2d(8)), (2, 4, 4)),
}


def penalised(team: Team | None, kind: str, options: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A critic whose slope at its input is to be 1."""
    torch.manual_seed(0)
    make, shape = MODELS[kind]
    model: Any = make().double()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-2)
    samples = torch.randn(16, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loader: Any = DataLoader(TensorDataset(samples), batch_size=8)
    if team is not None:
        model, optimizer, loader = team.setup(model, optimizer, loader, **options)
    seen = []
    for _ in range(2):
        for (batch,) in loader:
            x = batch.clone().requires_grad_(True)
            scores = model(x)
            (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
            optimizer.zero_grad()
            loss = scores.mean() + ((slope.flatten(1).norm(dim=1) - 1) ** 2).mean()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    return seen, {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        *((kind, "tensor:degree=2") for kind in MODELS),
        ("attention", "tensor:degree=2,sequence_parallel=true"),
        ("layers", "mesh:data=2,tensor=2"),
    ],
)
def test_a_gradient_penalty_passes_through_split_layers(kind: str, strategy: str) -> None:
    losses, values = penalised(None, kind, {})
    workers = 4 if "mesh" in strategy else 2
    for ours, found in run_team(penalised, workers, kind, {}, launch=launched(strategy)):
        assert "mesh" in strategy or ours == pytest.approx(losses, rel=1e-9)
        for name, value in values.items():
            assert torch.allclose(found[name], value, rtol=1e-8, atol=1e-10), name


@pytest.mark.parametrize("strategy", ["all-reduce", "mesh:data=2"])
def test_a_gradient_penalty_through_synchronised_batch_norm_is_refused(strategy: str) -> None:
    with pytest.raises(AssertionError, match=r"UsageError: sync_batch_norm has no gradients of gradients"):
        run_team(penalised, 2, "batch norm", {"sync_batch_norm": True}, launch=launched(strategy))
