"""Several models and optimizers in one team: a GAN's two, an encoder with its own optimizer, an actor and a critic."""

from __future__ import annotations

import contextlib
import difflib
import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.forks import played
from helpers.hosts import hosts
from helpers.machines import Spread
from helpers.teams import run_team
from helpers.training import apart, under, values
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from paceline import Team
from paceline.config import Launch, Timeouts

EXAMPLES = Path(__file__).parents[2] / "examples"
Values = list[torch.Tensor]
SERVERS = {"sync": "lead", "async": "1"}
EXACT = ["all-reduce", "sync", "mesh:data=2"]


def players() -> tuple[Any, Any]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6)).double()
    critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return generator, critic


def samples(count: int = 29) -> TensorDataset:
    """29: the last batch of 8 is smaller, and not the same for all workers."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(count, width, dtype=torch.float64, generator=generator) for width in (6, 3)))


def adams(generator: nn.Module, critic: nn.Module) -> list[Any]:
    return [torch.optim.Adam(one.parameters(), lr=1e-2, betas=(0.5, 0.999)) for one in (generator, critic)]


def unlike(generator: nn.Module, critic: nn.Module) -> list[Any]:
    return [
        torch.optim.AdamW(generator.parameters(), lr=1e-2),
        torch.optim.SGD(critic.parameters(), lr=1e-2, momentum=0.9),
    ]


class Lion(torch.optim.Optimizer):
    """An optimizer that the team does not know, so that it runs on whole parameters."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(torch.tanh(parameter.grad / parameter.grad.norm()), alpha=group["lr"])


def one_unknown(generator: nn.Module, critic: nn.Module) -> list[Any]:
    return [Lion(generator.parameters()), torch.optim.Adam(critic.parameters(), lr=1e-2)]


def entropy(scores: torch.Tensor, target: float, reduction: str = "mean") -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, target), reduction=reduction)


class Loop:
    """A script: what it does with one batch, and how it differs from the plain GAN's loop."""

    def __init__(self, team: Team | None, make: Callable[..., list[Any]] = adams, count: int = 29) -> None:
        self.generator, self.critic = players()
        self.of_g, self.of_d = make(self.generator, self.critic)
        self.loader: Any = DataLoader(samples(count), batch_size=8, shuffle=True)
        if team is not None:
            models, optimizers, self.loader = team.setup(
                [self.generator, self.critic], [self.of_g, self.of_d], self.loader
            )
            assert models == (self.generator, self.critic)
            assert optimizers == (self.of_g, self.of_d)

    def values(self) -> Values:
        return [*values(self.generator), *values(self.critic)]


def alternating(team: Team | None, make: Callable[..., list[Any]] = adams, reduction: str = "mean") -> Values:
    """As in pytorch/examples/dcgan: the generator's loss leaves gradients in the critic, which are cleared later."""
    loop = Loop(team, make)
    for _ in range(2):
        for real, z in loop.loader:
            loop.critic.zero_grad()
            entropy(loop.critic(real), 1.0, reduction).backward()
            fake = loop.generator(z)
            entropy(loop.critic(fake.detach()), 0.0, reduction).backward()
            loop.of_d.step()
            loop.generator.zero_grad()
            entropy(loop.critic(fake), 1.0, reduction).backward()
            loop.of_g.step()
    return loop.values()


def together(team: Team | None) -> Values:
    """One loss, one backward pass, two steps."""
    loop = Loop(team, unlike)
    for _ in range(2):
        for real, z in loop.loader:
            loss = (loop.generator(z) - real).pow(2).mean() + loop.critic(real).pow(2).mean()
            loss.backward()
            for optimizer in (loop.of_g, loop.of_d):
                optimizer.step()
                optimizer.zero_grad()
    return loop.values()


def clipped(team: Team | None) -> Values:
    """The gradient of each model is clipped by itself; the critic steps more often; rates fall."""
    loop = Loop(team)
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in (loop.of_g, loop.of_d)]
    for number, (real, z) in enumerate(loop.loader):
        loop.of_d.zero_grad()
        (loop.critic(loop.generator(z).detach()).mean() - loop.critic(real).mean()).backward()
        nn.utils.clip_grad_norm_(loop.critic.parameters(), 0.1)
        loop.of_d.step()
        if number % 2:
            loop.of_g.zero_grad()
            (-loop.critic(loop.generator(z)).mean()).backward()
            nn.utils.clip_grad_norm_(loop.generator.parameters(), 0.05)
            loop.of_g.step()
            for schedule in schedules:
                schedule.step()
    return loop.values()


def looked_at(team: Team | None) -> Values:
    """The script changes gradients by hand, of one model's optimizer and not of the other's."""
    loop = Loop(team, unlike)
    for real, z in loop.loader:
        for optimizer in (loop.of_g, loop.of_d):
            optimizer.zero_grad()
        ((loop.generator(z) - real).pow(2).mean() + loop.critic(real).pow(2).mean()).backward()
        for parameter in loop.critic.parameters():
            parameter.grad.sign_()
        loop.of_d.step()
        loop.of_g.step()
    return loop.values()


def one_model(team: Team | None) -> Values:
    """One model, an optimizer for its encoder and one for its head."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizers: Any = unlike(model[0], model[2])
    loader: Any = DataLoader(samples(), batch_size=8)
    if team is not None:
        model, optimizers, loader = team.setup(model, optimizers, loader)
    for x, y in loader:
        F.mse_loss(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


def one_optimizer(team: Team | None) -> Values:
    """Two models, one optimizer for both, as in CycleGAN."""
    models: Any = players()
    optimizer: Any = torch.optim.Adam(itertools.chain(*(model.parameters() for model in models)), lr=1e-2)
    loader: Any = DataLoader(samples(), batch_size=8)
    if team is not None:
        models, optimizer, loader = team.setup(models, optimizer, loader)
    generator, critic = models
    for real, z in loader:
        ((generator(z) - real).pow(2).mean() + critic(real).pow(2).mean()).backward()
        nn.utils.clip_grad_norm_([*generator.parameters(), *critic.parameters()], 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [*values(generator), *values(critic)]


SCRIPTS: dict[str, Callable[[Team | None], Values]] = {
    "alternating": alternating,
    "unlike optimizers": lambda team: alternating(team, unlike),
    "sums": lambda team: alternating(team, unlike, "sum"),
    "an unknown optimizer": lambda team: alternating(team, one_unknown),
    "together": together,
    "clipped": clipped,
    "looked at": looked_at,
    "one model": one_model,
    "one optimizer": one_optimizer,
}


@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize("name", SCRIPTS)
def test_they_train_as_in_one_process(name: str, strategy: str) -> None:
    expected = SCRIPTS[name](None)
    for workers in (2, 3) if strategy == "all-reduce" else (2,):
        launch = under(strategy, SERVERS.get(strategy))
        for result in run_team(SCRIPTS[name], workers, launch=launch):
            assert apart(result, expected) < 1e-9


def quiet(team: Team) -> str:
    """A gradient penalty: what is said of losses must be about this one, not about the other model's last one."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        loop = Loop(team, count=28)
        for real, z in itertools.chain(loop.loader, loop.loader):
            loop.of_d.zero_grad()
            mixed = ((real + loop.generator(z).detach()) / 2).requires_grad_()
            (slope,) = torch.autograd.grad(loop.critic(mixed).sum(), mixed, create_graph=True)
            loss = loop.critic(mixed).mean() - loop.critic(real).mean() + 10 * (slope.norm(dim=1) - 1).pow(2).mean()
            loss.backward()
            loop.of_d.step()
            loop.of_g.zero_grad()
            (-loop.critic(loop.generator(z)).mean()).backward()
            loop.of_g.step()
    return errors.getvalue()


@pytest.mark.parametrize("strategy", ["all-reduce", "sync"])
def test_a_gradient_that_was_used_is_not_added_to_the_other_model_s(strategy: str) -> None:
    assert run_team(quiet, 2, launch=under(strategy, SERVERS.get(strategy))) == ["", ""]


def test_they_train_as_in_one_process_in_an_elastic_team() -> None:
    launch = Launch(elastic=True, timeouts=Timeouts(barrier=60.0, join=60.0))
    for result in run_team(alternating, 2, launch=launch):
        assert apart(result, alternating(None)) < 1e-9


@pytest.mark.parametrize(("strategy", "servers"), [("all-reduce", None), ("sync", "1"), ("sync", "each")])
def test_they_train_as_in_one_process_over_hosts(strategy: str, servers: str | None) -> None:
    """Flags of used parameters, gradients and versions cross between machines."""
    with hosts(2) as made, Spread(alternating, made, 1, unlike, strategy=strategy, servers=servers) as team:
        for result in team.values():
            assert apart(result, alternating(None, unlike)) < 1e-9


def steady(team: Team) -> tuple[float, float]:
    """Both models have a gradient of 1 everywhere, whatever the batch: a step moves a weight by its rate."""
    models: Any = [nn.Linear(1, 1, bias=False).double() for _ in range(2)]
    for model in models:
        nn.init.zeros_(model.weight)
    optimizers: Any = [
        torch.optim.SGD(model.parameters(), lr=rate) for model, rate in zip(models, (1.0, 2.0), strict=True)
    ]
    loader: Any = DataLoader(TensorDataset(torch.ones(64, 1, dtype=torch.float64)), batch_size=4)
    models, optimizers, loader = team.setup(models, optimizers, loader)
    for (x,) in loader:
        with team.step():
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
    team.barrier()
    first, second = (model.state_dict()["weight"].item() for model in models)
    return first, second


@pytest.mark.parametrize(
    "strategy", ["async", "k-sync:k=2", "k-async:k=2", "k-batch-async:k=3", "k-batch-sync:k=2", "ssp:s=1"]
)
def test_an_update_is_the_mean_of_each_optimizer_s_own_gradients(strategy: str) -> None:
    for first, second in run_team(steady, 3, launch=under(strategy, None)):
        assert first < 0, "the first model was trained"
        assert second < 0, "the second model was trained"
        assert first == round(first), "its mean is of its own gradients, not of those of both"
        assert second == 2 * round(second / 2), "its mean is of its own gradients, not of those of both"


def saved_and_loaded(team: Team, path: str) -> tuple[Values, Values, list[Any]]:
    loop = Loop(team, unlike)
    for number, (real, z) in enumerate(loop.loader):
        if number == 2:
            break
        (loop.critic(loop.generator(z)).mean() + (loop.generator(z) - real).pow(2).mean()).backward()
        loop.of_g.step()
        loop.of_d.step()
    team.save(path, note=7)
    before = loop.values()
    momenta = [optimizer.state_dict()["state"] for optimizer in (loop.of_g, loop.of_d)]
    (loop.critic(real).mean() + loop.generator(z).mean()).backward()
    loop.of_g.step()
    loop.of_d.step()
    team.barrier()
    assert team.load(path) == {"note": 7}
    team.barrier()
    again = [optimizer.state_dict()["state"] for optimizer in (loop.of_g, loop.of_d)]
    return before, loop.values(), [momenta, again]


@pytest.mark.parametrize("strategy", ["all-reduce", "sync", "async"])
def test_a_checkpoint_has_all_models_and_optimizers(strategy: str, tmp_path: Path) -> None:
    path = tmp_path / "both.pt"
    results = run_team(
        saved_and_loaded,
        2,
        str(path),
        launch=under(strategy, SERVERS.get(strategy)),
    )
    content = torch.load(path)
    assert [len(content[key]) for key in ("model", "optimizer")] == [2, 2]
    generator, critic = players()
    generator.load_state_dict(content["model"][0])
    critic.load_state_dict(content["model"][1])
    if strategy != "async":
        for before, after, (momenta, again) in results:
            assert apart(before, after) == 0
            for one, other in zip(momenta, again, strict=True):
                assert one.keys() == other.keys()
                assert all(torch.equal(one[key][name], other[key][name]) for key in one for name in one[key])
            assert apart(before, [*values(generator), *values(critic)]) == 0


def test_the_example_of_a_gan_changes_few_lines_and_trains(tmp_path: Path) -> None:
    plain, ported = ((EXAMPLES / f"gan_{name}.py").read_text().splitlines() for name in ("torch", "paceline"))
    changed = [line for line in difflib.ndiff(plain, ported) if line.startswith("+ ") and line.strip() != "+"]
    assert len(changed) <= 6, "import, join, setup, two for the lead, and the docstring"
    for strategy in ("all-reduce", "k-batch-async:k=2"):
        script = EXAMPLES / "gan_paceline.py"
        outcome = played([script, "--workers", "2", "--strategy", strategy], tmp_path)
        assert outcome.code == 0, outcome.out
        assert "epoch 2: critic" in outcome.out


def unlike_order(team: Team) -> None:
    loop = Loop(team)
    for real, z in loop.loader:
        ((loop.generator(z) - real).pow(2).mean() + loop.critic(real).pow(2).mean()).backward()
        for optimizer in (loop.of_g, loop.of_d) if team.rank else (loop.of_d, loop.of_g):
            optimizer.step()


def test_workers_that_step_other_optimizers_are_named() -> None:
    with pytest.raises(AssertionError, match="rank 1 stepped another optimizer than rank 0"):
        run_team(unlike_order, 2)


def wrong(team: Team, case: str) -> None:
    generator, critic = players()
    optimizers: Any = adams(generator, critic)
    if case == "no model":
        team.setup([generator, 3], optimizers)
    if case == "no optimizer":
        team.setup([generator, critic], [])
    if case == "twice":
        team.setup([generator, critic], [*optimizers, torch.optim.SGD(critic.parameters(), lr=0.1)])
    if case == "clip":
        team.setup([generator, critic], optimizers)
        team.clip_grad_norm_(1.0)
    team.setup([generator, critic], optimizers)


@pytest.mark.parametrize(
    ("case", "strategy", "sentence"),
    [
        ("no model", "all-reduce", "setup takes a torch.nn.Module first, or a list of them; it got a int"),
        ("no optimizer", "all-reduce", "it got an empty list"),
        ("twice", "all-reduce", "4 parameters are in two optimizers"),
        ("clip", "all-reduce", "the team has several optimizers; clip the gradient of each"),
        ("", "pipeline:stages=2,microbatches=2", "is for one model with one optimizer, and these are several"),
        ("", "tensor:degree=2", "use all-reduce or a parameter server"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(case: str, strategy: str, sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        run_team(wrong, 2, case, launch=under(strategy, None))
