"""A parameter server trains as one process would, wherever it holds the parameters and however gradients travel."""

from __future__ import annotations

import functools
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.teams import run_team
from helpers.training import (
    BATCH,
    Make,
    Values,
    adafactor,
    adamw,
    apart,
    build,
    data,
    divided,
    in_team,
    loop,
    plain,
    same_bits,
    scaling,
    sgd,
    under,
    values,
)
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from paceline import Team

pytestmark = pytest.mark.usefixtures("warm")


# -- the same numbers as one plain process ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "make", "dtype"),
    [
        (2, sgd, torch.float32),
        (2, adamw, torch.float64),
        (3, sgd, torch.float64),
        (3, adamw, torch.float32),
        (4, sgd, torch.float32),
        (4, adamw, torch.float64),
    ],
)
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
        loader: Any = DataLoader(data(192), batch_size=BATCH)
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
        loader: Any = DataLoader(data(), batch_size=BATCH, shuffle=True)
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
    loader: Any = DataLoader(data(192), batch_size=BATCH)
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


@pytest.mark.parametrize("strategy", ["async", "k-batch-sync:k=1"])
def test_a_worker_that_takes_more_than_its_share_keeps_the_last_rate_of_its_schedule(strategy: str) -> None:
    def work(team: Team) -> tuple[int, float]:
        model, loader = build(), DataLoader(data(64), batch_size=2)
        model, optimizer, loader = team.setup(model, sgd(model.parameters()), loader)
        make = torch.optim.lr_scheduler.OneCycleLR
        scheduler = make(optimizer, max_lr=0.01, total_steps=len(loader), final_div_factor=100)
        steps = 0
        for x, y in loader:
            with team.step():
                time.sleep(0.05 * team.rank)
                cross_entropy(model(x), y).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                steps += 1
        with pytest.raises(ValueError, match="Tried to step"):  # of somebody else's optimizer
            alone = make(torch.optim.SGD(model.parameters()), max_lr=0.01, total_steps=1)
            alone.optimizer.step()
            alone.step(), alone.step(), alone.step()
        return steps, optimizer.param_groups[0]["lr"]

    (steps, rate), _ = run_team(work, 2, launch=under(strategy))
    assert steps > 17
    assert rate < 0.01 / 100


def accumulating(team: Team) -> Values:
    model = build()
    loader = DataLoader(data(192), batch_size=16)
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
    loader: Any = DataLoader(data(), batch_size=BATCH)
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


@pytest.mark.parametrize(("norm", "servers"), [(2.0, "lead"), (2.0, "all"), (1.0, "lead"), (float("inf"), "all")])
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


def test_what_only_one_worker_uses_is_updated_and_what_nobody_uses_stays() -> None:
    expected = divided(None)
    for result in run_team(divided, 3, launch=under("sync")):
        for ours, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


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
    loader: Any = DataLoader(data(batches * 24, torch.float32), batch_size=24, shuffle=True)
    model, optimizer, loader = team.setup(model, optimizer, loader)
    for x, y in itertools.chain(loader, loader):
        (cross_entropy(model(x), y) + (scale**2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@functools.cache
def bits(strategy: str, workers: int = 3, servers: str = "lead") -> list[Values]:
    """What each worker of such a team ends with; it is trained only once."""
    return run_team(dropping_out, workers, 5, launch=under(strategy, servers))


def test_the_same_seed_gives_the_same_bits() -> None:
    second = run_team(dropping_out, 3, 5, launch=under("sync"))
    assert same_bits(list(itertools.chain(*bits("sync"))), list(itertools.chain(*second)))
    assert not same_bits(bits("sync")[0], bits("sync", 2)[0])


@pytest.mark.parametrize("strategy", ["k-sync:k=3", "k-async:k=3"])
def test_a_policy_that_waits_for_everybody_gives_the_bits_of_sync(strategy: str) -> None:
    assert same_bits(list(itertools.chain(*bits(strategy))), list(itertools.chain(*bits("sync"))))


def test_one_group_of_all_workers_is_sync() -> None:
    expected = run_team(in_team, 3, sgd, torch.float64, 4, launch=under("sync"))[0]
    for result in run_team(in_team, 3, sgd, torch.float64, 4, launch=under("groups:size=3")):
        assert apart(result, expected) < 1e-12
    assert apart(bits("groups:size=3")[0], bits("sync")[0]) < 1e-5


@pytest.mark.parametrize("servers", ["2", "all"])
def test_wherever_the_parameters_are_held_the_bits_are_the_same(servers: str) -> None:
    got, expected = bits("sync", 2, servers), bits("sync", 2, "lead")
    assert same_bits(list(itertools.chain(*got)), list(itertools.chain(*expected)))


def test_server_processes_hold_whole_parameters_where_they_must() -> None:
    for result in run_team(in_team, 2, adafactor, torch.float64, 2, launch=under("sync", "2")):
        assert apart(result, plain(adafactor, torch.float64, 2)) < 1e-12


def test_a_server_process_gives_them_too_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    got = run_team(dropping_out, 2, 5, launch=under("sync", "1"))
    assert same_bits(list(itertools.chain(*got)), list(itertools.chain(*bits("sync", 2))))
    assert list(tmp_path.iterdir()) == []


# -- gradients that are not finite -----------------------------------------------------------------------------------


def scaled(team: Team) -> tuple[list[float], Values, float]:
    torch.manual_seed(0)
    model: Any = nn.Linear(10, 4)
    loader: Any = DataLoader(data(192, torch.float32), batch_size=BATCH)
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


def test_an_infinite_gradient_of_one_worker_skips_the_update_for_all() -> None:
    results = run_team(scaled, 2, launch=under("sync"))
    for moved, parameters, _ in results:
        assert moved[0] > 0.001 and moved[1] > 0.001
        assert all(value.isfinite().all() for value in parameters)
    assert same_bits(results[0][1], results[1][1])
    assert [moved[2] for moved, _, _ in results] == [0.0, 0.0]
    assert [scale for _, _, scale in results] == [128.0, 128.0]


def test_loss_scaling_changes_nothing_else() -> None:
    def work(team: Team, scale: float | None) -> Values:
        model: Any = build(torch.float32)
        loader: Any = DataLoader(data(192, torch.float32), batch_size=BATCH)
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
