"""A pipeline trains as one process would, whatever the model, the schedule and the loop; or says why it cannot."""

from __future__ import annotations

import copy
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.load import allowed
from helpers.split_models import apart, launched, made, train
from helpers.support import wait_until
from helpers.teams import run_team
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from paceline import Team, TeamError, UsageError
from paceline.config import Launch, Timeouts


def losses(team: Team, kind: str, steps: int, options: dict[str, Any]) -> list[float]:
    return train(team, kind, steps, **options)


@pytest.mark.parametrize(("kind", "workers"), [("small", 2), ("transformer", 4), ("convnet", 2), ("convnet", 4)])
def test_losses_are_those_of_the_plain_model(kind: str, workers: int) -> None:
    found = run_team(losses, workers, kind, 8, {}, launch=launched(f"pipeline:stages={workers},microbatches=4"))
    assert apart(found[0], train(None, kind, 8)) < 1e-5
    assert all(other == found[0] for other in found)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("chain", "microbatches=4,schedule=gpipe"),
        ("small", "microbatches=3,schedule=1f1b"),
        ("chain", "microbatches=4,schedule=interleaved"),
        ("small", "microbatches=4,schedule=zero-bubble"),
        ("chain", "microbatches=5,schedule=zero-bubble-2p"),
        ("chain", "microbatches=1"),
    ],
)
def test_every_schedule_gives_the_same_losses(kind: str, options: str) -> None:
    found = run_team(losses, 2, kind, 4, {}, launch=launched(f"pipeline:stages=2,{options}"))
    assert apart(found[0], train(None, kind, 4)) < 1e-5


def test_zero_bubble_can_cut_after_a_value_that_the_backward_pass_needs() -> None:
    found = run_team(losses, 4, "small", 4, {}, launch=launched("pipeline:stages=4,schedule=zero-bubble"))
    assert apart(found[0], train(None, "small", 4)) < 1e-5


# -- loops of all kinds ----------------------------------------------------------------------------------------------


def habits(team: Team | None) -> dict[str, Any]:
    """A loop with everything that loops have: clipping, accumulation, a schedule, values before and after backward."""
    model: Any = made("chain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(26, 12, generator=generator), torch.randint(0, 61, (26,), generator=generator)
    if team is not None:
        model, optimizer = team.setup(model, optimizer)
    told: dict[str, Any] = {"losses": [], "norms": [], "right": [], "early": []}
    total = torch.zeros(())
    for step in range(6):
        x_now, y_now = (x, y) if step % 2 else (x[:9], y[:9])
        output = model(x_now)
        loss = 0.5 * cross_entropy(output, y_now, reduction="sum") / len(y_now) + 0.25
        if step == 3:
            told["early"].append((loss.item(), output.argmax(1).tolist()))
        (loss / 2).backward() if step == 4 else loss.backward()
        if step == 4:  # a second minibatch for the same update
            again = cross_entropy(model(x), y)
            again.backward()
        norm = team.clip_grad_norm_(0.5) if team else nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        told["norms"].append(float(norm))
        told["right"].append(int((output.argmax(1) == y_now).sum()))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        total = total + loss.detach()
        told["losses"].append(float(loss))
    model.eval()
    with torch.no_grad():
        told["evaluated"] = model(x).tolist()
    told["total"] = float(total)
    return told


SHARED = [(2, ""), (3, ",workers=1+2"), (3, ",workers=2+1")]
"""Workers of two stages, each with one of them or shared by several."""


@pytest.mark.parametrize(("workers", "shared"), SHARED)
def test_a_loop_may_do_what_loops_do(workers: int, shared: str) -> None:
    plain = habits(None)
    for found in run_team(habits, workers, launch=launched(f"pipeline:stages=2,microbatches=4{shared}")):
        for name in ("losses", "norms"):
            assert apart(found[name], plain[name]) < 1e-5, name
        assert found["right"] == plain["right"]
        assert found["early"][0][1] == plain["early"][0][1]
        assert abs(found["early"][0][0] - plain["early"][0][0]) < 1e-5
        assert torch.allclose(torch.tensor(found["evaluated"]), torch.tensor(plain["evaluated"]), atol=1e-5)
        assert abs(found["total"] - plain["total"]) < 1e-4


class Odd(nn.Module):
    """Two inputs, two outputs, a branch that skips parts, a frozen layer, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(4, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.middle, self.late = nn.Linear(8, 8), nn.Linear(16, 8)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, a: torch.Tensor, b: torch.Tensor, twice: bool = False) -> dict[str, torch.Tensor]:
        first = torch.tanh(self.left(a)) + self.right(b)
        hidden = torch.relu(self.frozen(first))
        for _ in range(2 if twice else 1):
            hidden = torch.tanh(self.middle(hidden)) * self.scale
        return {"early": first.sum(1), "late": self.late(torch.cat([hidden, first], 1))}


def odd(team: Team | None) -> list[float]:
    torch.manual_seed(0)
    model: Any = Odd()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(14, 6, generator=generator), torch.randn(14, 4, generator=generator)
    if team is not None:
        model, optimizer = team.setup(model, optimizer)
    losses = []
    for step in range(5):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step == 4):
            output = model(a, b=b, twice=step == 3)
            loss = output["late"].square().mean() + 0.1 * (output["early"] - a[:, 0]).abs().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("workers", "stages"), [(2, "2"), (3, "3"), (4, "3,workers=1+2+1"), (3, "2,workers=2+1")])
def test_models_of_any_shape_are_cut(workers: int, stages: str) -> None:
    plain = odd(None)
    found = run_team(odd, workers, launch=launched(f"pipeline:stages={stages},microbatches=3"))[0]
    assert apart(found[:4], plain[:4]) < 1e-5
    assert apart(found[4:], plain[4:]) < 2e-2  # bfloat16 rounds each microbatch by itself


class Turned(nn.Module):
    """Gives what lies in memory in another order than its dimensions are in, as attention does."""

    inplace = True  # so that it is not cut off from what is before it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 4, 3).transpose(1, 2)


class Back(nn.Module):
    """Views what can be viewed only as long as it lies as it did."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).view(-1, 12)


def turning(team: Team | None) -> list[float]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(12, 12), Turned(), Back(), Turned())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if team is not None:
        model, optimizer = team.setup(model, optimizer)
    x = torch.randn(10, 12, generator=torch.Generator().manual_seed(3))
    losses = []
    for _ in range(3):
        loss = model(x).transpose(1, 2).view(-1, 12).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses += [loss.item(), model(x).transpose(1, 2).view(-1, 12).sum().item()]
    return losses


def test_values_lie_in_memory_as_they_did_where_they_were_made() -> None:
    for found in run_team(turning, 2, launch=launched("pipeline:stages=2,microbatches=3")):
        assert apart(found, turning(None)) < 1e-5


def weighted(team: Team | None) -> list[float]:
    """Targets that count for nothing, classes that count for more, and means made by hand."""
    model: Any = made("chain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(12, 12, generator=generator), torch.randint(0, 61, (12,), generator=generator)
    y[:4] = -100  # all of the first microbatch
    weight = torch.rand(61, generator=generator) + 0.1
    counts = (y >= 0).float()
    if team is not None:
        model, optimizer = team.setup(model, optimizer)
    losses = []
    for step in range(4):
        output = model(x)
        if step < 3:
            loss = cross_entropy(output, y, weight=weight if step else None, label_smoothing=0.1 * (step == 2))
        else:
            each = cross_entropy(output, y.clamp(min=0), reduction="none")
            loss = (each * counts).sum() / counts.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_loss_of_the_batch_is_exact_where_microbatches_count_differently() -> None:
    found = run_team(weighted, 2, launch=launched("pipeline:stages=2,microbatches=3"))[0]
    assert apart(found, weighted(None)) < 1e-5


class Scored(nn.Module):
    """Returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 61)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.second(torch.tanh(self.first(x))), y)


class Remembering(Scored):
    """Counts its calls, and keeps a mean of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(12))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if self.training:
            self.calls += 1
            self.seen.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return self.second(hidden - self.seen)


class Counting(Scored):
    """Has the number of samples as a number."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)).view(int(x.shape[0]), 12))


class Quiet(Scored):
    """Lets no gradient through a part of what it computes, with a layer that would have one, and a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.cell = nn.Linear(12, 12), nn.GRUCell(12, 12)
        self.scale = torch.full((12,), 0.5)  # no buffer

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(x.size(0), 12)
        for _ in range(2):
            state = self.cell(x, state)
        hidden = torch.tanh(self.first(state))
        with torch.no_grad():
            target = torch.tanh(self.teacher(hidden)) * self.scale
            length = hidden.norm(dim=1, keepdim=True)
        return self.second(hidden / (length + 1) + target)


def few_steps(team: Team | None, kind: type[nn.Module]) -> list[float]:
    torch.manual_seed(0)
    model: Any = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(10, 12, generator=generator), torch.randint(0, 61, (10,), generator=generator)
    if team is not None:
        model, optimizer = team.setup(model, optimizer)
    losses = []
    for step in range(4):
        rows = slice(0, 10 if step % 2 == 0 else 7)
        made = model(x[rows], y[rows])
        if kind is Quiet:
            loss = -made.log_softmax(1)[torch.arange(len(made)), y[rows]].mean()
        else:
            loss = made if kind is Scored else cross_entropy(made, y[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(model.eval()(x, y).sum().item())
    return [*losses, *(float(buffer.sum()) for buffer in model.state_dict().values())]


@pytest.mark.parametrize("kind", [Scored, Remembering, Counting])
def test_a_batch_that_microbatches_would_not_add_up_to_is_not_cut(kind: type[nn.Module]) -> None:
    for found in run_team(few_steps, 2, kind, launch=launched("pipeline:stages=2,microbatches=4")):
        assert apart(found, few_steps(None, kind)) < 1e-5


@pytest.mark.parametrize(("workers", "shared"), SHARED)
def test_no_gradient_goes_where_the_model_lets_none_through(workers: int, shared: str) -> None:
    for found in run_team(few_steps, workers, Quiet, launch=launched(f"pipeline:stages=2,microbatches=4{shared}")):
        assert apart(found, few_steps(None, Quiet)) < 1e-5


def dropped_out(team: Team, seed: int) -> list[float]:
    torch.manual_seed(seed)
    model: Any = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(12, 12), nn.Dropout(0.4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = team.setup(model, optimizer)
    x = torch.linspace(-1, 1, 96).view(8, 12)
    losses = []
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    losses.append(float(torch.rand(())))  # the script's own random numbers are the same on every worker
    return losses


def test_dropout_draws_the_same_bits_from_the_same_seed_and_others_from_another() -> None:
    one, two, other = (
        run_team(dropped_out, 2, seed, launch=launched("pipeline:stages=2,microbatches=2")) for seed in (1, 1, 2)
    )
    assert one[0] == one[1] == two[0]
    assert one[0][:3] != other[0][:3]
    # Nor does it matter who runs a microbatch; but gradients are summed in another order.
    shared = run_team(dropped_out, 3, 1, launch=launched("pipeline:stages=2,microbatches=2,workers=1+2"))
    assert shared[0] == shared[1] == shared[2]
    assert apart(shared[0], one[0]) < 1e-5


# -- checkpoints -----------------------------------------------------------------------------------------------------


def saved(team: Team | None, path: str, steps: int, source: str | None = None) -> list[float]:
    """Train, from a checkpoint if there is one, and save; only the lead says so."""
    model: Any = made("chain", seed=9 if source else 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if team is not None:
        model, optimizer = team.setup(model, optimizer)
    if source and team is not None:
        team.load(source)
    elif source:
        content = torch.load(source, weights_only=True)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(24, 12, generator=generator), torch.randint(0, 61, (24,), generator=generator)
    losses = []
    for _ in range(steps):
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if team is None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    elif team.is_lead:
        team.save(path)
    return losses


def test_a_checkpoint_goes_from_any_split_to_any_other(tmp_path: Path) -> None:
    whole = saved(None, str(tmp_path / "plain"), 9)
    first = run_team(saved, 2, str(tmp_path / "two"), 3, launch=launched("pipeline:stages=2,microbatches=4"))[0]
    second = run_team(
        saved, 3, str(tmp_path / "three"), 2, str(tmp_path / "two"), launch=launched("pipeline:stages=3,microbatches=2")
    )[0]
    third = saved(None, str(tmp_path / "one"), 2, str(tmp_path / "three"))
    fourth = run_team(
        saved, 2, str(tmp_path / "last"), 2, str(tmp_path / "one"), launch=launched("pipeline:stages=2,microbatches=4")
    )[0]
    assert apart([*first, *second, *third, *fourth], whole) < 1e-5
    shared = launched("pipeline:stages=2,microbatches=4,workers=1+2")
    again = run_team(saved, 3, str(tmp_path / "shared"), 2, str(tmp_path / "two"), launch=shared)[0]
    after = saved(None, str(tmp_path / "plain again"), 2, str(tmp_path / "shared"))
    assert apart([*first, *again, *after], whole[:7]) < 1e-5
    content = torch.load(tmp_path / "last", weights_only=True)
    reference = torch.load(tmp_path / "plain", weights_only=True)
    assert content["model"].keys() == reference["model"].keys()
    assert content["optimizer"]["param_groups"] == reference["optimizer"]["param_groups"]
    assert content["optimizer"]["state"].keys() == reference["optimizer"]["state"].keys()
    for name, value in reference["model"].items():
        assert torch.allclose(content["model"][name], value, atol=1e-4), name
    all_reduce = launched("all-reduce")
    beside = run_team(saved, 2, str(tmp_path / "all"), 2, str(tmp_path / "three"), launch=all_reduce)[0]
    assert apart(beside, third) < 1e-5


def given_back(team: Team) -> tuple[float, float]:
    model: Any = made("chain")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.linspace(-1, 1, 96).view(8, 12)
    model, optimizer = team.setup(model, optimizer)
    model(x).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        before = float(model(x).sum())
    team.barrier()
    team.close()
    assert len(optimizer.state) == len(list(model.parameters()))
    return before, float(model(x).sum())


@pytest.mark.parametrize(("workers", "shared"), SHARED)
def test_after_closing_model_and_optimizer_are_plain_and_whole(workers: int, shared: str) -> None:
    launch = launched(f"pipeline:stages=2,microbatches=2{shared}")
    for before, after in run_team(given_back, workers, launch=launch):
        assert abs(before - after) < 1e-5


# -- what cannot be --------------------------------------------------------------------------------------------------


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if float(x.sum()) > 0 else x


def refused(team: Team, case: str) -> str:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    batch = 8
    if case == "traced":
        model = Deciding()
    elif case == "layers":
        model = nn.Sequential(nn.Linear(4, 4))
    elif case == "batch":
        batch = 3
    kind: Any = torch.optim.LBFGS if case == "lbfgs" else torch.optim.SGD
    x = torch.ones(batch, 4)
    try:
        loader: Any = DataLoader(TensorDataset(x), batch_size=batch)
        model, optimizer, loader = team.setup(model, kind(model.parameters(), lr=0.1), loader)
        if case == "rows":
            model(next(iter(loader))[0].t())
        output = model(x.requires_grad_() if case == "input" else x)
        losses: dict[str, Callable[[], Any]] = {
            "root": lambda: output.square().mean().sqrt(),
            "penalty": lambda: output.mean() + sum(p.square().sum() for p in model.parameters()),
            "place": lambda: output.mean().mul_(2),
            "picked": lambda: output[torch.arange(7, -1, -1)].mean() * 2,
            "means": lambda: output.square().mean(0).sum(),
            "sums": lambda: output.square().sum(0)[:3].mean() * 2,
            "mask": lambda: output[torch.arange(8) > 2].mean() * 2,
            "values": lambda: output[output > 0].mean() * 2,
        }
        loss = losses.get(case, output.mean)()
        loss.backward()
        if case == "twice":
            loss.backward()
        if case == "copy":
            again = copy.deepcopy(model)
            assert torch.equal(again[2].weight, model[2].weight)
            again(x)
        if case == "scaler":
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(model(x).mean()).backward()
            scaler.step(optimizer)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("traced", "the model cannot be traced by torch.export .*; write its forward without decisions"),
        ("layers", "the model can be cut into 1 part at most, as it has no more layers; 2 stages are too many"),
        ("batch", "a batch of 3 samples cannot be cut into 4 microbatches; .* write microbatches=3"),
        ("lbfgs", "LBFGS looks at all parameters at once"),
        ("input", "an input of the model requires a gradient"),
        ("root", "the loss applies 'sqrt' to a mean or sum over the batch, .* write microbatches=1"),
        ("means", "the loss takes means over samples and over other dimensions one after the other, .* microbatches=1"),
        ("sums", "the loss takes means over samples and over other dimensions one after the other, .* microbatches=1"),
        ("penalty", "the loss uses parameters besides the split model's output, .* use the optimizer's weight_decay"),
        ("place", "'mul_' changes a split model's output in place; use 'mul'"),
        ("picked", "the loss selects rows of the batch by index, .* write microbatches=1"),
        ("mask", "the loss selects values of a split model's output by a mask, .* by ignore_index"),
        ("rows", "called with a tensor of 4 rows, but the batch has 8 samples, .* be the first dimension"),
        ("values", "depends on its values, which do not exist before loss.backward"),
        ("twice", "backward was called a second time"),
        ("copy", "this is a copy of a model that is split over workers, which cannot be called"),
        ("scaler", "a GradScaler has one scale per worker"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence_on_every_worker(case: str, words: str) -> None:
    for message in run_team(refused, 2, case, launch=launched("pipeline:stages=2,microbatches=4")):
        assert re.search(words, message), message
        assert "\n" not in message


# -- when a stage fails ----------------------------------------------------------------------------------------------


def abandoned(team: Team, fault: str, path: str) -> str:
    """The last stage dies or hangs in its third step; the others say what they hear."""
    model: Any = made("chain")
    model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.linspace(-1, 1, 96).view(8, 12)
    last = team.rank == team.world_size - 1
    start = time.monotonic()
    try:
        for step in range(6):
            if last and step == 2:
                Path(path).write_text(fault)
                if fault == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                for rank in range(team.world_size - 1):
                    wait_until(Path(f"{path}-{rank}").exists, 50.0, f"the error of rank {rank}")
                return "slept"
            start = time.monotonic()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except TeamError as error:
        Path(f"{path}-{team.rank}").touch()
        return f"{type(error).__name__} {error.ranks} after {time.monotonic() - start:.1f} s"
    return "went on"


@pytest.mark.parametrize("stages", ["3", "2,workers=1+2", "2,workers=2+1"])
@pytest.mark.parametrize(("fault", "heard"), [("dies", "WorkerLost"), ("hangs", "TeamTimeout")])
def test_a_stage_that_is_gone_or_stuck_is_named_in_time(fault: str, heard: str, stages: str, tmp_path: Path) -> None:
    launch = Launch(strategy=f"pipeline:stages={stages},microbatches=2", timeouts=Timeouts(barrier=4.0, join=20.0))
    found: list[Any] = []
    if fault == "dies":
        with pytest.raises(AssertionError, match="rank 2 ended without a word"):
            found += run_team(report_to, 3, abandoned, fault, str(tmp_path / "struck"), str(tmp_path), launch=launch)
        found = [(tmp_path / f"heard-{rank}").read_text() for rank in (0, 1)]
    else:
        found = run_team(abandoned, 3, fault, str(tmp_path / "struck"), launch=launch)[:2]
    assert (tmp_path / "struck").read_text() == fault
    for said in found:
        kind, _, rest = said.partition(" ")
        # The first stage may hear of the middle one that has given up before it hears of the last.
        assert kind in (heard, "WorkerLost"), said
        assert float(rest.split("after ")[1].split()[0]) < allowed(8.0), said
    assert any(said.startswith(f"{heard} (2,)") for said in found), found


def report_to(team: Team, work: Any, fault: str, path: str, folder: str) -> str:
    said: str = work(team, fault, path)
    (Path(folder) / f"heard-{team.rank}").write_text(said)
    return said


# -- memory ----------------------------------------------------------------------------------------------------------


def resident(team: Team) -> int:
    """Bytes of shared memory that this worker has touched after some steps."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(512, 512) for _ in range(16)))
    model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    for _ in range(2):
        model(torch.ones(2, 512)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    # Parameters are mapped twice, shared and copy-on-write: the same pages.
    totals, mapping = {"s": 0, "p": 0}, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            mapping = line.split()[1][3] if "memfd:paceline" in line else ""
        elif mapping and line.startswith("Rss:"):
            totals[mapping] += int(line.split()[1]) * 1024
        elif mapping == "p" and line.startswith("Anonymous:"):
            assert line.split()[1] == "0", "a page was copied"
    return max(totals.values())


def test_a_worker_has_no_more_of_the_model_in_memory_than_its_part() -> None:
    found = run_team(resident, 4, launch=launched("pipeline:stages=4,microbatches=2"))
    whole = 16 * 512 * 513 * 4
    # The lead has written the first values of all of them; its pages are the others' own.
    assert all(size < 0.45 * whole for size in found[1:]), [size / whole for size in found]


def decided_by_loss(team: Team | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(12, 10, generator=torch.Generator().manual_seed(1)).double()
    y = torch.arange(12) % 4
    if team is not None:
        model, optimizer = team.setup(model, optimizer)
    seen = []
    for _ in range(4):
        optimizer.zero_grad()
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
        if loss.item() > 1.3:
            loss = 0.1 * loss
        seen += [loss.item(), float((out.argmax(1) == y).double().mean())]
        loss.backward()
        optimizer.step()
    return [*(value.clone() for value in model.state_dict().values()), torch.tensor(seen)]


def test_a_value_that_the_script_has_asked_for_may_still_be_part_of_the_loss() -> None:
    found = run_team(decided_by_loss, 2, launch=launched("pipeline:stages=2,microbatches=2"))[0]
    for ours, plain in zip(found, decided_by_loss(None), strict=True):
        torch.testing.assert_close(ours, plain)
