"""A mesh of whole replicas on several machines: sharded over all workers, and the same numbers as in one process.

Machines are pretended in most of these; at the end there are real separate hosts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import runpy
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # any optimizer imports it, which takes seconds: once here, not once in every fork
import torch.distributed.fsdp  # so does what shards
import torch.distributed.tensor
from helpers.hosts import hosts
from helpers.load import allowed
from helpers.machines import Failure, Spread
from helpers.split_models import apart as losses_apart
from helpers.split_models import made, score
from helpers.teams import run_spread, run_team
from helpers.training import BATCH, Values, adafactor, adamw, apart, build, data, loop, plain, same_bits, sgd, values
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from paceline import Team, TeamError, UsageError
from paceline.config import Launch, Timeouts
from paceline.errors import Mismatch, TeamTimeout, WorkerLost
from paceline.events import Compute, Reduce, Update, read
from paceline.events.summary import merge
from paceline.strategies.all_reduce import AllReduceTrainer
from paceline.strategies.blocks import blocks
from paceline.strategies.fully_sharded import FullyShardedTrainer

torch.set_num_threads(1)
ROOT = Path(__file__).parents[2]
SOON = 6.0
"""Seconds in which a death must be known, on a busy machine."""


def sharded(workers: int = 4, barrier: float = 20.0, **more: Any) -> Launch:
    return Launch(strategy=f"mesh:data={workers}", timeouts=Timeouts(join=30.0, barrier=barrier), **more)


# -- the same numbers ------------------------------------------------------------------------------------------------


def rprop(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Rprop(parameters, lr=0.001)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, fused=True)


def learn(team: Team, make: Any, epochs: int) -> Values:
    model: Any = build(seed=team.rank)  # every worker begins elsewhere; the lead's values must count
    loader: Any = DataLoader(data(), batch_size=BATCH)
    model, optimizer, loader = team.setup(model, make(model.parameters()), loader)
    assert isinstance(team._trainer, FullyShardedTrainer)
    loop(model, optimizer, loader, epochs)
    team.close()
    return values(model)


@pytest.mark.parametrize(("places", "make"), [("aabb", adamw), ("aaab", sgd), ("abab", rprop), ("ab", fused)])
def test_learns_what_one_process_learns(places: str, make: Any) -> None:
    results = run_spread(learn, places, make, 2, launch=sharded(len(places)))
    assert apart(results[0], plain(make, torch.float64, 2)) < 1e-12
    assert all(same_bits(results[0], other) for other in results[1:])


def perceptron(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 4)).double()


def everything(team: Team | None) -> tuple[Values, list[float], list[int], list[float]]:
    """Clipping, accumulating, a scheduler, evaluation in the middle of a step, and a last batch that is too small."""
    model: Any = perceptron(team.rank if team else 0)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    held = data(samples=2 * 24 + 2)  # of the last batch two workers have one sample each, and the others none
    loader: Any = DataLoader(held, batch_size=24)
    if team:
        model, optimizer, loader = team.setup(model, optimizer, loader)
    norms, counts, scores = [], [], []
    for _ in range(2):
        for number, (x, y) in enumerate(loader):
            counts.append(len(y))
            if team and number == 1:  # summed with the last one, of which everybody's part has another weight
                with team.step(accumulate=True):
                    cross_entropy(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                continue
            cross_entropy(model(x), y).backward()
            if number == 1:
                continue
            model.eval()
            with torch.no_grad():
                scores.append(float(model(held.tensors[0]).sum()))
            model.train()
            norms.append(
                float(team.clip_grad_norm_(0.3) if team else nn.utils.clip_grad_norm_(model.parameters(), 0.3))
            )
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    if team:
        team.close()
    return values(model), norms, counts, scores


def test_all_that_a_loop_may_do_gives_the_same_numbers() -> None:
    alone = everything(None)
    for found in run_spread(everything, "aabb", launch=sharded()):
        assert apart(found[0], alone[0]) < 1e-12
        assert found[1] == pytest.approx(alone[1], rel=1e-12)
        assert found[2] == [6, 6, 1] * 2  # one that has no sample gets a copy, so that all compute in every step
        assert found[3] == pytest.approx(alone[3], rel=1e-12)


def normal(team: Team | None, synchronised: bool) -> tuple[Values, Values]:
    """With batch norm over the team; the last round has samples for two of three workers."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(10, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 4)).double()
    optimizer: Any = sgd(model.parameters())
    loader: Any = DataLoader(data(samples=26), batch_size=12)
    if team:
        model, optimizer, loader = team.setup(model, optimizer, loader, sync_batch_norm=synchronised)
    for x, y in loader:
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    if team:
        team.close()
    return values(model), list(model[1].buffers())


def test_batch_norm_over_the_team_counts_every_sample_once() -> None:
    alone = normal(None, False)
    for found in run_spread(normal, "aab", True, launch=sharded(3)):
        assert apart(found[0], alone[0]) < 1e-10
        assert apart(found[1][:2], alone[1][:2]) < 1e-10


# -- what each worker has --------------------------------------------------------------------------------------------


def held(team: Team) -> tuple[int, int, int, int]:
    """Elements that this worker keeps of parameters and optimizer state, and most of them that were whole at once."""
    model: Any = made("transformer")
    optimizer: Any = torch.optim.AdamW(model.parameters())
    total = sum(parameter.numel() for parameter in model.parameters())
    model, optimizer, loader = team.setup(model, optimizer, DataLoader(tokens(), batch_size=16))
    most = 0

    def count(*_: Any) -> None:
        nonlocal most
        gathered = {id(one): one.numel() for one in model.parameters() if not is_sharded(one)}
        most = max(most, sum(gathered.values()))

    for block in model.blocks:
        block.before.register_forward_hook(count)
    for x, y in loader:
        score(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(is_sharded(parameter) for parameter in model.parameters())
    own = sum(parameter.to_local().numel() for parameter in model.parameters())
    state = sum(value.numel() for entry in optimizer.state.values() for value in entry.values() if value.dim())
    return total, own, state, most


def is_sharded(parameter: Any) -> bool:
    return isinstance(parameter, torch.distributed.tensor.DTensor)


def tokens() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 61, (32, 12), generator=generator)
    return TensorDataset(x, (x * 7 + 3) % 61)


def test_every_worker_keeps_its_part_and_gathers_block_by_block() -> None:
    found = run_spread(held, "aabb", launch=sharded())
    total = found[0][0]
    assert sum(own for _, own, _, _ in found) == total
    for _, own, state, most in found:
        assert own < 1.1 * total / 4
        assert state == 2 * own
        assert most < 0.6 * total  # the two ends and one of three blocks


def test_blocks_are_members_of_lists() -> None:
    model: Any = made("transformer")
    assert blocks(model) == list(model.blocks)
    stack = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 2))
    assert blocks(stack) == [stack[0][0], stack[0][2], stack[0], stack[1]]  # type: ignore[index]
    shared = nn.ModuleDict({"list": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), "head": nn.Linear(4, 4)})
    shared["head"].weight = shared["list"][0].weight  # type: ignore[index]
    assert blocks(shared) == [shared["list"][1]]  # type: ignore[index]


# -- checkpoints -----------------------------------------------------------------------------------------------------


def run_plain(model: nn.Module, optimizer: Any, steps: int) -> None:
    x, y = tokens().tensors
    for _ in range(steps):
        score(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def resumed(team: Team, folder: str) -> None:
    """Go on after what one process saved, in two ways, and save."""
    content = torch.load(f"{folder}/plain.pt", weights_only=True)
    model: Any = made("transformer", seed=7).double()
    optimizer: Any = adamw(model.parameters())
    optimizer.load_state_dict(content["optimizer"])
    model.load_state_dict(content["model"])
    model, optimizer, loader = team.setup(model, optimizer, DataLoader(tokens(), batch_size=32))
    loop_once(model, optimizer, loader)
    team.save(f"{folder}/carried.pt", epochs=3)
    assert team.load(f"{folder}/plain.pt") == {"epochs": 2}
    loop_once(model, optimizer, loader)
    team.save(f"{folder}/loaded.pt")
    whole, state = model.state_dict(), optimizer.state_dict()
    team.barrier()
    saved = torch.load(f"{folder}/loaded.pt", weights_only=True)
    assert whole.keys() == saved["model"].keys()
    assert all(torch.equal(whole[name], saved["model"][name]) for name in whole)
    assert state["state"].keys() == saved["optimizer"]["state"].keys()
    team.close()
    assert type(model).__name__ == "Transformer"
    assert model.head.weight is model.words.weight
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    before = values(model)
    run_plain(model, optimizer, 1)  # plain again, and a step counts
    assert not same_bits(before, values(model))
    assert not distributed.is_initialized()


def loop_once(model: Any, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        score(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_checkpoints_are_the_plain_models(tmp_path: Path) -> None:
    model = made("transformer").double()
    optimizer = adamw(model.parameters())
    run_plain(model, optimizer, 2)
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "version": 2, "epochs": 2},
        tmp_path / "plain.pt",
    )
    run_spread(resumed, "aabb", str(tmp_path), launch=sharded())
    run_plain(model, optimizer, 1)
    for name in ("carried", "loaded"):
        content = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        assert content["version"] == (1 if name == "carried" else 3)
        found = made("transformer", seed=9).double()
        found.load_state_dict(content["model"])
        assert apart(values(found), values(model)) < 1e-11
        moments = [entry["exp_avg"] for entry in content["optimizer"]["state"].values()]
        theirs = [entry["exp_avg"] for entry in optimizer.state_dict()["state"].values()]
        assert apart(moments, theirs) < 1e-11
        again = adamw(found.parameters())
        again.load_state_dict(content["optimizer"])
        run_plain(found, again, 1)


# -- besides ---------------------------------------------------------------------------------------------------------


def recorded(team: Team) -> None:
    learn(team, adamw, 1)


def test_events_tell_computing_from_exchanging(tmp_path: Path) -> None:
    run_spread(recorded, "aabb", launch=sharded(folder=str(tmp_path)))
    summary = merge(tmp_path, 4)
    assert (summary.updates, summary.minibatches, summary.strategy) == (5, 20, "mesh:data=4")
    assert sum(worker.samples for worker in summary.workers.values()) == 205
    events = list(read(tmp_path / "events.jsonl"))
    for rank, worker in summary.workers.items():
        assert worker.computing > 0
        assert worker.communicating > 0
        own = [event for event in events if event.rank == rank]
        steps = [event for event in own if isinstance(event, Compute | Reduce | Update)]
        assert [type(event) for event in steps] == [Compute, Reduce, Update] * 5
        for one, other in itertools.pairwise(steps):
            assert one.start + one.seconds <= other.start + 1e-4
    text = json.loads((tmp_path / "summary.json").read_text())
    assert len(text["workers"]) == 4


def with_a_group_of_its_own(team: Team) -> bool:
    place = {"rank": team.rank, "world_size": team.world_size}
    store = distributed.PrefixStore("own", team._members.store)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, **place)
    learn(team, adamw, 1)
    return distributed.is_initialized()


def test_a_group_that_the_script_has_made_stays_the_scripts() -> None:
    assert run_spread(with_a_group_of_its_own, "ab", launch=sharded(2)) == [True, True]


def on_one_machine(team: Team) -> str:
    model = perceptron()
    team.setup(model, adamw(model.parameters()))
    return type(team._trainer).__name__


def test_on_one_machine_versions_in_shared_memory_are_all_it_needs() -> None:
    assert run_team(on_one_machine, 2, launch=sharded(2)) == [AllReduceTrainer.__name__] * 2


# -- refusals --------------------------------------------------------------------------------------------------------


def refused(team: Team, kind: str) -> str:
    model: Any = perceptron()
    make: Any = adafactor if kind == "optimizer" else adamw
    options: dict[str, Any] = {"gradients": "visible"} if kind == "visible" else {}
    if kind == "scalar":
        model.scale = nn.Parameter(torch.tensor(1.0))
    if kind == "dtype":
        model[0].float()
    with pytest.raises(UsageError) as error:
        model, optimizer = team.setup(model, make(model.parameters()), **options)
        if kind == "scaler":
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            scaler.scale(model(torch.ones(2, 10).double()).sum()).backward()
            scaler.step(optimizer)
    return str(error.value)


@pytest.mark.parametrize(
    ("strategy", "kind", "said"),
    [
        ("mesh:data=4", "visible", "it must be 'local'"),
        ("mesh:data=4", "optimizer", "Adafactor is not known to treat every element by itself"),
        ("mesh:data=4", "scalar", "the parameter 'scale' is a scalar"),
        ("mesh:data=4", "dtype", "the model is trained in float32 and float64"),
        ("mesh:data=4", "scaler", "GradScaler looks at this worker's part of the gradient only"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(strategy: str, kind: str, said: str) -> None:
    launch = Launch(strategy=strategy, timeouts=Timeouts(join=30.0, barrier=20.0))
    for message in run_spread(refused, "aabb", kind, launch=launch):
        assert said in message
        assert "\n" not in message


# -- faults ----------------------------------------------------------------------------------------------------------


def struck(team: Team, victim: int, how: str) -> tuple[str, str, tuple[int, ...], float]:
    """Train until something happens to the victim; what the others were told, and how soon."""
    model: Any = made("transformer")
    loader: Any = DataLoader(tokens(), batch_size=8)
    model, optimizer, loader = team.setup(model, adamw(model.parameters()), loader)
    loop_once(model, optimizer, loader)
    team.barrier()
    start = time.monotonic()
    count = 0

    def strike(*_: Any) -> None:
        nonlocal count
        count += 1
        if team.rank == victim and count == 5:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "stuck":
                time.sleep(9.0)
            else:
                raise ValueError("of its own")

    model.blocks[1].register_forward_hook(strike)
    try:
        for _ in range(100):
            loop_once(model, optimizer, loader)
    except TeamError as error:
        return type(error).__name__, str(error), error.ranks, time.monotonic() - start
    return "nothing", "", (), time.monotonic() - start


@pytest.mark.parametrize("victim", [3, 2, 0], ids=["a worker", "a lead", "the lead"])
def test_a_death_is_known_everywhere(victim: int) -> None:
    results = run_spread(struck, "aabb", victim, "killed", launch=sharded(barrier=15.0), may_die=[victim])
    for rank, result in enumerate(results):
        if rank != victim:
            kind, message, ranks, seconds = result
            assert kind == WorkerLost.__name__, message
            assert ranks == (victim,)
            assert f"rank {victim} on 127.0.0.1 " in message
            assert seconds < allowed(SOON)


def test_a_worker_whose_script_fails_is_named() -> None:
    results = run_spread(struck, "aabb", 1, "failed", launch=sharded(), may_die=[1])
    for rank, result in enumerate(results):
        if rank != 1:
            kind, message, ranks, seconds = result
            assert kind == WorkerLost.__name__, message
            assert ranks == (1,)
            assert seconds < allowed(SOON)


def test_a_worker_that_is_stuck_is_named() -> None:
    results = run_spread(struck, "aabb", 1, "stuck", launch=sharded(barrier=4.0), may_die=[1])
    for rank, result in enumerate(results):
        if rank != 1:
            kind, message, ranks, _ = result
            assert kind == TeamTimeout.__name__, message
            assert ranks == (1,)


def saved_by_the_lead_alone(team: Team, folder: str) -> tuple[str, str]:
    model: Any = made("transformer")
    loader: Any = DataLoader(tokens(), batch_size=8)
    model, optimizer, loader = team.setup(model, adamw(model.parameters()), loader)
    try:
        if team.is_lead:
            team.save(f"{folder}/part.pt")
        loop_once(model, optimizer, loader)
    except TeamError as error:
        with contextlib.suppress(TeamError):  # from those who were not told of it by what shards the model
            team.close()
        return type(error).__name__, str(error)
    return "nothing", ""


def test_what_needs_all_and_is_called_by_one_is_a_mismatch(tmp_path: Path) -> None:
    for kind, message in run_spread(saved_by_the_lead_alone, "aabb", str(tmp_path), launch=sharded(barrier=3.0)):
        assert kind == Mismatch.__name__, message
        assert "all workers must do the same" in message
    assert not list(tmp_path.iterdir())


# -- real hosts ------------------------------------------------------------------------------------------------------


@functools.cache
def example() -> tuple[Any, Any, Any]:
    """A small transformer, its samples and its loss."""
    found = runpy.run_path(str(ROOT / "examples" / "transformer.py"))
    return functools.partial(found["Transformer"], 48, 2, 4, 32), found["Source"](32, 40_000), found["loss_of"]


def losses(team: Team | None, kind: str) -> list[float]:
    """Of eight steps: a perceptron, or the transformer of the examples on its own data, both small."""
    torch.manual_seed(team.rank if team else 0)
    if kind == "perceptron":
        model: Any = nn.Sequential(
            *(part for _ in range(4) for part in (nn.Linear(24, 24), nn.Tanh())), nn.Linear(24, 4)
        )
        x = torch.randn(200, 24, generator=torch.Generator().manual_seed(3))
        samples: Any = TensorDataset(x, x[:, :4].argmax(1))
        score_of: Any = cross_entropy
    else:
        make, samples, score_of = example()
        model = make()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loader: Any = DataLoader(samples, batch_size=16, drop_last=True)
    if team:
        model, optimizer, loader = team.setup(model, optimizer, loader)
    found: list[float] = []
    while len(found) < 8:
        for x, y in itertools.islice(loader, 8 - len(found)):
            loss = score_of(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


@pytest.mark.parametrize("kind", ["perceptron", "transformer"])
def test_losses_over_hosts_are_those_of_the_plain_model(kind: str) -> None:
    plain = losses(None, kind)
    with hosts(2) as made_hosts, Spread(losses, made_hosts, 2, kind, strategy="mesh:data=4") as team:
        found = team.values(100.0)
    mean = [sum(step) / 4 for step in zip(*found, strict=True)]
    assert losses_apart(mean, plain) < 1e-5


def test_a_death_on_another_host_is_named_with_its_address() -> None:
    with hosts(2) as made_hosts, Spread(struck, made_hosts, 2, 3, "killed", strategy="mesh:data=4") as team:
        results = team.results()
    assert isinstance(results[3], Failure)
    for kind, message, ranks, seconds in results[:3]:
        assert kind == WorkerLost.__name__, message
        assert ranks == (3,)
        assert f"rank 3 on {made_hosts[1].address}" in message
        assert seconds < allowed(SOON)
