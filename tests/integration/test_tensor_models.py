"""Models with habits of their own, split inside their layers, train as in one process or are refused in a sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.split_models import apart, launched
from helpers.teams import run_team
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from paceline import Team, Tensor, UsageError

WIDTH, CLASSES = 512, 7
"""So wide that it is worth to gather what an operation needs the whole of."""


class Net(nn.Module):
    """Two layers, and what is done between them."""

    def __init__(self, between: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.between(self, x)
        return self.head(torch.relu(self.down(hidden)))


def scaled_in_place(net: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = net.up(x).clone()
    hidden[:, :100].mul_(0.1)
    hidden.narrow(1, 300, 8).add_(0.5)
    return hidden


BETWEEN: dict[str, Callable[[Net, torch.Tensor], torch.Tensor]] = {
    "computed again": lambda net, x: checkpoint(net.up, x.clone().requires_grad_(), use_reentrant=True),
    "changed through a view": scaled_in_place,
    "weights used elsewhere": lambda net, x: net.up(x) + net.up.weight.sum(1),
    "turned round": lambda net, x: net.up(x).unflatten(1, (2, -1)).flip(0, 1).flatten(1),
}


class Attentive(nn.Module):
    """Learns also by what its heads look at."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, :16].view(-1, 4, 4)
        seen, weights = self.attend(x, x, x, average_attn_weights=False)
        return self.head(seen.flatten(1)) * (1 + weights[:, :, 0, 1].sum(1, keepdim=True))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.inner = nn.Linear(WIDTH, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        return self.down(functional.linear(self.inner(hidden), self.inner.weight.t()))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(32, WIDTH, generator=generator), torch.randint(0, CLASSES, (32,), generator=generator)
    )


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return {"attentive": Attentive, "tied": Tied}[kind]() if kind in ("attentive", "tied") else Net(BETWEEN[kind])


def losses(team: Team | None, kind: str, autocast: bool = False) -> list[float]:
    model: Any = made(kind)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader: Any = DataLoader(data(), batch_sampler=BatchSampler(SequentialSampler(range(32)), 8, drop_last=False))
    if team is not None:
        model, optimizer, loader = team.setup(model, optimizer, loader)
    found = []
    for x, y in [*loader] * 3:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            output = model(x)
        assert output.dtype == (torch.bfloat16 if autocast else torch.float32)
        loss = functional.cross_entropy(output.float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.inference_mode():
            found += [loss.item(), functional.cross_entropy(model(x), y).item()]
        model.train()
    return found


@pytest.mark.parametrize("kind", [*BETWEEN, "attentive", "tied"])
def test_losses_are_those_of_the_plain_model(kind: str) -> None:
    assert apart(run_team(losses, 2, kind, launch=launched("tensor:degree=2"))[0], losses(None, kind)) < 1e-5


def test_under_autocast_results_are_of_its_dtype() -> None:
    kind = "turned round"
    assert (
        apart(run_team(losses, 2, kind, True, launch=launched("tensor:degree=2"))[0], losses(None, kind, True)) < 1e-2
    )


class Padded(nn.Module):
    """Takes named tensors, some of which need not be there."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encode, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(8, CLASSES)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.head(self.encode(x, mask, padding)[:, 0])


class Named(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        return {"x": torch.randn(3, 8, generator=generator), "padding": torch.tensor([False, False, number % 2 == 0])}


def evaluated(team: Team | None) -> list[float]:
    torch.manual_seed(0)
    model: Any = Padded()
    if team is not None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, _, _ = team.setup(model, optimizer, DataLoader(Named(), batch_size=4))
    model.eval()
    samples = [Named()[number] for number in range(4)]
    with torch.no_grad():
        x, padding = (torch.stack([one[name] for one in samples]) for name in ("x", "padding"))
        return list(map(float, model(x, padding=padding).sum(1)))


def test_an_encoder_that_evaluates_padded_sequences_has_the_plain_models_results() -> None:
    assert apart(run_team(evaluated, 2, launch=launched("tensor:degree=2"))[0], evaluated(None)) < 1e-5


def refused(team: Team, what: str) -> str:
    model: Any = made("tied" if what == "column" else "turned round")
    loader: Any = DataLoader(data(), batch_size=8)
    try:
        model, _, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        if what == "column":
            model(next(iter(loader))[0])
        elif what == "copy":
            copy.deepcopy(model)
        elif what == "gradient":
            hidden = model.up(torch.randn(8, WIDTH))
            torch.autograd.grad(hidden.sum(), hidden)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("copy", "cannot be copied"),
        ("gradient", "torch.autograd.grad is called on a tensor that is sharded over workers"),
        (
            "channels",
            "plan says 'channels' of 'up', which is a Linear; it can be 'column' or 'row' or 'replicated'",
        ),
        ("vocabulary", "it can be 'column' or 'row' or 'replicated'"),
        ("heads", "it can be 'column' or 'row' or 'replicated'"),
        (
            "column",
            "plan says 'column' of 'inner', but the model also uses its weights other than by calling it",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(what: str, said: str) -> None:
    plans = {"column": {"inner": what}} | {wish: {"up": wish} for wish in ("channels", "vocabulary", "heads")}
    for message in run_team(refused, 2, what, launch=launched(str(Tensor(degree=2, plan=plans.get(what))))):
        assert said in message
        assert "\n" not in message
