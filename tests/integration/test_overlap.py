"""All-reduce over machines sends gradients while the backward pass runs, and nobody can tell from the numbers.

Every case trains twice in one team: with announcements in the backward pass, and without. The bits must be the same.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # any optimizer imports it, which takes seconds: once here, not once in every fork
from helpers.hosts import hosts
from helpers.machines import Spread
from helpers.teams import run_spread
from helpers.training import same_bits, values
from torch import nn
from torch.nn.functional import cross_entropy

from paceline import Team
from paceline.config import Launch
from paceline.events import Compute, Send

STEPS = 7
PAUSE = 0.06
"""Seconds before the gradient of a layer."""


class Net(nn.Module):
    """Small and large layers, of which one has no gradient, and one has none in most steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 300)
        self.large = nn.Linear(300, 300)
        self.unused = nn.Linear(5, 5)
        self.sometimes = nn.Linear(300, 300)
        self.last = nn.Linear(300, 4)

    def forward(self, x: torch.Tensor, turn: int = 0) -> torch.Tensor:
        x = torch.tanh(self.large(torch.tanh(self.first(x))))
        if turn % 5 == 3:
            x = x + self.sometimes(x)
        return self.last(x)  # type: ignore[no-any-return]


def batch(rank: int, step: int, samples: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(samples, 8, generator=generator), torch.randint(0, 4, (samples,), generator=generator)


def loss_of(model: Any, team: Team, step: int, **more: Any) -> torch.Tensor:
    x, y = batch(team.rank, step)
    return cross_entropy(model(x, step), y, **more)


def plainly(team: Team, model: Any, optimizer: Any) -> None:
    for step in range(STEPS):
        loss_of(model, team, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def one_summed(team: Team, model: Any, optimizer: Any) -> None:
    """Numbers of backward passes that change."""
    for step in range(STEPS):
        for part in range([1, 3, 3, 1, 2, 2, 4][step]):
            loss_of(model, team, 10 * step + 5 * part).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)


def by_hand(team: Team, model: Any, optimizer: Any) -> None:
    """Gradients that the script changes, replaces, leaves out or looks at after they were announced."""
    kept = []
    for step in range(STEPS):
        loss_of(model, team, step).backward()
        if step == 2:
            model.last.weight.grad = torch.ones_like(model.last.weight)
        elif step == 3:
            model.large.weight.grad.clamp_(-0.01, 0.01)
        elif step == 4:
            optimizer.zero_grad(set_to_none=False)
            loss_of(model, team, 50).backward()
        elif step == 5:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        elif step == 6:
            kept[0].mul_(2.0)  # a tensor that the script has from a step before
        kept = [model.first.weight.grad] if step == 5 else kept
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 5)


def left_out(team: Team, model: Any, optimizer: Any) -> None:
    """Backward passes whose gradient is thrown away, and losses that are not a number on one worker."""
    for step in range(STEPS):
        loss_of(model, team, step).backward()
        if step in (2, 4):
            optimizer.zero_grad()
            continue
        if step == 3:
            optimizer.zero_grad()
            (loss_of(model, team, step) * (float("inf") if team.rank == 1 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def unlike(team: Team, model: Any, optimizer: Any) -> None:
    """Means over another number of items on each worker, and in each step."""
    for step in range(STEPS):
        x, y = batch(team.rank, step)
        y[: (team.rank + step) % 3] = -100
        cross_entropy(model(x, step), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def scaled(team: Team, model: Any, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(STEPS):
        loss = loss_of(model, team, step)
        if step == 4 and team.rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if step in (2, 5):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def clipped(team: Team, model: Any, optimizer: Any) -> None:
    for step in range(STEPS):
        for part in range(2):
            loss_of(model, team, 2 * step + part).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()


def hooked(team: Team, model: Any, optimizer: Any) -> None:
    """A hook that changes gradients after they were announced."""

    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    for step in range(STEPS):
        if step == 3:
            hooks = [parameter.register_post_accumulate_grad_hook(halve) for parameter in model.parameters()]
        loss_of(model, team, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for hook in hooks:
        hook.remove()


CASES = {case.__name__: case for case in (plainly, one_summed, by_hand, left_out, unlike, scaled, clipped, hooked)}


def train_all(team: Team, options: dict[str, Any], early: bool) -> dict[str, Any]:
    """After each case, the values; and how each of its rounds went."""
    torch.manual_seed(5)
    model: Any = Net()
    model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), on_nan="skip", **options)
    announcer = team._trainer._announcer  # type: ignore[union-attr]
    assert announcer is not None
    announcer.early = early
    went: list[str] = []
    over = announcer.next

    def watched(**how: Any) -> None:
        went.append(("early" if announcer._ahead else "late") + (" wrong" if how["wrong"] else ""))
        over(**how)

    announcer.next = watched  # type: ignore[method-assign]
    found = {}
    for name, case in CASES.items():
        announcer._rest = 0
        went.clear()
        case(team, model, optimizer)
        found[name] = values(model), list(went)
    return found


@pytest.mark.parametrize(
    ("options", "elastic"),
    [({}, False), ({"gradients": "visible"}, False), ({}, True)],
    ids=["local", "visible", "elastic"],
)
def test_the_bits_do_not_depend_on_what_was_sent_early(options: dict[str, Any], elastic: bool) -> None:
    launch = Launch(strategy="all-reduce", elastic=elastic)
    early, late = (run_spread(train_all, "aab", options, early, launch=launch) for early in (True, False))
    for name in CASES:
        for ahead, behind in zip(early, late, strict=True):
            (first, went), (second, plain) = ahead[name], behind[name]
            assert same_bits(first, second), (name, went)
            assert same_bits(first, early[0][name][0]), name
            assert any(one.startswith("early") for one in went), (name, went)
            assert not any(one.startswith("early") for one in plain)


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE)
        return gradient


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        asleep: torch.Tensor = Sleep.apply(super().forward(x))
        return asleep.tanh()


def train_slowly(team: Team) -> None:
    model: Any = nn.Sequential(*[Layer(400, 400) for _ in range(4)])
    model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        model(torch.randn(4, 400)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    team.barrier()  # rank 0's machine takes the others' events until then


def test_gradients_leave_before_the_backward_pass_is_over(tmp_path: Path) -> None:
    with hosts(2) as made, Spread(train_slowly, made, 1, strategy="all-reduce", folder=tmp_path / "run") as team:
        team.values()
        events = team.events()
    for rank in range(2):
        computed = [event for event in events if isinstance(event, Compute) and event.rank == rank]
        sent = [event for event in events if isinstance(event, Send) and event.rank == rank]
        assert len(computed) == len(sent) == 4
        made_at = [event.start + event.seconds for event in computed]
        # In the first step nobody knows yet how often gradients are made before a step.
        assert sent[0].start > made_at[0]
        # The first layer's pause comes last, and those of two others before it.
        assert all(one.start < end - PAUSE for one, end in zip(sent[1:], made_at[1:], strict=True))
        assert all(one.start + one.seconds > end for one, end in zip(sent, made_at, strict=True))
        assert {event.bytes for event in sent} == {4 * (400 * 400 + 400) * 4}
