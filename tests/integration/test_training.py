"""A team trains as one process would: the same parameters, whatever the model, the optimizer and the split."""

from __future__ import annotations

import copy
import itertools
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.teams import run_team
from helpers.training import Make, Net, Values, adafactor, adamw, apart, divided, scaling, sgd, under, values
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import Mismatch, Team, UsageError


class Counting(Net):
    """Uses all of its layers once in `every` calls, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.every = 3

    def uses_all(self) -> bool:
        self.calls += 1
        return self.every > 0 and self.calls % self.every == 0


def build(dtype: torch.dtype = torch.float64, seed: int = 0, every: int = 3) -> Counting:
    torch.manual_seed(seed)
    net = Counting().to(dtype)
    net.every = every
    return net


def data(samples: int = 205, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 10, dtype=dtype, generator=generator)
    return TensorDataset(x, torch.randint(0, 4, (samples,), generator=generator))


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, steps: int) -> None:
    done = 0
    while done < steps:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            done += 1
            if done == steps:
                break


def plain(make: Make, dtype: torch.dtype, steps: int, batch: int = 32, samples: int = 205) -> nn.Module:
    model = build(dtype, every=3 if samples == 205 else 0)
    torch.manual_seed(7)
    loop(model, make(model.parameters()), DataLoader(data(samples, dtype), batch_size=batch, shuffle=True), steps)
    return model


def in_team(
    team: Team, make: Make, dtype: torch.dtype, steps: int, options: dict[str, Any], samples: int = 205
) -> Values:
    # Every worker begins elsewhere; the lead's values must count.
    model = build(dtype, seed=team.rank, every=3 if samples == 205 else 0)
    torch.manual_seed(7 + team.rank)
    loader = DataLoader(data(samples, dtype), batch_size=32, shuffle=True)
    model, optimizer, loader = team.setup(model, make(model.parameters()), loader, **options)
    done = 0
    while done < steps:
        for x, y in loader:
            with team.step():
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            done += 1
            if done == steps:
                break
        else:
            done = -(-done // 7) * 7  # a worker without a part of the last round has made one step less
    return values(model)


def farthest(ours: Values, model: nn.Module) -> float:
    return apart(ours, values(model))


@pytest.mark.parametrize(
    ("workers", "make", "dtype"),
    [
        (1, sgd, torch.float32),
        (1, adamw, torch.float64),
        (2, sgd, torch.float64),
        (2, adamw, torch.float32),
        (4, sgd, torch.float32),
        (4, adamw, torch.float64),
    ],
)
def test_fifty_steps_equal_one_plain_process(workers: int, make: Make, dtype: torch.dtype) -> None:
    results = run_team(in_team, workers, make, dtype, 50, {})
    expected = plain(make, dtype, 50)
    for result in results:
        assert farthest(result, expected) < (1e-6 if dtype is torch.float32 else 1e-12)


@pytest.mark.parametrize(
    ("make", "options"),
    [(sgd, {"gradients": "visible"}), (adamw, {"gradients": "visible"}), (adamw, {"balance": True})],
)
def test_options_do_not_change_the_result(make: Make, options: dict[str, Any]) -> None:
    for result in run_team(in_team, 4, make, torch.float64, 40, options):
        assert farthest(result, plain(make, torch.float64, 40)) < 1e-12


def test_an_optimizer_that_needs_whole_parameters_is_run_whole(capfd: pytest.CaptureFixture[str]) -> None:
    for result in run_team(in_team, 2, adafactor, torch.float64, 20, {}):
        assert farthest(result, plain(adafactor, torch.float64, 20)) < 1e-12
    said = capfd.readouterr().err
    assert said.count("Adafactor is not known to treat every element by itself") == 1


@pytest.mark.parametrize(
    ("make", "options"), [(adamw, {}), (adamw, {"gradients": "visible"}), (adafactor, {"gradients": "visible"})]
)
def test_the_last_batch_may_be_smaller_than_the_team(make: Make, options: dict[str, Any]) -> None:
    """194 samples are six batches of 32 and one of 2, of which two of the four workers have nothing."""
    for result in run_team(in_team, 4, make, torch.float64, 21, options, 194):
        assert farthest(result, plain(make, torch.float64, 21, samples=194)) < 1e-12


def test_the_same_seed_gives_the_same_bits() -> None:
    first, second = (run_team(in_team, 3, adamw, torch.float32, 20, {}) for _ in range(2))
    for ours, theirs in zip(itertools.chain(*first), itertools.chain(*second), strict=True):
        assert torch.equal(ours, theirs)


def test_every_worker_has_the_same_parameters_in_the_same_memory() -> None:
    def work(team: Team) -> Values:
        return in_team(team, sgd, torch.float32, 5, {})

    first, *others = run_team(work, 3)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_the_optimizer_state_exists_once_and_is_whole_on_the_lead() -> None:
    def work(team: Team) -> Any:
        model = build()
        optimizer = adamw(model.parameters())
        model, optimizer, loader = team.setup(model, optimizer, DataLoader(data(), batch_size=32))
        loop(model, optimizer, loader, 5)
        assert not optimizer.state
        return copy.deepcopy(optimizer.state_dict()) if team.is_lead else None

    state = run_team(work, 4)[0]
    model = build()
    expected = adamw(model.parameters())
    loop(model, expected, DataLoader(data(), batch_size=32), 5)
    reference = expected.state_dict()
    assert state["param_groups"] == reference["param_groups"]
    assert state["state"].keys() == reference["state"].keys()
    for index, known in reference["state"].items():
        for name, value in known.items():
            torch.testing.assert_close(state["state"][index][name], value, rtol=1e-10, atol=1e-12)


def accumulating(team: Team, samples: int, options: dict[str, Any]) -> Values:
    model = build()
    loader = DataLoader(data(samples), batch_size=16)
    model, optimizer, loader = team.setup(model, sgd(model.parameters()), loader, **options)
    for number, (x, y) in enumerate(loader):
        with team.step(accumulate=number % 4 != 3):
            (nn.functional.cross_entropy(model(x), y) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize("options", [{}, {"gradients": "visible"}])
@pytest.mark.parametrize("samples", [128, 120])
def test_gradients_accumulate_over_even_and_uneven_batches(samples: int, options: dict[str, Any]) -> None:
    model = build()
    optimizer = sgd(model.parameters())
    for number, (x, y) in enumerate(DataLoader(data(samples), batch_size=16)):
        (nn.functional.cross_entropy(model(x), y) / 4).backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    for result in run_team(accumulating, 2, samples, options):
        assert farthest(result, model) < 1e-12


def clipping(team: Team, options: dict[str, Any], norm: float) -> tuple[list[float], Values]:
    model = build(every=0)
    loader = DataLoader(data(194), batch_size=32)
    model, optimizer, loader = team.setup(model, adamw(model.parameters()), loader, **options)
    norms = []
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        norms.append(float(team.clip_grad_norm_(0.1, norm)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, values(model)


@pytest.mark.parametrize("options", [{}, {"gradients": "visible"}])
@pytest.mark.parametrize("norm", [2.0, float("inf")])
def test_clipping_is_of_the_whole_gradient(options: dict[str, Any], norm: float) -> None:
    model = build(every=0)
    optimizer = adamw(model.parameters())
    norms = []
    for x, y in DataLoader(data(194), batch_size=32):
        nn.functional.cross_entropy(model(x), y).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm)))
        optimizer.step()
        optimizer.zero_grad()
    (lead_norms, _), *_ = results = run_team(clipping, 4, options, norm)
    assert lead_norms == pytest.approx(norms, rel=1e-9)
    for _, result in results:
        assert farthest(result, model) < 1e-9


def scheduling(team: Team, before: bool) -> tuple[list[float], Values]:
    model = build(every=0)
    optimizer = sgd(model.parameters())
    make = torch.optim.lr_scheduler.OneCycleLR
    scheduler = make(optimizer, max_lr=0.1, total_steps=30) if before else None
    loader = DataLoader(data(194), batch_size=32)
    model, optimizer, loader = team.setup(model, optimizer, loader)
    scheduler = scheduler or make(optimizer, max_lr=0.1, total_steps=30)
    rates = []
    for _ in range(3):
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append(optimizer.param_groups[0]["lr"])
    return rates, values(model)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("before", [True, False])
def test_schedulers_work_and_stay_together_even_where_a_worker_sits_out(before: bool) -> None:
    model = build(every=0)
    optimizer = sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=30)
    for _ in range(3):
        for x, y in DataLoader(data(194), batch_size=32):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    for _, result in run_team(scheduling, 4, before):
        assert farthest(result, model) < 1e-12


def groups_and_dtypes(team: Team | None) -> Values:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    factor = nn.Parameter(torch.ones(4, dtype=torch.float32))
    model.register_parameter("factor", factor)
    split = [{"params": model[0].parameters(), "lr": 0.2}, {"params": [*model[2].parameters(), factor]}]
    optimizer = torch.optim.SGD(split, lr=0.05, momentum=0.5)
    loader: Any = DataLoader(data(96), batch_size=32)
    if team:
        model, optimizer, loader = team.setup(model, optimizer, loader)
    for x, y in loader:
        nn.functional.cross_entropy(model(x) * factor, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def test_parameter_groups_and_several_dtypes() -> None:
    expected = groups_and_dtypes(None)
    for result in run_team(groups_and_dtypes, 2):
        for ours, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


def test_what_only_one_worker_uses_is_updated_and_what_nobody_uses_stays() -> None:
    expected = divided(None)
    for result in run_team(divided, 3):
        for ours, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("rule", "first", "second"), [("linear", 2.5, 4.0), ("sqrt", 1.5, 2.0)])
def test_the_learning_rate_scales_with_the_team_after_a_warmup(rule: str, first: float, second: float) -> None:
    assert run_team(scaling, 4, rule) == pytest.approx([1 - 0.1 * first - 0.1 * second] * 4)


def visible(team: Team) -> tuple[float, float]:
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), gradients="visible")
    model(torch.full((1, 1), float(team.rank))).sum().backward()
    assert model.weight.grad is not None
    seen = model.weight.grad.item()
    model.weight.grad.mul_(2.0)
    before = model.weight.item()
    optimizer.step()
    return seen, before - model.weight.item()


def test_visible_gradients_are_the_mean_and_may_be_changed() -> None:
    for seen, moved in run_team(visible, 4):
        assert seen == pytest.approx(1.5)
        assert moved == pytest.approx(0.1 * 2.0 * 1.5)


def scaled(team: Team, options: dict[str, Any]) -> tuple[list[float], Values, float]:
    torch.manual_seed(0)
    model = nn.Linear(10, 4)
    loader = DataLoader(data(128, torch.float32), batch_size=32)
    model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    moved = []
    for number, (x, y) in enumerate(loader):
        before = model.weight.detach().clone()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x).float(), y)
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


@pytest.mark.parametrize("options", [{}, {"gradients": "visible"}])
def test_a_step_with_an_infinite_gradient_anywhere_is_skipped_everywhere(options: dict[str, Any]) -> None:
    results = run_team(scaled, 2, options)
    for moved, _, _ in results:
        assert moved[0] > 0.001 and moved[1] > 0.001
        assert moved[2] == 0.0
        assert 0.0 < moved[3] <= 0.1 * 1e-3 * 1.01
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))
    assert results[1][2] == 128.0


def second_order(team: Team | None) -> Values:
    model = build()
    optimizer: torch.optim.Optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, line_search_fn="strong_wolfe")
    loader: Any = DataLoader(data(128), batch_size=64)
    if team:
        model, optimizer, loader = team.setup(model, optimizer, loader)
    for x, y in loader:

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            model.calls = 0
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    return values(model)


def test_a_closure_sees_the_loss_of_the_whole_batch() -> None:
    expected = second_order(None)
    for result in run_team(second_order, 2):
        for ours, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def normalised(team: Team | None, together: bool) -> tuple[Values, Values]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(54, 8), nn.BatchNorm1d(8)]
    model: nn.Module = nn.Sequential(*layers, nn.Linear(8, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(70, 1, 5, 5, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 4, (70,), generator=generator)
    loader: Any = DataLoader(TensorDataset(images, labels), batch_size=16)
    if team:
        model, optimizer, loader = team.setup(model, optimizer, loader, sync_batch_norm=together)
    for _ in range(2):
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return values(model), [b.detach().clone() for b in model.buffers()]


def test_synchronised_batch_norm_equals_the_undivided_batch() -> None:
    parameters, buffers = normalised(None, False)
    results = run_team(normalised, 4, True)
    for ours, _ in results:
        for a, b in zip(ours, parameters, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    _, statistics = results[0]  # the lead's, who has a part of every batch
    for a, b in zip(statistics, buffers, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_batch_norm_statistics_are_each_replicas_own_otherwise() -> None:
    (first, one), (second, other) = run_team(normalised, 2, False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(one[0], other[0])


def variables(team: Team) -> Any:
    mirrored = team.mirrored(torch.tensor([float(team.rank), 1.0]), aggregation="mean")
    start = mirrored.value.tolist()
    mirrored.assign_add(torch.tensor([float(team.rank), 0.0]))
    each = team.per_replica({"rank": team.rank})
    ranks = team.per_replica(torch.full((team.rank + 1,), team.rank))
    total = team.per_replica(float(team.rank)).reduce("sum").item()
    return start, mirrored.value.tolist(), each.values, [tuple(v.shape) for v in ranks.values], total


def test_mirrored_values_stay_equal_and_per_replica_values_are_known_to_all() -> None:
    for start, value, each, shapes, total in run_team(variables, 3):
        assert start == [0.0, 1.0]
        assert value == [1.0, 1.0]
        assert each == ({"rank": 0}, {"rank": 1}, {"rank": 2})
        assert shapes == [(1,), (2,), (3,)]
        assert total == 3.0


def metrics(team: Team) -> list[Any]:
    counts = torch.tensor([team.rank, 1], dtype=torch.int32)
    numbers = [
        team.sum(2**62 + team.rank if team.rank == 0 else -(2**62)),
        team.sum(0.5 * team.rank if team.rank else 0),
    ]
    tensors = [team.sum(counts), team.mean(counts.bfloat16()), team.mean(torch.tensor(float(team.rank)))]
    with pytest.raises(Mismatch):
        team.sum(torch.ones(1 + team.rank))
    with pytest.raises(UsageError, match="this is a str"):
        team.sum("many")  # type: ignore[type-var]
    return [*numbers, team.mean(team.rank), *(one.tolist() for one in tensors), tensors[0].dtype]


def test_metrics_are_summed_over_all_workers() -> None:
    for found in run_team(metrics, 3):
        assert found == [-(2**62), 1.5, 1.0, [3, 3], [1.0, 1.0], 1.0, torch.int64]


@pytest.mark.parametrize(
    ("strategy", "workers", "count"), [("async", 3, 3), ("tensor:degree=2", 2, 1), ("mesh:data=2,tensor=2", 4, 2)]
)
def test_metrics_of_training_count_every_sample_once(strategy: str, workers: int, count: int) -> None:
    def work(team: Team) -> tuple[float, float]:
        model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        loader: Any = DataLoader(TensorDataset(torch.ones(26, 4)), batch_size=6)
        model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        samples = 0
        for (x,) in loader:
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            samples += len(x)
        return team.sum(samples), team.mean(samples)

    assert (
        run_team(work, workers, launch=under(strategy, "lead" if strategy == "async" else None))
        == [(26, 26 / count)] * workers
    )


def saving(team: Team, path: str, total: int, resume: bool) -> Values:
    model = build(seed=team.rank)
    loader = DataLoader(data(96), batch_size=32)
    model, optimizer, loader = team.setup(model, adamw(model.parameters()), loader)
    epochs = range(total)
    if resume:
        epochs = range(team.load(path)["epoch"], total)
        model.calls = 3
    for _ in epochs:
        loop(model, optimizer, loader, 3)
    if not resume:
        team.save(path, epoch=total)
        team.barrier()
    return values(model)


def test_a_checkpoint_goes_on_in_another_team_and_in_plain_torch(tmp_path: Any) -> None:
    path = str(tmp_path / "deep" / "checkpoint.pt")
    run_team(saving, 4, path, 1, False)
    straight = run_team(saving, 4, str(tmp_path / "other.pt"), 2, False)[0]
    for result in run_team(saving, 2, path, 2, True):
        for ours, theirs in zip(result, straight, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    content = torch.load(path)
    model = build(seed=9)
    optimizer = adamw(model.parameters())
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    model.calls = 3
    loop(model, optimizer, DataLoader(data(96), batch_size=32), 3)
    assert farthest(straight, model) < 1e-10


def counting(team: Team, epochs: int) -> list[list[int]]:
    model = nn.Linear(1, 1)
    dataset = TensorDataset(torch.arange(103).float().unsqueeze(1))
    loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2)
    model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=1e-9), loader, balance=True)
    seen: list[list[int]] = []
    for _ in range(epochs):
        seen.append([])
        for (x,) in loader:
            seen[-1] += [int(value) for value in x]
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen


def test_every_sample_is_trained_on_exactly_once_an_epoch() -> None:
    results = run_team(counting, 4, 3)
    epochs = [[sample for worker in results for sample in worker[number]] for number in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(103))
    assert epochs[0] != epochs[1]


def test_a_second_setup_is_refused() -> None:
    def work(team: Team) -> str:
        model = build()
        team.setup(model, sgd(model.parameters()))
        with pytest.raises(paceline.UsageError) as caught:
            team.setup(model, sgd(model.parameters()))
        return str(caught.value)

    assert "several models go into one call" in run_team(work, 2)[0]


def test_where_memory_cannot_be_shared_torch_distributed_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of accelerators, on CPU tensors and gloo."""
    monkeypatch.setattr("paceline.strategies.all_reduce.on_host", lambda _parameters: False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    for result in run_team(in_team, 4, adamw, torch.float64, 21, {}, 194):
        assert farthest(result, plain(adamw, torch.float64, 21, samples=194)) < 1e-12


@pytest.mark.parametrize("strategy", ["all-reduce", "sync", "tensor:degree=2", "pipeline:stages=2,microbatches=2"])
def test_learning_rates_change_after_a_checkpoint_is_loaded(strategy: str, tmp_path: Path) -> None:
    def work(team: Team | None) -> list[float]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
        loader: Any = DataLoader(data(64), batch_size=16)
        if team:
            model, optimizer, loader = team.setup(model, optimizer, loader)
            team.save(tmp_path / "first.pt")
            team.barrier()
            team.load(tmp_path / "first.pt")
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        sums = []
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
            state = model.state_dict()
            sums.append(float(sum(value.abs().sum() for value in state.values())))
        optimizer.param_groups[0]["lr"] = 0.0
        for x, y in loader:
            cross_entropy(model(x), y).backward()
            optimizer.step()
        return [*sums, float(sum(value.abs().sum() for value in model.state_dict().values()))]

    launch = under(strategy, "lead" if strategy == "sync" else None)
    for result in run_team(work, 2, launch=launch):
        assert result == pytest.approx(work(None), abs=1e-9)


def after_a_break(team: Team | None) -> Values:
    """Leaves the loop over the loader in its middle, and makes steps without it."""
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 2).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(*torch.randn(2, 32, 4, dtype=torch.float64)), batch_size=8)
    if team is not None:
        model, optimizer, loader = team.setup(model, optimizer, loader)
    for number, (x, _) in enumerate(loader):
        if number == 2:
            break
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
    if team is not None and team.rank == 0:
        time.sleep(0.3)  # the other one has pushed by then
    for number in range(3):
        optimizer.zero_grad()
        model(torch.full((4, 4), number + 1.0, dtype=torch.float64)).pow(2).mean().backward()
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("strategy", ["all-reduce", "sync"])
def test_steps_after_a_loop_that_was_left_are_made_by_all_workers(strategy: str) -> None:
    expected = after_a_break(None)
    for result in run_team(after_a_break, 2, launch=under(strategy, "1" if strategy == "sync" else None)):
        assert apart(result, expected) < 1e-10
