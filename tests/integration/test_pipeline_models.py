"""A pipeline of models and losses that are not like most: each trains as in one process, or a sentence says why not."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.split_models import apart, launched
from helpers.teams import run_team
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from paceline import Team, UsageError

Tensor = torch.Tensor
BATCH, WIDTH, CLASSES, LENGTH = 8, 12, 8, 3
"""As many classes as samples: what has one number for each must not be taken for what has one for each sample."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def body(self, x: Tensor) -> Tensor:
        return torch.tanh(self.middle(torch.tanh(self.first(x))))

    def forward(self, x: Tensor) -> Any:
        return self.last(self.body(x))


class Annealed(Net):
    """Reads a number that the script changes, one that it changes itself, and a tensor that is no buffer."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.heat, self.bend = 1.0, torch.ones(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.heat * min(1.0, self.calls / 3) * self.bend


class Centred(Net):
    """Compares the samples of a batch with each other."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(nn.functional.dropout(x, 0.0))
        return self.last(hidden - hidden.mean(0))


class Blurred(Net):
    """The same, with noise that drowns nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x + 0 * torch.randn_like(x) - x.mean(0)))


class Viewed(Net):
    """Changes what it has computed through a view, between its first and its last layer."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        part = hidden.view(-1, 4, 4)[:, 1]
        more = torch.tanh(self.middle(hidden.detach() * 2))
        part.mul_(0.5)
        return self.last(torch.tanh(hidden) + more)


class Echo(Net):
    """Returns what it was given, and nothing, beside what it computes."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        return super().forward(x), x, None


class Several(Net):
    def forward(self, *parts: Tensor) -> Tensor:
        return super().forward(torch.cat(parts, 1))


class Named(Net):
    def forward(self, **parts: Tensor) -> Tensor:
        return super().forward(torch.cat([parts["left"], parts["right"]], 1))


class Repeated(Net):
    """Uses layers again, beside a norm whose gradient torch cannot make in two steps in every layout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.paint = nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(self.middle(torch.tanh(self.first(x))))
        image = self.norm(self.paint(hidden.view(-1, 4, 2, 2).contiguous(memory_format=torch.channels_last)))
        return self.last(self.middle(image.flatten(1)))


class Again(Net):
    """Computes a part again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.middle, torch.tanh(self.first(x)), use_reentrant=True))


class Taken(nn.Module):
    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return both[0]


def recurrent() -> nn.Module:
    """An nn.Sequential with a layer that gives more than one tensor."""
    cell = nn.GRU(3, 4, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (4, 3)), cell, Taken(), nn.Flatten(), nn.Linear(16, CLASSES))


def following() -> nn.Module:
    """Each sample has to do with those before it."""
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GRU(16, 16), Taken(), nn.Tanh(), nn.Linear(16, CLASSES))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "annealed": (Annealed, "1f1b"),
    "centred": (Centred, "1f1b"),
    "blurred": (Blurred, "1f1b"),
    "viewed": (Viewed, "gpipe"),
    "echo": (Echo, "1f1b"),
    "several": (Several, "1f1b"),
    "named": (Named, "1f1b"),
    "repeated": (Repeated, "zero-bubble"),
    "again": (Again, "1f1b"),
    "recurrent": (recurrent, "zero-bubble"),
    "following": (following, "1f1b"),
}


def called(model: Any, x: Tensor) -> Any:
    if isinstance(model, Several):
        return model(x[:, :5], x[:, 5:])
    return model(left=x[:, :5], right=x[:, 5:]) if isinstance(model, Named) else model(x)


def trained(team: Team | None, kind: str) -> list[float]:
    torch.manual_seed(0)
    model: Any = MODELS[kind][0]()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(BATCH, WIDTH), torch.arange(BATCH) % CLASSES
    if team is not None:
        model, optimizer = team.setup(model, optimizer)
    losses = []
    for step in range(5):
        rows = slice(0, BATCH if step != 3 else 1)
        made = called(model, x[rows])
        if isinstance(model, Echo):
            made, given, nothing = made
            assert nothing is None
            losses.append(float(given.sum()))
            made = made + given[:, :CLASSES]
        loss = functional.cross_entropy(made, y[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if isinstance(model, Annealed):
            model.heat *= 0.7
            model.bend = model.bend * 0.9
            losses.append(model.calls)
    return [*losses, *(float(value.abs().sum()) for value in model.state_dict().values())]


@pytest.mark.parametrize("kind", MODELS)
def test_an_unusual_model_trains_as_in_one_process(kind: str) -> None:
    launch = launched(f"pipeline:stages=2,microbatches=4,schedule={MODELS[kind][1]}")
    plain = trained(None, kind)
    for found in run_team(trained, 2, kind, launch=launch):
        assert apart(found, plain) < 1e-5


class Sequences(nn.Module):
    """A row of classes for every step of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


weights = torch.linspace(0.5, 1.5, CLASSES)
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of each class": lambda made, y: ((made[:, 0] - 1).square() * weights).mean(),
    "of positive classes": lambda made, y: functional.binary_cross_entropy_with_logits(
        made[:, 0], functional.one_hot(y[:, 0], CLASSES).float(), pos_weight=weights
    ),
    "of each sample": lambda made, y: ((made - 1).square() * weights.view(-1, 1, 1)).mean(),
    "gaussian": lambda made, y: functional.gaussian_nll_loss(made[..., 0], y.float(), made[..., 1].exp()),
    "drawn": lambda made, y: functional.dropout(made, 0.0).square().mean(),
    "infinite": lambda made, y: functional.cross_entropy(made.flatten(0, 1), y.flatten()) * float("inf"),
}


def scored(team: Team | None, kind: str) -> list[float]:
    torch.manual_seed(0)
    model: Any = Sequences()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(BATCH, LENGTH, WIDTH), torch.randint(0, CLASSES, (BATCH, LENGTH))
    if team is not None:
        model, optimizer = team.setup(model, optimizer)
    losses = []
    for _ in range(3):
        loss = LOSSES[kind](model(x), y)
        loss.backward()
        norm = team.clip_grad_norm_(1.0) if team is not None else nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), float(norm)]
    return [value if value == value else -1.0 for value in losses]  # noqa: PLR0124  (not a number)


@pytest.mark.parametrize("kind", LOSSES)
def test_an_unusual_loss_is_that_of_the_batch(kind: str) -> None:
    plain = scored(None, kind)
    for found in run_team(scored, 2, kind, launch=launched("pipeline:stages=2,microbatches=4")):
        finite = [(one, other) for one, other in zip(found, plain, strict=True) if abs(other) < float("inf")]
        assert apart([one for one, _ in finite], [other for _, other in finite]) < 1e-5
        assert [abs(value) == float("inf") for value in found] == [abs(value) == float("inf") for value in plain]


class Drawing(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


class Changing(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(-1, WIDTH).sub_(0.5))


@dataclasses.dataclass
class Answer:
    made: Tensor


class Answering(Net):
    def forward(self, x: Tensor) -> Answer:
        return Answer(super().forward(x))


class Weighted(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.last.bias


class Unfed(Net):
    def forward(self, x: int) -> Tensor:  # type: ignore[override]
        return super().forward(torch.ones(x, WIDTH))


def refused(team: Team, kind: str) -> str:
    torch.manual_seed(0)
    models: dict[str, Callable[[], nn.Module]] = {
        "drawing": Drawing,
        "changing": Changing,
        "weighted": Weighted,
        "unfed": Unfed,
        "answering": Answering,
        "changing first": lambda: nn.Sequential(nn.ReLU(True), *[nn.Linear(WIDTH, WIDTH) for _ in range(4)]),
    }
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "steps first": lambda made, y: functional.cross_entropy(
            made.transpose(0, 1).reshape(-1, CLASSES), y.t().reshape(-1)
        ),
        "rows last": lambda made, y: functional.cross_entropy(made[:, : BATCH // 2].permute(1, 2, 0), y[:, :4].t()) * 2,
        "neighbours": lambda made, y: (made - made.flip(0)).square().mean(),
        "hardest": lambda made, y: (
            functional.mse_loss(made[:, :, 0], y.float(), reduction="none").topk(2, 0).values.mean()
        ),
        "kept": lambda made, y: made.mean() + kept[-1].mean(),
    }
    kept: list[Tensor] = []
    model: Any = models[kind]() if kind in models else Sequences()
    length = LENGTH if kind != "rows last" else BATCH
    x, y = torch.randn(BATCH, length, WIDTH), torch.randint(0, CLASSES, (BATCH, length))
    before = x.clone()
    if kind == "kept":
        model.first.register_forward_hook(lambda _layer, _inputs, output: kept.append(output))
    try:
        model, _ = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if kind == "steps first, unseen":  # with targets that are all the same it comes to the same
            losses["steps first"](model(x), torch.zeros_like(y)).backward()
        made = model(BATCH if kind == "unfed" else x[:, 0] if kind in models else x)
        losses[kind.removesuffix(", unseen")](made, y).backward()
    except UsageError as error:
        return str(error) if torch.equal(x, before) else "the batch was changed"
    return ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("drawing", "draws from Python's or NumPy's random numbers .* draw with torch"),
        ("changing", "the model changes its input in place \\(in 'sub_'\\), .* x = x.clone\\(\\)"),
        ("changing first", "the model changes its input in place \\(in '0'\\), .* x = x.clone\\(\\)"),
        ("weighted", "the model returns one of its parameters or buffers itself"),
        ("unfed", "^the model is called without a tensor that has a row for every sample"),
        ("steps first", "do not add up to the loss of the batch: .* first dimension, or write microbatches=1"),
        ("steps first, unseen", "do not add up to the loss of the batch: .* first dimension, or write microbatches=1"),
        ("rows last", "microbatches=1"),
        ("answering", "an object of a class that torch.export does not know; .* torch.export.register_dataclass"),
        ("hardest", "microbatches=1"),
        ("kept", "the loss uses a tensor that was stored while the model was traced, .* let the model return it"),
        ("neighbours", "do not add up to the loss of the batch: .* first dimension, or write microbatches=1"),
    ],
)
def test_what_would_come_out_otherwise_is_refused(kind: str, words: str) -> None:
    for message in run_team(refused, 2, kind, launch=launched("pipeline:stages=2,microbatches=4")):
        assert re.search(words, message), message
        assert "\n" not in message
