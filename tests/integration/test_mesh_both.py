"""A replica that is cut between its layers and inside them trains as one process would, under any policy."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.meshes import parts_amiss
from helpers.split_models import LENGTH, MODELS, adam, apart, launched, made, score, train, words
from helpers.teams import run_team
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Team, UsageError
from paceline.config import Slowness
from paceline.events import Event, Push, Update, decode

ONE = "mesh:data=1,pipeline=2,tensor=2,microbatches=2"
TWO = "mesh:data=2,pipeline=2,tensor=2,microbatches=2"
REPLICAS = [[0, 1, 2, 3], [4, 5, 6, 7]]


def losses(team: Team, kind: str, steps: int, batch: int, options: dict[str, Any]) -> list[float]:
    return train(team, kind, steps, batch=batch, **options)


@pytest.mark.parametrize("kind", ["transformer", "convnet", "chain"])
def test_losses_are_those_of_the_plain_model(kind: str) -> None:
    found = run_team(losses, 4, kind, 8, 20, {}, launch=launched(ONE), timeout=200)
    assert found[0] == found[1] == found[2] == found[3]
    assert apart(found[0], train(None, kind, 8, batch=20)) < 1e-5


@pytest.mark.parametrize(("kind", "sync"), [("small", "all-reduce"), ("chain", "sync")])
def test_losses_of_two_replicas_are_those_of_the_plain_model(kind: str, sync: str) -> None:
    launch = launched(f"{TWO},sync={sync}", servers=None if sync == "all-reduce" else "lead")
    found = run_team(losses, 8, kind, 8, 20, {}, launch=launch, timeout=300)
    for ranks in REPLICAS:
        assert all(found[rank] == found[ranks[0]] for rank in ranks)
    mean = [(first + second) / 2 for first, second in zip(found[0], found[4], strict=True)]
    assert apart(mean, train(None, kind, 8, batch=20)) < 1e-5


def test_workers_with_parts_of_a_layer_keep_one_order_though_gradients_come_at_different_times() -> None:
    # Stage 1 has the first gradient 20 ms after its first input, and one of its workers sends it 20 ms later: when
    # stage 0 has ended two passes, after 60 ms in all, only one of its workers has got it.
    paused = {rank: Slowness(length="constant(0.03)") for rank in (0, 1)} | {3: Slowness(length="constant(0.02)")}
    launch = launched("mesh:data=1,pipeline=2,tensor=2,microbatches=5", slow=paused)
    found = run_team(losses, 4, "chain", 6, 20, {}, launch=launch, timeout=100)
    assert apart(found[0], train(None, "chain", 6, batch=20)) < 1e-5


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zero-bubble"])
def test_every_schedule_gives_the_same_losses(schedule: str) -> None:
    found = run_team(losses, 4, "chain", 4, 20, {}, launch=launched(f"{ONE},schedule={schedule}"), timeout=100)
    assert apart(found[0], train(None, "chain", 4, batch=20)) < 1e-5


def test_sequence_parallelism_changes_no_loss() -> None:
    found = run_team(losses, 4, "small", 6, 20, {}, launch=launched(f"{ONE},sequence_parallel=true"), timeout=200)
    assert apart(found[0], train(None, "small", 6, batch=20)) < 1e-5


# -- a parameter server between replicas -----------------------------------------------------------------------------

Step = tuple[torch.Tensor, torch.Tensor, float]


def logged(team: Team, kind: str, steps: int) -> list[Step]:
    """What each step was made of, and its loss."""
    model: Any = made(kind)
    loader: Any = DataLoader(MODELS[kind][1](), batch_size=20, shuffle=True)
    model, optimizer, loader = team.setup(model, adam(model), loader)
    seen: list[Step] = []
    while len(seen) < steps:
        for x, y in loader:
            loss = score(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append((x, y, loss.item()))
            if len(seen) == steps:
                break
    return seen


def replayed(kind: str, events: list[Event], seen: dict[int, list[Step]]) -> tuple[int, float]:
    """Do every update in one plain process, each with the gradient of the version that its push was computed on.

    How many updates there were, and how far the furthest loss was from the one that was seen.
    """
    model = made(kind)
    optimizer = adam(model)
    versions = [copy.deepcopy(model.state_dict())]
    pushes = sorted((event for event in events if isinstance(event, Push)), key=lambda event: event.ticket)
    count: Counter[int] = Counter()
    made_of: dict[int, tuple[Push, Step]] = {}
    for push in pushes:
        made_of[push.ticket] = (push, seen[push.rank][count[push.rank]])
        count[push.rank] += 1
    furthest = 0.0
    updates = sorted((event for event in events if isinstance(event, Update)), key=lambda event: event.version)
    for update in updates:
        push, (x, y, told) = made_of[update.pushes[0]]
        model.load_state_dict(versions[push.version])
        loss = score(model(x), y)
        furthest = max(furthest, apart([told], [loss.item()]))
        loss.backward()
        model.load_state_dict(versions[-1])
        optimizer.step()
        optimizer.zero_grad()
        versions.append(copy.deepcopy(model.state_dict()))
    return len(updates), furthest


@pytest.mark.parametrize(
    ("kind", "sync"),
    [("convnet", "k-sync:k=1"), ("chain", "async"), ("small", "ssp:s=1")],
)
def test_every_update_is_what_a_plain_process_would_do_with_that_gradient(kind: str, sync: str, tmp_path: Path) -> None:
    launch = launched(f"{TWO},sync={sync}", servers="lead", folder=str(tmp_path))
    found = run_team(logged, 8, kind, 8, launch=launch, timeout=300)
    lines = [line for path in (tmp_path / "streams").iterdir() for line in path.read_bytes().splitlines()]
    events = [decode(line) for line in lines]
    assert parts_amiss(events, REPLICAS) == []
    updates, furthest = replayed(kind, events, {0: found[0], 4: found[4]})
    assert updates >= 8
    assert furthest < 1e-5


# -- models of any kind ----------------------------------------------------------------------------------------------


class Rich(nn.Module):
    """Tied weights that are cut in different stages, torch's own attention, and parts that are taken apart."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)
        self.head.weight = self.words.weight
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        self.gate, self.down = nn.Linear(16, 64), nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.words(x), src_mask=self.mask, is_causal=True)
        left, right = self.gate(x).chunk(2, -1)
        x = x + self.down(torch.einsum("blw,blw->blw", nn.functional.silu(left), right)[:, :, :])
        return self.head(self.norm(x))


RICH_PLAN = "plan=words:vocabulary+head:column"


def rich(team: Team | None, dropout: float, seed: int = 0) -> list[float]:
    torch.manual_seed(seed)
    model: Any = Rich(dropout)
    optimizer = adam(model)
    x, y = words(24).tensors
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=12)
    if team is not None:
        model, optimizer, loader = team.setup(model, optimizer, loader)
    seen: list[float] = []
    for _ in range(2):
        for x, y in loader:
            loss = score(model(x), y)
            loss.backward()
            norm = team.clip_grad_norm_(0.5) if team else nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            seen += [loss.item(), float(norm)]
    if not dropout:
        model.eval()
        with torch.no_grad():
            seen.append(float(score(model(x), y)))
    return seen


def test_attention_tied_weights_clipping_and_evaluation_are_as_in_plain_torch() -> None:
    found = run_team(rich, 4, 0.0, launch=launched(f"{ONE},{RICH_PLAN}"), timeout=200)
    assert found[0] == found[1] == found[2] == found[3]
    assert apart(found[0], rich(None, 0.0)) < 1e-5


def test_dropout_in_attention_draws_alike_where_all_have_the_same() -> None:
    found = run_team(rich, 4, 0.3, launch=launched(f"{ONE},{RICH_PLAN}"), timeout=200)
    assert found[0] == found[1] == found[2] == found[3]
    assert apart(found[0][:1], rich(None, 0.0)[:1]) > 1e-3


def dropped_out(team: Team, seed: int) -> list[float]:
    """Drops where each worker has a part, and where all have the same; there is one place where it can be cut."""
    torch.manual_seed(seed)
    layers = [
        part
        for _ in range(2)
        for part in (nn.Linear(12, 64), nn.Dropout(0.4), nn.Linear(64, 12), nn.Dropout(0.4, inplace=True))
    ]
    model: Any = nn.Sequential(*layers)
    loader: Any = DataLoader(MODELS["chain"][1](), batch_size=20)
    model, optimizer, loader = team.setup(model, adam(model), loader)
    seen = []
    for x, _ in loader:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def test_dropout_draws_the_same_bits_from_the_same_seed_and_others_from_another() -> None:
    one, again, other = (run_team(dropped_out, 4, seed, launch=launched(ONE), timeout=100) for seed in (1, 1, 2))
    assert one[0] == one[1] == one[2] == one[3] == again[0]
    assert one[0] != other[0]


# -- checkpoints -----------------------------------------------------------------------------------------------------


def resumed(team: Team | None, path: Path | None, save: Path | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Two steps, from a checkpoint if there is one; and all that is then in the model."""
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
    if team is not None:
        team.barrier()
        if save is not None and team.is_lead:
            team.save(save)
        team.barrier()
    return found, {name: value.clone() for name, value in model.state_dict().items()}


def test_a_checkpoint_goes_on_in_the_plain_model_and_in_any_other_split(tmp_path: Path) -> None:
    path = tmp_path / "both.pt"
    found = run_team(resumed, 4, None, path, launch=launched(ONE), timeout=100)
    first, plain = resumed(None, None, None)
    for told, state in found:
        assert apart(told, first) < 1e-5
        assert state.keys() == plain.keys()
        for name, value in plain.items():  # with the statistics of batch norm, whole on every worker
            if name != "0.bias":  # what batch norm takes away has a gradient of rounding errors, which Adam enlarges
                torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-3)
    then, _ = resumed(None, path, None)
    for spec, workers in (
        (ONE, 4),
        ("mesh:data=1,tensor=2", 2),
        ("pipeline:stages=2,microbatches=2", 2),
    ):
        assert apart(run_team(resumed, workers, path, None, launch=launched(spec), timeout=100)[0][0], then) < 1e-5


def test_a_checkpoint_of_a_parameter_server_is_the_plain_models(tmp_path: Path) -> None:
    path = tmp_path / "both.pt"
    run_team(resumed, 8, None, path, launch=launched(f"{TWO},sync=sync", servers="lead"), timeout=200)
    content = torch.load(path, weights_only=True)
    model = made("convnet")
    model.load_state_dict(content["model"])
    optimizer = adam(model)
    optimizer.load_state_dict(content["optimizer"])
    shapes = [state["exp_avg"].shape for state in optimizer.state.values()]
    assert shapes == [parameter.shape for parameter in model.parameters()]


def given_back(team: Team) -> bool:
    model: Any = made("convnet")
    loader: Any = DataLoader(MODELS["convnet"][1](), batch_size=20)
    split, optimizer, loader = team.setup(model, adam(model), loader)
    for x, y in loader:
        score(split(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    team.barrier()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    team.close()
    plain = made("convnet")
    plain.load_state_dict(before)
    plain.eval()
    model.eval()
    return torch.equal(model(x), plain(x))


def test_close_gives_the_plain_model_back() -> None:
    assert all(run_team(given_back, 4, launch=launched(ONE), timeout=100))


# -- what cannot be --------------------------------------------------------------------------------------------------


class Deciding(nn.Module):
    """Cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 64), nn.Linear(64, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)) if float(x.sum()) > -1e9 else x


def refused(team: Team, kind: str) -> str:
    """One sentence, on every worker."""
    model: Any = Deciding() if kind == "deciding" else nn.Sequential(nn.Linear(12, 7), nn.Linear(7, 7))
    loader: Any = DataLoader(MODELS["chain"][1](), batch_size=8)
    try:
        model, _, loader = team.setup(model, adam(model), loader)
        for x, _ in loader:
            model(x).sum().backward()
    except UsageError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [("deciding", "cannot be traced by torch.export"), ("odd", "nothing in this model can be split over 2 workers")],
)
def test_what_cannot_be_is_told_in_one_sentence(kind: str, sentence: str) -> None:
    for told in run_team(refused, 4, kind, launch=launched(ONE), timeout=100):
        assert sentence in told
        assert "\n" not in told
