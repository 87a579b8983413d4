"""What a parameter server can be asked for: what is refused, compressed gradients, corrections of stale ones."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.teams import run_team
from helpers.training import Make, Values, apart, data, in_team, plain, sgd, under, values
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import paceline
from paceline import Team
from paceline.config import parse_slowness
from paceline.events import Push
from paceline.events.reader import read_run
from paceline.events.summary import merge

pytestmark = pytest.mark.usefixtures("warm")


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"servers": "some"}, "servers is 'some'; it must be a number of processes"),
        ({"servers": 0}, "servers is '0'; it must be a number of processes"),
        ({"compress": "gzip"}, "compress is 'gzip'; it must be 'none'"),
        ({"compress": "topk:2"}, "the share of the elements to keep must be above 0 and at most 1"),
        ({"corrections": ["lr/age"]}, "unknown correction 'lr/age'"),
    ],
)
def test_options_that_cannot_be_are_refused_when_the_policy_is_made(options: dict[str, Any], said: str) -> None:
    with pytest.raises(paceline.UsageError) as caught:
        paceline.KSync(k=2, **options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


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
            team.setup(model, torch.optim.SGD(model.parameters()))
        return str(caught.value)

    assert (
        run_team(work, 2, launch=under("async:compress=int8"))
        == ["compress is 'int8', which needs parameters of float32; some are torch.bfloat16"] * 2
    )


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("k-sync:k=3", "strategy 'k-sync:k=3': k is 3, with 2 workers; it must be a whole number from 1 to 2"),
        ("k-async:k=0", "strategy 'k-async:k=0': k is 0, with 2 workers; it must be a whole number from 1 to 2"),
        ("k-batch-sync:k=0", "k is 0; it must be a whole number of at least 1"),
        ("k-batch-async:k=-2", "k is -2; it must be a whole number of at least 1"),
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


def losses(team: Team, epochs: int = 6) -> tuple[float, float]:
    """Of all samples, before and after."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 4))
    dataset = data(480, torch.float32)
    loader: Any = DataLoader(dataset, batch_size=16 * team.world_size, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    model, optimizer, loader = team.setup(model, optimizer, loader)
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
    for before, after in run_team(losses, 2, launch=under(f"async:compress={form}", folder=str(tmp_path))):
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

    launch = under(f"sync:compress={form}", "all")
    for result in run_team(in_team, 3, make, torch.float32, 4, launch=launch):
        distance = apart(result, plain(make, torch.float32, 4))
        assert distance < limit


def test_what_is_left_out_of_a_parameter_waits_for_its_next_gradient() -> None:
    """It is not taken for a new one in the steps in between, which do not use the parameter."""

    def work(team: Team) -> list[float]:
        large, seldom = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(16))
        model: Any = nn.ParameterList([large, seldom])
        model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for number in range(8):
            loss = -large.sum() * (100 if number < 6 else 0)
            if number in (0, 6, 7):
                loss = loss - seldom.sum() * (number == 0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return seldom.tolist()

    for moved in run_team(work, 2, launch=under("sync:compress=topk:0.5")):
        assert moved == [1.0] * 16


def test_a_changed_loss_scale_does_not_change_what_compression_has_kept_back() -> None:
    def work(team: Team) -> float:
        model: Any = nn.Linear(64, 1, bias=False)
        nn.init.zeros_(model.weight)
        model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        for number in range(64):
            if number == 32:
                scaler.update(1.0)
            scaler.scale(-model(torch.ones(1, 64)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return float(model.weight.max())

    for most in run_team(work, 2, launch=under("sync:compress=topk:0.02")):
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
    launch = under(
        f"async:corrections={'+'.join(specs)}", folder=str(tmp_path), slow=parse_slowness(["all:exp(0.002)"], 3)
    )
    for before, after in run_team(losses, 3, launch=launch):
        assert after < 0.7 * before
    summary = merge(tmp_path, 3)
    pushed = [event for block in read_run(tmp_path) for event in block if isinstance(event, Push)]
    pushes = len(pushed)
    assert summary.strategy == launch.strategy
    assert summary.updates == 6 * 30
    assert pushes == summary.updates + summary.dropped
    assert sum(summary.staleness.histogram.values()) == summary.updates, "of the gradients that were used"
    assert 0 < summary.staleness.mean <= summary.staleness.max
    assert summary.staleness.max == max(summary.staleness.histogram)
    assert sum(worker.samples for worker in summary.workers.values()) == 16 * pushes
    assert summary.cancelled == 0
    if specs != ["drop:above=2"]:
        used = [push.staleness for push in pushed if push.outcome == "used"]
        assert summary.staleness.mean == pytest.approx(statistics.mean(used))
    else:
        assert summary.dropped == sum(push.staleness > 2 for push in pushed)
        assert summary.staleness.max <= 2


@pytest.mark.parametrize("specs", [["lr/staleness"], ["dc-asgd"], ["dc-asgd-adaptive"], ["distance:c=0.1"]])
def test_fresh_gradients_are_not_corrected(specs: list[str]) -> None:
    expected = plain(sgd, torch.float64, 2)
    launch = under(f"sync:corrections={specs[0]}")
    for result in run_team(in_team, 2, sgd, torch.float64, 2, launch=launch):
        assert apart(result, expected) < 1e-12


@pytest.mark.parametrize("spec", ["dc-asgd:lambda=0.5", "dc-asgd-adaptive"])
def test_a_correction_does_not_see_the_scale_of_the_loss(spec: str) -> None:
    def work(team: Team, scale: float | None) -> Values:
        model: Any = nn.Linear(6, 1, bias=False).double()
        nn.init.constant_(model.weight, 0.5)
        model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
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

    launch = under(f"async:corrections={spec}")
    without = run_team(work, 2, None, launch=launch)[0]
    for result in run_team(work, 2, 1024.0, launch=launch):
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
