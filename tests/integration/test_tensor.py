"""A model that is split inside its layers trains as one process would, whatever the model and the loop."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.load import allowed
from helpers.split_models import MODELS, WORDS, adam, apart, launched, made, score, train
from helpers.teams import run_team
from torch import nn
from torch.utils.data import DataLoader

from paceline import Team, TeamError, Tensor, UsageError


def losses(team: Team, kind: str, steps: int, options: dict[str, Any]) -> list[float]:
    return train(team, kind, steps, **options)


def encoder() -> nn.Module:
    """torch's own attention, between layers that make it a model of words."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(WORDS, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), _Head())


class _Head(nn.Linear):
    """Not what torch has a Linear be, so it is left alone."""

    def __init__(self) -> None:
        super().__init__(16, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 0.5


MODELS.setdefault("encoder", (encoder, MODELS["transformer"][1]))


@pytest.mark.parametrize(("kind", "workers"), [("transformer", 2), ("convnet", 2), ("convnet", 4), ("encoder", 4)])
def test_losses_are_those_of_the_plain_model(kind: str, workers: int) -> None:
    found = run_team(losses, workers, kind, 20, {}, launch=launched(f"tensor:degree={workers}"))
    assert apart(found[0], train(None, kind, 20)) < 1e-5
    assert all(other == found[0] for other in found)


@pytest.mark.parametrize("kind", ["transformer", "encoder"])
def test_sequence_parallelism_changes_no_loss(kind: str) -> None:
    found = run_team(losses, 2, kind, 8, {}, launch=launched("tensor:degree=2,sequence_parallel=true"))
    assert apart(found[0], train(None, kind, 8)) < 1e-5


def test_a_plan_of_the_users_changes_no_loss() -> None:
    plan = {
        "blocks.0.*": "replicated",
        "blocks.1.attend": "column",
        "blocks.1.join": "replicated",
        "words": "replicated",
    }
    found = run_team(losses, 2, "transformer", 6, {}, launch=launched(str(Tensor(degree=2, plan=plan))))
    assert apart(found[0], train(None, "transformer", 6)) < 1e-5


# -- loops of all kinds ----------------------------------------------------------------------------------------------


def full_loop(team: Team | None, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Clipping, a scheduler, accumulation and evaluation."""
    model: Any = made("transformer")
    optimizer = adam(model)
    loader: Any = DataLoader(MODELS["transformer"][1](), batch_size=8)
    if team is not None:
        model, optimizer, loader = team.setup(model, optimizer, loader)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    seen = []
    for number, (x, y) in enumerate(loader):
        score(model(x), y).backward()
        if number % 2 == 0:
            continue
        norm = team.clip_grad_norm_(0.5) if team else nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            seen += [float(norm), float(score(model(x), y))]
        model.train()
    if team is not None:
        team.save(folder / "split.pt")
    return seen, {name: value.clone() for name, value in model.state_dict().items()}


def test_clipping_schedulers_accumulation_and_evaluation_are_as_in_plain_torch(tmp_path: Path) -> None:
    found = run_team(full_loop, 2, tmp_path, launch=launched("tensor:degree=2"))
    seen, state = full_loop(None, tmp_path)
    assert apart(found[0][0], seen) < 1e-5
    assert found[1][0] == found[0][0]
    for name, value in state.items():
        torch.testing.assert_close(found[1][1][name], value, rtol=1e-3, atol=1e-3)


class Dropping(nn.Module):
    """Drops once where each worker has a part, and once where all have the same."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.inside, self.outside = nn.Linear(12, 64), nn.Linear(64, WORDS), Mask(), Mask()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outside(self.down(self.inside(self.up(x))))


class Mask(nn.Dropout):
    """Remembers what it dropped: of this worker's part, where there are parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.dropped = (getattr(out, "local", out) == 0).detach()
        return out


def dropped(team: Team) -> list[list[bool]]:
    model: Any = Dropping()
    loader: Any = DataLoader(MODELS["chain"][1](), batch_size=8)
    split, optimizer, loader = team.setup(model, adam(model), loader)
    for x, y in loader:
        score(split(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model.inside.dropped.flatten().tolist(), model.outside.dropped.flatten().tolist()]


def test_dropout_draws_alike_where_all_have_the_same_and_apart_where_they_do_not() -> None:
    (inside, outside), (inside_too, outside_too) = run_team(dropped, 2, launch=launched("tensor:degree=2"))
    assert len(inside) == 8 * 32
    assert inside != inside_too
    assert outside == outside_too
    assert any(outside)


def evaluated(team: Team) -> list[float]:
    """One worker has drawn a random number more than the other when a shuffled loader is evaluated."""
    model: Any = made("chain")
    loader: Any = DataLoader(MODELS["chain"][1](), batch_size=8, shuffle=True)
    model, optimizer, loader = team.setup(model, adam(model), loader)
    for x, y in loader:
        score(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    if team.rank:
        torch.rand(1)
    model.eval()
    with torch.no_grad():
        found = [float(score(model(x), y)) * len(x) for x, y in loader]
        rows = loader.dataset.tensors
        return [sum(found) / len(rows[0]), float(score(model(rows[0]), rows[1]))]


@pytest.mark.parametrize(
    "strategy", ["tensor:degree=2", "pipeline:stages=2", "mesh:data=1,tensor=2", "mesh:data=1,tensor=2,sync=sync"]
)
def test_all_workers_of_a_model_evaluate_the_same_batches(strategy: str) -> None:
    launch = launched(strategy, servers="lead" if "sync=" in strategy else None)
    for by_batch, at_once in run_team(evaluated, 2, launch=launch):
        assert by_batch == pytest.approx(at_once, rel=1e-5)


# -- checkpoints -----------------------------------------------------------------------------------------------------


def resumed(team: Team | None, path: Path | None, save: Path | None) -> list[float]:
    """Two steps, from a checkpoint if there is one."""
    model: Any = made("convnet")
    optimizer = adam(model)
    loader: Any = DataLoader(MODELS["convnet"][1](), batch_size=20)
    if team is not None:
        model, optimizer, loader = team.setup(model, optimizer, loader)
    if path is not None and team is not None:
        team.load(path)
    elif path is not None:
        content = torch.load(path, weights_only=True)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
    found = []
    for x, y in loader:
        loss = score(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    if save is not None and team is not None and team.is_lead:
        team.save(save)
    return found


def test_a_checkpoint_goes_on_in_the_plain_model_and_in_another_split(tmp_path: Path) -> None:
    path = tmp_path / "two.pt"
    run_team(resumed, 2, None, path, launch=launched("tensor:degree=2"))
    plain = resumed(None, path, None)
    assert apart(run_team(resumed, 4, path, None, launch=launched("tensor:degree=4"))[3], plain) < 1e-5
    assert apart(run_team(resumed, 2, path, None, launch=launched("pipeline:stages=2"))[0], plain) < 1e-5


class _Squared(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x)
        return x.clamp(min=0) ** 2

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = context.saved_tensors
        return gradient * 2 * x.clamp(min=0)


class _Scored(nn.Module):
    """Takes its targets, has a gradient of its own in its middle, and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(12, 32), nn.Linear(32, 12), nn.Linear(12, WORDS)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return score(self.head(self.down(_Squared.apply(self.up(inputs)))), targets)


def own_losses(team: Team | None, named: bool) -> list[float]:
    torch.manual_seed(0)
    model: Any = _Scored()
    optimizer: Any = adam(model)
    data: Any = MODELS["chain"][1]()
    if named:
        data = [{"targets": y, "inputs": x} for x, y in data]
    loader: Any = DataLoader(data, batch_size=16)
    if team is not None:
        model, optimizer, loader = team.setup(model, optimizer, loader)
    found = []
    for _ in range(2):
        for batch in loader:
            loss = model(**batch) if named else model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


@pytest.mark.parametrize("named", [False, True])
def test_a_gradient_of_ones_own_and_a_loss_inside_the_model_are_as_in_plain_torch(named: bool) -> None:
    for found in run_team(own_losses, 2, named, launch=launched("tensor:degree=2")):
        assert apart(found, own_losses(None, named)) < 1e-5


def test_close_gives_the_plain_model_back() -> None:
    def work(team: Team) -> bool:
        model: Any = made("convnet")
        loader: Any = DataLoader(MODELS["convnet"][1](), batch_size=20)
        split, optimizer, loader = team.setup(model, adam(model), loader)
        for x, y in loader:
            score(split(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        team.close()
        plain = made("convnet")
        plain.load_state_dict(before)
        same = all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True))
        shapes = [p.shape for p in model.parameters()] == [p.shape for p in plain.parameters()]
        model.eval()
        plain.eval()
        return same and shapes and torch.equal(model(x), plain(x))

    assert all(run_team(work, 2, launch=launched("tensor:degree=2")))


# -- what cannot be --------------------------------------------------------------------------------------------------


def refused(team: Team, kind: str) -> str:
    """One sentence, on every worker."""
    model: Any = nn.Linear(7, 7) if kind == "odd" else made("chain")
    loader: Any = DataLoader(MODELS["chain"][1](), batch_size=4)
    optimizer: Any = torch.optim.LBFGS(model.parameters()) if kind == "lbfgs" else adam(model)
    options: dict[str, Any] = {"gradients": "visible"} if kind == "visible" else {}
    try:
        team.setup(model, optimizer, loader, **options)
    except UsageError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("odd", "could not be run on its loader's first batch"),
        ("odd", "team.setup(..., example_inputs=(x,))"),
        ("lbfgs", "LBFGS is not known to treat every element by itself"),
        ("visible", "it must be 'local'"),
    ],
)
def test_what_cannot_be_is_told_in_one_sentence(kind: str, sentence: str) -> None:
    for told in run_team(refused, 2, kind, launch=launched("tensor:degree=2")):
        assert sentence in told
        assert "\n" not in told


def killed(team: Team) -> tuple[str, float]:
    """The second worker dies in the middle; what the first one hears of it, and when."""
    model: Any = made("transformer")
    loader: Any = DataLoader(MODELS["transformer"][1](), batch_size=4)
    model, optimizer, loader = team.setup(model, adam(model), loader)
    start = time.monotonic()
    try:
        for number, (x, y) in enumerate(loader):
            if number == 3 and team.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            start = time.monotonic()
            score(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    except TeamError as error:
        return type(error).__name__, time.monotonic() - start
    return "nothing", 0.0


def test_a_worker_that_dies_is_noticed() -> None:
    with pytest.raises(AssertionError, match="rank 1 ended without a word"):
        run_team(_killed_and_told, 2, launch=launched("tensor:degree=2"))


def _killed_and_told(team: Team) -> None:
    kind, seconds = killed(team)
    assert kind == "WorkerLost"
    assert seconds < allowed(5)
