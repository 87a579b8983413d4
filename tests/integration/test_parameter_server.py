"""A parameter server trains as one process would, wherever it holds the parameters and however gradients travel."""

from __future__ import annotations

import copy
import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from teams import run_team
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import Team
from paceline.config import Launch, Timeouts, parse_slowness
from paceline.events.summary import merge
from paceline.server.seats import Shelf

cross_entropy = nn.functional.cross_entropy
BATCH = 48
"""Divisible by 2, 3 and 4 workers. 205 samples are four such batches and one of 13, too few for 3 or 4 workers."""
ROUNDS = 5


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
        if self.turn % 3 == 0:
            x = x + self.sometimes(x)
        return self.last(x)


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


Make = Callable[[Any], torch.optim.Optimizer]
Values = list[torch.Tensor]


def under(strategy: str, servers: str | None = "lead", *, meeting: float = 20.0, **more: Any) -> Launch:
    where = None if strategy == "all-reduce" else servers  # which has no servers
    return Launch(strategy=strategy, servers=where, timeouts=Timeouts(meeting=meeting, join=20.0), **more)


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
    loader = DataLoader(data(dtype=dtype), batch_size=BATCH // team.world_size)
    model, optimizer, loader = team.setup(model, make(model.parameters()), loader, **(options or {}))
    loop(model, optimizer, loader, epochs)
    return values(model)


def apart(ours: Values, theirs: Values) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True) if b.numel())


def same_bits(ours: Values, theirs: Values) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """What torch loads at its first step is loaded once, here, and not by every worker that is forked."""
    for make in (sgd, adamw, adafactor):
        plain(make, torch.float32, 1)


# -- the same numbers as one plain process ---------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_thirty_steps_of_sync_equal_one_plain_process(workers: int, make: Make, dtype: torch.dtype) -> None:
    results = run_team(in_team, workers, make, dtype, 6, launch=under("sync"))
    expected = plain(make, dtype, 6)
    for result in results:
        assert apart(result, expected) < (1e-6 if dtype is torch.float32 else 1e-12)
        assert same_bits(result, results[0])


@pytest.mark.parametrize("servers", ["lead", "all"])
def test_an_optimizer_that_needs_whole_parameters_gets_them(servers: str) -> None:
    for result in run_team(in_team, 3, adafactor, torch.float64, 6, launch=under("sync", servers)):
        assert apart(result, plain(adafactor, torch.float64, 6)) < 1e-12


@pytest.mark.parametrize("servers", ["lead", "all"])
@pytest.mark.parametrize("options", [{}, {"adjust_lr_fn": "match_rms_adamw"}])
def test_muon_gets_whole_matrices_and_all_of_its_options(servers: str, options: dict[str, Any]) -> None:
    def work(team: Team | None) -> Values:
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(3)), nn.Linear(10, 4, bias=False))
        model = model.double()
        optimizer = torch.optim.Muon(model.parameters(), lr=0.02, **options)
        loader: Any = DataLoader(data(192), batch_size=BATCH // (team.world_size if team else 1))
        if team:
            model, optimizer, loader = team.setup(model, optimizer, loader)
        for x, y in itertools.chain(loader, loader):
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    for result in run_team(work, 2, launch=under("sync", servers)):
        assert apart(result, work(None)) < 1e-12


def test_the_order_of_the_samples_is_plain_torch_s_for_the_same_seed() -> None:
    def work(team: Team | None) -> Values:
        model: Any = build()
        optimizer = sgd(model.parameters())
        torch.manual_seed(7 + (team.rank if team else 0))
        loader: Any = DataLoader(data(), batch_size=BATCH // (team.world_size if team else 1), shuffle=True)
        if team:
            model, optimizer, loader = team.setup(model, optimizer, loader)
        loop(model, optimizer, loader, 2)
        return values(model)

    for result in run_team(work, 2, launch=under("sync")):
        assert apart(result, work(None)) < 1e-12


def groups_and_dtypes(team: Team | None) -> Values:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    factor = nn.Parameter(torch.ones(4, dtype=torch.float32))
    model.register_parameter("factor", factor)
    split = [{"params": model[0].parameters(), "lr": 0.2}, {"params": [*model[2].parameters(), factor]}]
    optimizer = torch.optim.SGD(split, lr=0.05, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.3, 0.1], total_steps=12)
    loader: Any = DataLoader(data(192), batch_size=BATCH // (team.world_size if team else 1))
    if team:
        model, optimizer, loader = team.setup(model, optimizer, loader)
    for _ in range(2):
        for x, y in loader:
            cross_entropy(model(x) * factor, y).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize("servers", ["lead", "all"])
def test_parameter_groups_several_dtypes_and_a_scheduler(servers: str) -> None:
    for result in run_team(groups_and_dtypes, 3, launch=under("sync", servers)):
        for ours, theirs in zip(result, groups_and_dtypes(None), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


def accumulating(team: Team) -> Values:
    model = build()
    loader = DataLoader(data(192), batch_size=16 // team.world_size)
    model, optimizer, loader = team.setup(model, sgd(model.parameters()), loader)
    for number, (x, y) in enumerate(loader):
        with team.step(accumulate=number % 4 != 3):
            (cross_entropy(model(x), y) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


def test_gradients_accumulate_over_minibatches() -> None:
    model = build()
    optimizer = sgd(model.parameters())
    for number, (x, y) in enumerate(DataLoader(data(192), batch_size=16)):
        (cross_entropy(model(x), y) / 4).backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    for result in run_team(accumulating, 2, launch=under("sync")):
        assert apart(result, values(model)) < 1e-12


def clipping(team: Team | None, norm: float) -> Values:
    model: Any = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    loader: Any = DataLoader(data(), batch_size=BATCH // (team.world_size if team else 1))
    if team:
        model, optimizer, loader = team.setup(model, optimizer, loader)
    for number, (x, y) in enumerate(loader):
        model.turn = number
        cross_entropy(model(x), y).backward()
        if team:
            team.clip_grad_norm_(0.1, norm)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize("servers", ["lead", "all"])
@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf")])
def test_clipping_is_of_the_whole_mean_gradient(norm: float, servers: str) -> None:
    for result in run_team(clipping, 3, norm, launch=under("sync", servers)):
        assert apart(result, clipping(None, norm)) < 1e-9


@pytest.mark.parametrize("norm", [2.0, float("inf")])
def test_a_norm_that_is_not_a_number_is_never_hidden(norm: float) -> None:
    def work(team: Team | None) -> Values:
        model: Any = nn.Linear(4, 2, bias=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if team:
            model, optimizer = team.setup(model, optimizer)
        model(torch.ones(1, 4)).sum().backward()
        model.weight.grad[0, 0] = float("nan")
        (team.clip_grad_norm_ if team else lambda *a: nn.utils.clip_grad_norm_(model.parameters(), *a))(0.1, norm)
        optimizer.step()
        return values(model)

    for result in run_team(work, 2, launch=under("sync")):
        assert [value.isnan().all() for value in result] == [value.isnan().all() for value in work(None)]


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


def test_what_only_one_worker_uses_is_updated_and_what_nobody_uses_stays() -> None:
    expected = divided(None)
    for result in run_team(divided, 3, launch=under("sync")):
        for ours, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def scaling(team: Team, rule: str) -> float:
    model: Any = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), scale_lr=rule, warmup=1)
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(model.weight)


@pytest.mark.parametrize(("rule", "first", "second"), [("linear", 2.5, 4.0), ("sqrt", 1.5, 2.0)])
def test_the_learning_rate_scales_with_the_gradients_of_an_update(rule: str, first: float, second: float) -> None:
    wanted = [1 - 0.1 * first - 0.1 * second] * 4
    assert run_team(scaling, 4, rule, launch=under("sync")) == pytest.approx(wanted)


class Scaled(torch.optim.Optimizer):
    """An optimizer of a script's own, whose rate has no default and whose mode is a word."""

    def __init__(self, params: Any, lr: float, mode: str = "mean") -> None:
        super().__init__(params, {"lr": lr, "mode": mode})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    size = getattr(parameter.grad.abs(), group["mode"])()
                    parameter.sub_(parameter.grad / size, alpha=group["lr"])


@pytest.mark.parametrize("mode", ["mean", "amax"])
def test_an_optimizer_of_one_s_own_runs_as_it_was_made(mode: str) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return Scaled(parameters, 0.01, mode)

    for result in run_team(in_team, 2, make, torch.float64, 2, launch=under("sync")):
        assert apart(result, plain(make, torch.float64, 2)) < 1e-12


# -- the same bits ---------------------------------------------------------------------------------------------------


def dropping_out(team: Team, batches: int) -> Values:
    """More than a chunk of parameters, of two dtypes, with random numbers of each worker's own."""
    torch.manual_seed(0)
    layers = [nn.Linear(10, 300), nn.Dropout(0.3), nn.ReLU(), nn.Linear(300, 500), nn.ReLU()]
    model: Any = nn.Sequential(*layers, nn.Linear(500, 4))
    scale = nn.Parameter(torch.ones(37, dtype=torch.float64))
    model.register_parameter("scale", scale)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(50 + team.rank)
    loader: Any = DataLoader(data(batches * 24, torch.float32), batch_size=24 // team.world_size, shuffle=True)
    model, optimizer, loader = team.setup(model, optimizer, loader)
    for x, y in itertools.chain(loader, loader):
        (cross_entropy(model(x), y) + (scale**2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def test_the_same_seed_gives_the_same_bits() -> None:
    first, second = (run_team(dropping_out, 3, 5, launch=under("sync")) for _ in range(2))
    assert same_bits(list(itertools.chain(*first)), list(itertools.chain(*second)))
    assert not same_bits(first[0], run_team(dropping_out, 2, 5, launch=under("sync"))[0])


@pytest.mark.parametrize("strategy", ["k-sync:k=3", "k-async:k=3"])
def test_a_policy_that_waits_for_everybody_gives_the_bits_of_sync(strategy: str) -> None:
    expected = run_team(dropping_out, 3, 5, launch=under("sync"))
    got = run_team(dropping_out, 3, 5, launch=under(strategy))
    assert same_bits(list(itertools.chain(*got)), list(itertools.chain(*expected)))


def test_one_group_of_all_workers_is_sync() -> None:
    expected = run_team(in_team, 3, sgd, torch.float64, 4, launch=under("sync"))[0]
    for result in run_team(in_team, 3, sgd, torch.float64, 4, launch=under("groups:size=3")):
        assert apart(result, expected) < 1e-12
    drop = run_team(dropping_out, 3, 5, launch=under("groups:size=3"))
    assert apart(drop[0], run_team(dropping_out, 3, 5, launch=under("sync"))[0]) < 1e-5


@pytest.mark.parametrize("servers", ["1", "3", "all"])
def test_wherever_the_parameters_are_held_the_bits_are_the_same(servers: str) -> None:
    expected = run_team(dropping_out, 2, 5, launch=under("sync", "lead"))
    got = run_team(dropping_out, 2, 5, launch=under("sync", servers))
    assert same_bits(list(itertools.chain(*got)), list(itertools.chain(*expected)))


def test_server_processes_hold_whole_parameters_where_they_must() -> None:
    for result in run_team(in_team, 2, adafactor, torch.float64, 2, launch=under("sync", "2")):
        assert apart(result, plain(adafactor, torch.float64, 2)) < 1e-12


def test_server_processes_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    run_team(in_team, 2, sgd, torch.float32, 1, launch=under("sync", "1"))
    assert list(tmp_path.iterdir()) == []


# -- gradients that are not finite -----------------------------------------------------------------------------------


def scaled(team: Team) -> tuple[list[float], Values, float]:
    torch.manual_seed(0)
    model: Any = nn.Linear(10, 4)
    loader: Any = DataLoader(data(192, torch.float32), batch_size=BATCH // team.world_size)
    model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    moved = []
    for number, (x, y) in enumerate(loader):
        before = model.weight.detach().clone()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(model(x).float(), y)
        if number == 2 and team.rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if number == 3:
            scaler.unscale_(optimizer)
            team.clip_grad_norm_(1e-3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved.append(float((model.weight - before).norm()))
    return moved, values(model), scaler.get_scale()


def test_an_infinite_gradient_of_one_worker_is_not_used_and_the_rest_is() -> None:
    results = run_team(scaled, 2, launch=under("sync"))
    for moved, parameters, _ in results:
        assert moved[0] > 0.001 and moved[1] > 0.001
        assert all(value.isfinite().all() for value in parameters)
    assert same_bits(results[0][1], results[1][1])
    assert results[1][0][2] == 0.0
    assert [scale for _, _, scale in results] == [256.0, 128.0]


def test_loss_scaling_changes_nothing_else() -> None:
    def work(team: Team, scale: float | None) -> Values:
        model: Any = build(torch.float32)
        loader: Any = DataLoader(data(192, torch.float32), batch_size=BATCH // team.world_size)
        model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for x, y in loader:
            scaler.scale(cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return values(model)

    without = run_team(work, 2, None, launch=under("sync"))[0]
    assert same_bits(run_team(work, 2, 1024.0, launch=under("sync"))[0], without)


# -- checkpoints, and the end ----------------------------------------------------------------------------------------


def saving(team: Team, path: str, epochs: int, make: Make = adamw) -> Values:
    model = build(seed=team.rank)
    loader = DataLoader(data(), batch_size=BATCH // team.world_size)
    model, optimizer, loader = team.setup(model, make(model.parameters()), loader)
    loop(model, optimizer, loader, epochs)
    team.save(path, epoch=epochs)
    team.barrier()
    return values(model)


def resuming(team: Team, path: str, epochs: int, again: str | None = None, make: Make = adamw) -> Values:
    model = build(seed=5 + team.rank)
    loader = DataLoader(data(), batch_size=BATCH // team.world_size)
    model, optimizer, loader = team.setup(model, make(model.parameters()), loader)
    loop(model, optimizer, loader, 1)  # to have something to forget
    start = team.load(path)["epoch"]
    loop(model, optimizer, loader, epochs, start)
    if again is not None:
        team.save(again)
        team.barrier()
    return values(model)


@pytest.mark.parametrize("make", [adamw, adafactor])
@pytest.mark.parametrize("servers", ["lead", "all"])
def test_a_checkpoint_goes_on_anywhere(tmp_path: Path, servers: str, make: Make) -> None:
    path = str(tmp_path / "deep" / "checkpoint.pt")
    run_team(saving, 3, path, 2, make, launch=under("sync", servers))
    expected = plain(make, torch.float64, 4)
    content = torch.load(path)
    assert (content["version"], content["epoch"]) == (2 * ROUNDS, 2)
    model = build(seed=9)
    optimizer = make(model.parameters())
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    loop(model, optimizer, DataLoader(data(), batch_size=BATCH), 2, 2)
    assert apart(values(model), expected) < 1e-10
    for workers, strategy in ((2, "sync"), (4, "all-reduce")):
        for result in run_team(resuming, workers, path, 2, None, make, launch=under(strategy, servers)):
            assert apart(result, expected) < 1e-10


def test_a_checkpoint_of_all_reduce_goes_on_with_a_parameter_server(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint.pt")
    run_team(saving, 2, path, 2, launch=under("all-reduce"))
    for result in run_team(resuming, 2, path, 2, launch=under("sync", "all")):
        assert apart(result, plain(adamw, torch.float64, 4)) < 1e-10


@pytest.mark.parametrize("strategy", ["all-reduce", "sync"])
def test_versions_go_on_from_where_a_checkpoint_was(tmp_path: Path, strategy: str) -> None:
    path, again = str(tmp_path / "first.pt"), str(tmp_path / "second.pt")
    run_team(saving, 2, path, 2, launch=under(strategy))
    run_team(resuming, 2, path, 1, again, launch=under(strategy))
    assert torch.load(again)["version"] == 3 * ROUNDS


def one_weight(team: Team, path: str, load: bool) -> float:
    """Three updates without a loader, who would tell the worker its version anew."""
    model: Any = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if load:
        team.load(path)
    for _ in range(3):
        with team.step():
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        team.barrier()
    team.save(path)
    team.barrier()
    team.close()
    return float(model.weight)


@pytest.mark.parametrize(("strategy", "updates"), [("all-reduce", 3), ("sync", 3), ("k-async:k=2", 3), ("async", 6)])
def test_no_gradient_is_lost_after_a_checkpoint_is_loaded(tmp_path: Path, strategy: str, updates: int) -> None:
    path = str(tmp_path / "checkpoint.pt")
    for runs, load in ((1, False), (2, True)):
        for value in run_team(one_weight, 2, path, load, launch=under(strategy)):
            assert value == pytest.approx(1 - 0.1 * updates * runs)
        assert torch.load(path)["version"] == updates * runs


def test_the_optimizer_s_state_is_whole_on_every_worker() -> None:
    def work(team: Team) -> Any:
        model = build()
        loader = DataLoader(data(), batch_size=BATCH // team.world_size)
        model, optimizer, loader = team.setup(model, adamw(model.parameters()), loader)
        loop(model, optimizer, loader, 1)
        assert not optimizer.state
        state = copy.deepcopy(optimizer.state_dict())
        team.barrier()
        return state

    model = build()
    expected = adamw(model.parameters())
    loop(model, expected, DataLoader(data(), batch_size=BATCH), 1)
    reference = expected.state_dict()
    for state in run_team(work, 3, launch=under("sync", "all")):
        assert state["param_groups"] == reference["param_groups"]
        assert state["state"].keys() == reference["state"].keys()
        for index, known in reference["state"].items():
            for name, value in known.items():
                torch.testing.assert_close(state["state"][index][name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("servers", ["lead", "all"])
def test_closing_leaves_plain_torch_with_the_newest_values(servers: str) -> None:
    def work(team: Team) -> Values:
        model = build(seed=team.rank)
        loader = DataLoader(data(), batch_size=BATCH // team.world_size)
        model, optimizer, shared = team.setup(model, adamw(model.parameters()), loader)
        loop(model, optimizer, shared, 2)
        team.close()
        assert not any(parameter.is_shared() for parameter in model.parameters())
        assert type(optimizer).step is torch.optim.AdamW.step and "step" not in vars(optimizer)
        loop(model, optimizer, DataLoader(data(), batch_size=BATCH), 2, 2)
        return values(model)

    for result in run_team(work, 2, launch=under("sync", servers)):
        assert apart(result, plain(adamw, torch.float64, 4)) < 1e-10


def test_after_async_everybody_closes_with_the_same_values() -> None:
    def work(team: Team) -> Values:
        model = build(torch.float32, seed=team.rank)
        loader = DataLoader(data(dtype=torch.float32), batch_size=5)
        model, optimizer, loader = team.setup(model, adamw(model.parameters()), loader)
        loop(model, optimizer, loader, 2)
        team.barrier()
        team.close()
        return values(model)

    first, *others = run_team(work, 4, launch=under("async"))
    assert all(same_bits(first, other) for other in others)


# -- loops of other shapes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_an_evaluation_in_the_middle_of_an_epoch_loses_no_sample(strategy: str) -> None:
    def work(team: Team) -> tuple[list[int], list[int]]:
        model: Any = nn.Linear(1, 1)
        dataset = TensorDataset(torch.arange(40).float().unsqueeze(1))
        trained, tested = DataLoader(dataset, batch_size=2), DataLoader(dataset, batch_size=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        model, optimizer, trained, tested = team.setup(model, optimizer, trained, tested)
        seen: list[int] = []
        evaluated: list[int] = []
        for number, (x,) in enumerate(trained):
            seen += [int(value) for value in x]
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 3:
                with torch.no_grad():
                    for (z,) in tested:
                        model(z)
                        evaluated += [int(value) for value in z]
        return seen, evaluated

    results = run_team(work, 2, launch=under(strategy, meeting=4.0), timeout=20.0)
    assert sorted(itertools.chain(*(seen for seen, _ in results))) == list(range(40))
    assert sorted(itertools.chain(*(evaluated for _, evaluated in results))) == list(range(40))


def unhurried(team: Team, when: str) -> tuple[Values, int]:
    """Rank 1 takes its time at the end of an epoch, when the other is in the next one already."""
    model = build(seed=team.rank)
    loader = DataLoader(data(192), batch_size=BATCH // 2)
    held_out = DataLoader(data(4), batch_size=1)
    model, optimizer, loader, held_out = team.setup(model, sgd(model.parameters()), loader, held_out)
    late = 0.2 * (team.rank == 1)
    for _ in range(3):
        for number, (x, y) in enumerate(loader):
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 3 and when != "evaluates":
                time.sleep(late)
            if number == 3 and when == "leaves":
                break
            if number == 1 and when == "evaluates":
                with torch.no_grad():
                    for z, _ in held_out:
                        model(z)
                        time.sleep(late / 4)
    trainer: Any = team._trainer
    return values(model), trainer.version


@pytest.mark.parametrize("when", ["ends", "leaves", "evaluates"])
def test_a_worker_that_comes_late_to_the_end_of_an_epoch_is_waited_for_in_the_next(when: str) -> None:
    model = build()
    optimizer = sgd(model.parameters())
    for x, y in itertools.chain(*(DataLoader(data(192), batch_size=BATCH) for _ in range(3))):
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for result, version in run_team(unhurried, 2, when, launch=under("sync", meeting=4.0), timeout=20.0):
        assert version == 12
        assert apart(result, values(model)) < 1e-12


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_two_loaders_at_once_keep_their_samples_apart(strategy: str) -> None:
    def work(team: Team) -> tuple[list[int], list[int]]:
        model: Any = nn.Linear(1, 1)
        small = DataLoader(TensorDataset(torch.arange(24).float().unsqueeze(1)), batch_size=2)
        large = DataLoader(TensorDataset(torch.arange(100, 172).float().unsqueeze(1)), batch_size=6)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        model, optimizer, small, large = team.setup(model, optimizer, small, large)
        seen: tuple[list[int], list[int]] = ([], [])
        for (x,), (z,) in zip(small, large, strict=False):
            seen[0].extend(int(value) for value in x)
            seen[1].extend(int(value) for value in z)
            (model(x).mean() + model(z).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return seen

    results = run_team(work, 2, launch=under(strategy, meeting=4.0), timeout=20.0)
    assert sorted(itertools.chain(*(first for first, _ in results))) == list(range(24))
    other = sorted(itertools.chain(*(second for _, second in results)))
    assert set(other) <= set(range(100, 172)) and len(set(other)) == len(other)


@pytest.mark.parametrize("strategy", ["sync", "async", "k-batch-async:k=2", "k-async:k=2", "k-batch-sync:k=2"])
def test_an_epoch_may_be_left_in_its_middle(strategy: str) -> None:
    """Also by a worker whose gradient the server still holds."""

    def work(team: Team) -> list[int]:
        model: Any = nn.Linear(1, 1)
        loader: Any = DataLoader(TensorDataset(torch.arange(40).float().unsqueeze(1)), batch_size=2)
        model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=1e-9), loader)
        seen: list[int] = []
        for epoch in range(3):
            for number, (x,) in enumerate(loader):
                with team.step():
                    model(x).mean().backward()
                    optimizer.step()
                    if epoch == 2:
                        seen += [int(value) for value in x]
                optimizer.zero_grad()
                if epoch < 2 and number == team.rank:
                    break
        return seen

    results = run_team(work, 3, launch=under(strategy, meeting=4.0), timeout=20.0)
    seen = sorted(itertools.chain(*results))
    assert set(seen) == set(range(40))


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_a_script_may_make_several_updates_from_one_batch(strategy: str) -> None:
    def work(team: Team) -> list[int]:
        model: Any = nn.Linear(1, 1)
        loader: Any = DataLoader(TensorDataset(torch.arange(24).float().unsqueeze(1)), batch_size=2)
        model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=1e-9), loader)
        seen: list[int] = []
        for (x,) in loader:
            seen += [int(value) for value in x]
            for _ in range(3):
                model(x).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return seen

    results = run_team(work, 2, launch=under(strategy, meeting=4.0), timeout=20.0)
    assert sorted(itertools.chain(*results)) == list(range(24))


def test_a_worker_that_comes_when_the_others_have_left_the_epoch_finds_it_over() -> None:
    def work(team: Team) -> list[list[int]]:
        model: Any = nn.Linear(1, 1)
        loader: Any = DataLoader(TensorDataset(torch.arange(8).float().unsqueeze(1)), batch_size=1)
        model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=1e-9), loader)
        seen: list[list[int]] = [[], []]
        for epoch in range(2):
            if team.rank == 1 and epoch == 0:
                team.barrier()
            for (x,) in loader:
                if team.rank == 0 and epoch == 1 and not seen[1]:
                    team.barrier()
                seen[epoch].append(int(x))
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if epoch == 0:
                    break
        return seen

    first, second = run_team(work, 2, launch=under("async", meeting=4.0), timeout=20.0)
    assert (first[0], second[0]) == ([0], [])
    assert sorted([*first[1], *second[1]]) == list(range(8))


@pytest.mark.parametrize("strategy", ["ssp:s=0", "groups:size=1,between=ssp:s=0", "k-async:k=2", "k-batch-sync:k=3"])
def test_nobody_waits_for_those_who_find_no_more_samples(strategy: str) -> None:
    def work(team: Team) -> int:
        model: Any = nn.Linear(1, 1)
        loader: Any = DataLoader(TensorDataset(torch.arange(2).float().unsqueeze(1)), batch_size=1)
        model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=1e-9), loader)
        count = 0
        for _ in range(3):
            if team.rank == 2:
                time.sleep(0.2)  # so that the others have taken all samples when it comes
            for (x,) in loader:
                count += 1
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return count

    assert sum(run_team(work, 3, launch=under(strategy, meeting=4.0), timeout=20.0)) == 6


def test_a_gradient_that_is_held_counts_also_when_its_worker_leaves_the_epoch() -> None:
    def work(team: Team) -> tuple[list[int], float]:
        model: Any = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        loader: Any = DataLoader(TensorDataset(torch.arange(8).float().unsqueeze(1)), batch_size=1)
        model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)
        seen: list[int] = []
        for (x,) in loader:
            if team.rank == 1 and not seen:
                team.barrier()
            seen.append(int(x))
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if team.rank == 0:
                break
        if team.rank == 0:
            team.barrier()
        team.barrier()
        team.close()
        return seen, float(model.weight)

    (first, weight), (second, _) = run_team(work, 2, launch=under("k-batch-async:k=2", meeting=4.0), timeout=20.0)
    assert sorted([*first, *second]) == list(range(8))
    assert weight == pytest.approx(-sum(range(8)) / 2)


# -- what is refused -------------------------------------------------------------------------------------------------


def refused(team: Team, make: Make, options: dict[str, Any]) -> str:
    model = nn.Linear(3, 2)
    with pytest.raises(paceline.UsageError) as caught:
        team.setup(model, make(model.parameters()), **options)
    return str(caught.value)


class FromTheScript(torch.optim.SGD):
    """As if it were defined in the script that was started."""


FromTheScript.__module__ = "__main__"


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (torch.optim.LBFGS, {}, "LBFGS evaluates the loss several times per step"),
        (sgd, {"gradients": "visible"}, "gradients is 'visible'; with a parameter server"),
        (sgd, {"sync_batch_norm": True}, "sync_batch_norm needs all workers in every step"),
        (FromTheScript, {}, "the optimizer FromTheScript is defined in the script itself"),
        (sgd, {"servers": "some"}, "servers is 'some'; it must be a number of processes"),
        (sgd, {"servers": 0}, "servers is '0'; it must be a number of processes"),
        (sgd, {"compress": "gzip"}, "compress is 'gzip'; it must be 'none'"),
        (sgd, {"compress": "topk:2"}, "the share of the elements to keep must be above 0 and at most 1"),
        (sgd, {"corrections": ["lr/age"]}, "unknown correction 'lr/age'"),
        (sgd, {"scale_lr": "cubic"}, "scale_lr is 'cubic'"),
        (sgd, {"warmup": -1}, "warmup is -1"),
    ],
)
def test_what_a_parameter_server_can_not_do_is_refused_in_one_sentence(
    make: Make, options: dict[str, Any], said: str
) -> None:
    for message in run_team(refused, 2, make, options, launch=under("async", None)):
        assert said in message
        assert "\n" not in message


def test_an_optimizer_of_the_script_is_fine_where_no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("__main__.FromTheScript", FromTheScript, raising=False)

    def make(parameters: Any) -> torch.optim.Optimizer:
        return FromTheScript(parameters, lr=0.05)

    for result in run_team(in_team, 2, make, torch.float64, 1, launch=under("sync", "lead")):
        assert apart(result, plain(make, torch.float64, 1)) < 1e-12


def test_half_precision_parameters_can_not_be_compressed() -> None:
    def work(team: Team) -> str:
        model = nn.Linear(3, 2).bfloat16()
        with pytest.raises(paceline.UsageError) as caught:
            team.setup(model, torch.optim.SGD(model.parameters()), compress="int8")
        return str(caught.value)

    assert (
        run_team(work, 2, launch=under("async"))
        == ["compress is 'int8', which needs parameters of float32; some are torch.bfloat16"] * 2
    )


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("k-sync:k=3", "strategy 'k-sync:k=3': k is 3, with 2 workers; it must be a whole number from 1 to 2"),
        ("k-async:k=0", "strategy 'k-async:k=0': k is 0, with 2 workers; it must be a whole number from 1 to 2"),
        ("k-batch-sync:k=9", "k is 9, with 2 workers"),
        ("k-batch-async:k=9", "k is 9, with 2 workers"),
        ("adaptive:of=k-sync,start=5", "start is 5, with 2 workers"),
        ("ssp:s=-1", "s is -1; it must be a whole number of steps, 0 or more"),
        ("groups:size=3", "3"),
        ("groups:size=1,between=k-async:k=4", "k is 4"),
    ],
)
def test_a_policy_that_can_not_be_is_refused_at_the_door(
    strategy: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(paceline.UsageError) as caught:
        paceline.join(strategy)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# -- compressed gradients --------------------------------------------------------------------------------------------


def losses(team: Team, options: dict[str, Any], epochs: int = 6) -> tuple[float, float]:
    """Of all samples, before and after."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 4))
    dataset = data(480, torch.float32)
    loader: Any = DataLoader(dataset, batch_size=16, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    model, optimizer, loader = team.setup(model, optimizer, loader, **options)
    x, y = dataset.tensors
    before = float(cross_entropy(model(x), y))
    for epoch in range(epochs):
        for number, (x, y) in enumerate(loader):
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if epoch + 1 == epochs and number > 3:
                team.report(loss=loss)
    team.barrier()
    team.close()
    x, y = dataset.tensors
    return before, float(cross_entropy(model(x), y))


@pytest.mark.parametrize("form", ["bf16", "fp16", "int8", "topk:0.1", "topk:0.01"])
def test_compressed_gradients_train(form: str, tmp_path: Path) -> None:
    for before, after in run_team(losses, 2, {"compress": form}, launch=under("async", folder=str(tmp_path))):
        assert after < 0.5 * before
    summary = merge(tmp_path, 2)
    size = summary.pushed_bytes + summary.saved_bytes
    assert 0 < summary.pushed_bytes < {"bf16": 0.51, "fp16": 0.51, "int8": 0.35, "topk:0.1": 0.25}.get(form, 0.1) * size
    assert size == summary.updates * 4 * sum(-(-count // 16) * 16 for count in (640, 64, 256, 4))


@pytest.mark.parametrize(
    ("form", "limit"),
    [("none", 1e-6), ("fp32", 1e-6), ("bf16", 3e-3), ("fp16", 3e-4), ("int8", 1e-2), ("topk:1", 1e-6)],
)
def test_sync_with_compressed_gradients_stays_near_plain_torch(form: str, limit: float) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.5)

    launch = under("sync", "all")
    for result in run_team(in_team, 3, make, torch.float32, 4, {"compress": form}, launch=launch):
        distance = apart(result, plain(make, torch.float32, 4))
        assert distance < limit


def test_what_is_left_out_of_a_parameter_waits_for_its_next_gradient() -> None:
    """It is not taken for a new one in the steps in between, which do not use the parameter."""

    def work(team: Team) -> list[float]:
        large, seldom = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(16))
        model: Any = nn.ParameterList([large, seldom])
        model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=1.0), compress="topk:0.5")
        for number in range(8):
            loss = -large.sum() * (100 if number < 6 else 0)
            if number in (0, 6, 7):
                loss = loss - seldom.sum() * (number == 0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return seldom.tolist()

    for moved in run_team(work, 2, launch=under("sync")):
        assert moved == [1.0] * 16


def test_a_changed_loss_scale_does_not_change_what_compression_has_kept_back() -> None:
    def work(team: Team) -> float:
        model: Any = nn.Linear(64, 1, bias=False)
        nn.init.zeros_(model.weight)
        model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=1.0), compress="topk:0.02")
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        for number in range(64):
            if number == 32:
                scaler.update(1.0)
            scaler.scale(-model(torch.ones(1, 64)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return float(model.weight.max())

    for most in run_team(work, 2, launch=under("sync")):
        assert most <= 128.0


# -- corrections -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "specs",
    [
        ["lr/staleness"],
        ["drop:above=2"],
        ["dc-asgd:lambda=0.04"],
        ["dc-asgd-adaptive"],
        ["distance:c=0.05"],
        ["lr/staleness", "drop:above=6", "dc-asgd"],
    ],
)
def test_corrected_stale_gradients_train_and_the_summary_knows_how_stale_they_were(
    specs: list[str], tmp_path: Path
) -> None:
    launch = under("async", folder=str(tmp_path), slow=parse_slowness(["all:exp(0.002)"], 3))
    for before, after in run_team(losses, 3, {"corrections": specs}, launch=launch):
        assert after < 0.7 * before
    summary = merge(tmp_path, 3)
    pushes = sum(summary.staleness.histogram.values())
    assert summary.strategy == "async"
    assert summary.updates == 6 * 30
    assert pushes == summary.updates + summary.dropped
    assert 0 < summary.staleness.mean <= summary.staleness.max
    assert summary.staleness.max == max(summary.staleness.histogram)
    assert sum(worker.samples for worker in summary.workers.values()) == 16 * pushes
    assert summary.cancelled == 0
    if specs != ["drop:above=2"]:
        assert summary.staleness.mean == pytest.approx(2.0, abs=1.0)
    else:
        stale = sum(count for age, count in summary.staleness.histogram.items() if age > 2)
        assert summary.dropped == stale


@pytest.mark.parametrize("specs", [["lr/staleness"], ["dc-asgd"], ["dc-asgd-adaptive"], ["distance:c=0.1"]])
def test_fresh_gradients_are_not_corrected(specs: list[str]) -> None:
    expected = plain(sgd, torch.float64, 2)
    for result in run_team(in_team, 2, sgd, torch.float64, 2, {"corrections": specs}, launch=under("sync")):
        assert apart(result, expected) < 1e-12


@pytest.mark.parametrize("spec", ["dc-asgd:lambda=0.5", "dc-asgd-adaptive"])
def test_a_correction_does_not_see_the_scale_of_the_loss(spec: str) -> None:
    def work(team: Team, scale: float | None) -> Values:
        model: Any = nn.Linear(6, 1, bias=False).double()
        nn.init.constant_(model.weight, 0.5)
        model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), corrections=[spec])
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        x = torch.linspace(-1, 2, 6, dtype=torch.float64).view(1, 6)
        for turn in range(4):
            scaler.scale((model(x) ** 2).mean()).backward()
            for rank in range(2):
                if rank == (team.rank + turn) % 2:  # the second one's gradient is stale by then
                    scaler.step(optimizer)
                team.barrier()
            scaler.update()
            optimizer.zero_grad()
        team.close()
        return values(model)

    without = run_team(work, 2, None, launch=under("async"))[0]
    for result in run_team(work, 2, 1024.0, launch=under("async")):
        assert apart(result, without) < 1e-12


# -- together --------------------------------------------------------------------------------------------------------


def test_barriers_and_variables_work_beside_a_parameter_server() -> None:
    def work(team: Team) -> Any:
        model: Any = nn.Linear(1, 1)
        model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        mirrored = team.mirrored(torch.tensor([float(team.rank), 1.0]), aggregation="mean")
        start = mirrored.value.tolist()
        mirrored.assign_add(torch.tensor([float(team.rank), 0.0]))
        team.barrier()
        each = team.per_replica({"rank": team.rank})
        total = team.per_replica(float(team.rank)).reduce("sum").item()
        return start, mirrored.value.tolist(), each.values, total

    for start, value, each, total in run_team(work, 3, launch=under("async")):
        assert start == [0.0, 1.0]
        assert value == [1.0, 1.0]
        assert each == ({"rank": 0}, {"rank": 1}, {"rank": 2})
        assert total == 3.0


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 4, 7])
def test_a_free_buffer_is_never_held_and_never_the_newest(workers: int) -> None:
    source = random.Random(workers)
    shelf = Shelf(workers + 2)
    held = [0] * workers
    for _ in held:
        shelf.hold(0)
    for _ in range(2000):
        worker = source.randrange(workers)
        if source.random() < 0.7:
            free = shelf.take()
            assert 0 <= free < workers + 2
            assert free not in held and free != shelf.newest
            shelf.publish(free)
        shelf.release(held[worker])
        held[worker] = shelf.newest
        shelf.hold(held[worker])
    assert 2 <= shelf.most <= workers + 2


def test_more_versions_than_there_is_room_for_can_not_be() -> None:
    shelf = Shelf(2)
    shelf.hold(0)
    shelf.publish(shelf.take())
    with pytest.raises(RuntimeError, match="all buffers of versions are held"):
        shelf.take()


def buffers(team: Team) -> tuple[set[int], int]:
    """Which buffers a worker was told to use, and how many there are."""
    torch.manual_seed(0)
    model: Any = nn.Linear(10, 4)
    loader: Any = DataLoader(data(400, torch.float32), batch_size=2)
    model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    trainer: Any = team._trainer
    told: set[int] = set()
    follow = trainer._follow

    def watch(answer: Any) -> None:
        told.add(answer.buffer)
        follow(answer)
        held = {value.data_ptr() for value in trainer._versions.views(answer.buffer)}
        assert {parameter.data_ptr() for parameter in model.parameters()} == held

    trainer._follow = watch
    for x, y in loader:
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return told, len(trainer._versions.buffers)


def test_no_more_versions_exist_than_workers_and_two() -> None:
    launch = under("async", slow=parse_slowness(["all:exp(0.001)"], 4))
    results = run_team(buffers, 4, launch=launch)
    told = set().union(*(seen for seen, _ in results))
    assert 3 <= len(told) <= 6
    assert told <= set(range(6))
    assert {count for _, count in results} == {6}


def test_in_step_two_buffers_are_enough() -> None:
    assert set().union(*(seen for seen, _ in run_team(buffers, 4, launch=under("sync")))) == {0, 1}
