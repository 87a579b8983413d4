"""A pipeline whose stages are on different hosts trains as one process does; each worker has its own stages only."""

from __future__ import annotations

import copy
import itertools
import json
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.forks import starting
from helpers.hosts import Host, hosts
from helpers.load import allowed
from helpers.machines import Failure, Spread
from helpers.split_models import (
    MODELS,
    adam,
    apart,
    launched,
    learned,
    made,
    same_values,
    score,
    train,
    words,
)
from helpers.support import TORCHRUN, write_script
from helpers.teams import run_spread
from torch import nn
from torch.utils.data import DataLoader

from paceline import Team, UsageError
from paceline.events import Event, Pass, Stages, StageTransfer
from paceline.report.timeline import timeline


@pytest.fixture(scope="module")
def two() -> Iterator[list[Host]]:
    with hosts(2) as made:
        yield made


def losses(team: Team, kind: str, steps: int) -> list[float]:
    assert len(team._members.machines) == 2
    return train(team, kind, steps, batch=20)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("transformer", "pipeline:stages=4,microbatches=4"),
        ("convnet", "pipeline:stages=4,microbatches=1"),
        ("small", "pipeline:stages=3,workers=1+2+1,microbatches=4"),
    ],
)
def test_losses_are_those_of_the_plain_model(kind: str, strategy: str, two: list[Host]) -> None:
    with Spread(losses, two, 2, kind, 20, strategy=strategy) as team:
        found = team.values(120.0)
    assert all(one == found[0] for one in found)
    assert apart(found[0], train(None, kind, 20, batch=20)) < 1e-5


@pytest.mark.parametrize(
    ("places", "strategy"),
    [
        ("abab", "pipeline:stages=4,microbatches=4,schedule=gpipe"),
        ("ab", "pipeline:stages=2,microbatches=4,schedule=interleaved,chunks=2"),
        ("ab", "pipeline:stages=2,microbatches=4,schedule=zero-bubble"),
        ("abc", "pipeline:stages=3,microbatches=5,schedule=zero-bubble-2p"),
        ("aab", "pipeline:stages=2,workers=1+2,microbatches=4"),
    ],
)
def test_any_layout_of_workers_on_machines_will_do(places: str, strategy: str) -> None:
    found = run_spread(train, places, "small", 4, launch=launched(strategy))
    assert all(one == found[0] for one in found)
    assert apart(found[0], train(None, "small", 4)) < 1e-5


# -- state -----------------------------------------------------------------------------------------------------------


def test_the_lead_saves_the_plain_model_and_a_checkpoint_goes_from_split_to_split(
    two: list[Host], tmp_path: Path
) -> None:
    path, later = tmp_path / "pipeline.pt", tmp_path / "tensor.pt"
    with Spread(learned, two, 2, None, path, strategy="pipeline:stages=4,microbatches=4") as team:
        first = team.values(120.0)
    assert all(same_values(first[0], other, 0.0) for other in first)
    assert same_values(first[0], learned(None, None, None))
    second = run_spread(learned, "aabb", path, later, launch=launched("mesh:data=2,tensor=2"))
    third = run_spread(learned, "ab", path, None, launch=launched("pipeline:stages=2,microbatches=2"))
    for values in (second[0], third[0], third[1]):
        assert same_values(values, learned(None, path, None))
    assert torch.load(path, weights_only=True)["version"] == 6


def looked_at(team: Team) -> dict[str, Any]:
    """What a worker has, and what is refused."""
    model: Any = made("transformer")
    loader: Any = DataLoader(MODELS["transformer"][1](), batch_size=20)
    model, optimizer, loader = team.setup(model, adam(model), loader)
    for x, y in loader:
        loss = score(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    team.barrier()
    here = {name for name, value in model.named_parameters() if not value.isnan().any()}
    found: dict[str, Any] = {
        "here": here,
        "bytes": sum(value.untyped_storage().nbytes() for value in model.parameters()),
        "state": {name for name, value in model.named_parameters() if value in optimizer.state},
        "refused": [],
    }
    absent = next(value for name, value in model.named_parameters() if name not in here)
    for refused in (
        lambda: copy.deepcopy(model),
        lambda: pickle.dumps(model),
        lambda: model.state_dict(keep_vars=True),
        lambda: absent.data.mul_(2.0),
    ):
        try:
            refused()
        except (UsageError, RuntimeError) as error:
            found["refused"].append(str(error))
    team.barrier()
    return found


def test_each_worker_has_its_own_stages_only() -> None:
    found = run_spread(looked_at, "aab", launch=launched("pipeline:stages=3,microbatches=4"))
    names = dict(made("transformer").named_parameters())
    assert set().union(*(one["here"] for one in found)) == set(names)
    owners = [name for one in found for name in one["state"]]
    assert sorted(owners) == sorted(names)  # each in one place
    for one in found:
        assert one["state"] <= one["here"]
        own = sum(names[name].nbytes for name in one["here"])
        assert own <= one["bytes"] < own + 1000
        assert own < 0.6 * sum(value.nbytes for value in names.values())
        assert len(one["refused"]) == 4


def evaluated(team: Team | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of evaluations in evaluation mode between epochs, by all workers, and what they leave."""
    torch.manual_seed(0)
    model: Any = made("convnet").double()
    optimizer: Any = adam(model)
    loader: Any = DataLoader(MODELS["convnet"][1](), batch_size=20)
    if team is not None:
        model, optimizer, loader = team.setup(model, optimizer, loader)
    found = []
    for _ in range(2):
        for x, y in loader:
            score(model(x.double()), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found += [float(score(model(x.double()), y)) for x, y in DataLoader(MODELS["convnet"][1](), batch_size=8)]
        model.train()
    return found, {name: value.clone() for name, value in model.state_dict().items()}


def test_evaluation_and_batch_norm_are_those_of_the_plain_model() -> None:
    plain, whole = evaluated(None)
    for ours, values in run_spread(evaluated, "ab", launch=launched("pipeline:stages=2,microbatches=1")):
        assert apart(ours, plain) < 1e-9
        assert same_values(values, whole)


def closed(team: Team) -> dict[str, torch.Tensor]:
    model: Any = made("small").double()
    loader: Any = DataLoader(words(), batch_size=20)
    model, optimizer, loader = team.setup(model, adam(model), loader)
    for x, y in loader:
        score(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    team.close()
    assert len(optimizer.state) == len(list(model.parameters()))
    x, y = words()[:4]
    score(model(x), y).backward()  # it is whole again
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def test_a_closed_teams_model_is_whole_on_every_worker() -> None:
    found = run_spread(closed, "ab", launch=launched("pipeline:stages=2,microbatches=2"))
    assert same_values(found[0], found[1], 0.0)
    assert not any(value.isnan().any() for value in found[0].values())


def saves_last(team: Team, path: Path) -> None:
    """The other workers' scripts end while the lead still saves."""
    model: Any = made("small")
    loader: Any = DataLoader(words(), batch_size=20)
    model, optimizer, loader = team.setup(model, adam(model), loader)
    for x, y in loader:
        score(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    if team.is_lead:
        torch.save(model.state_dict(), path)
        team.save(path.with_suffix(".whole"))
    team._leave()  # as at the end of a script without team.close()


def test_the_lead_may_save_when_the_others_have_nothing_left_to_do(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    run_spread(saves_last, "aab", path, launch=launched("pipeline:stages=3,microbatches=2"))
    values, whole = torch.load(path, weights_only=True), torch.load(path.with_suffix(".whole"), weights_only=True)
    assert same_values(values, whole["model"], 0.0)
    assert not any(value.isnan().any() for value in values.values())
    assert len(whole["optimizer"]["state"]) == len(list(made("small").parameters()))


# -- what crosses the network ----------------------------------------------------------------------------------------

ROWS, WIDTH = 2048, 256
HEADER = 14 + 20 + 32
"""Of Ethernet, IP, and TCP with its timestamps."""


def crossed(team: Team) -> list[int]:
    """Bytes that leave this host in each step, without the headers of packets."""
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    for _ in range(5):
        team.barrier()
        before = _sent()
        team.barrier()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        team.barrier()
        found.append(_sent() - before)
    return found


def _sent() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "eth0" in line)
    size, packets = (int(number) for number in line.split(":")[1].split()[8:10])
    return size - HEADER * packets


def test_what_crosses_the_network_are_the_values_at_the_cut(two: list[Host], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Spread(crossed, two, 1, strategy="pipeline:stages=2,microbatches=4", folder=folder) as team:
        found = team.values(60.0)
        events = team.events()
    for steps in found:  # activations one way, their gradients the other
        assert 1.0 <= min(steps[1:]) / (4 * ROWS * WIDTH) < 1.03
    (cut,) = (event for event in events if isinstance(event, Stages))
    assert cut.bytes == [0, 4 * ROWS * WIDTH]
    assert cut.predicted > 0
    for rank in range(2):
        passes = [event for event in events if isinstance(event, Pass) and event.rank == rank]
        assert sum(event.kind == "F" for event in passes) == sum(event.kind == "B" for event in passes) == 5 * 4
    starts = {rank: [e.start for e in events if isinstance(e, Pass) and e.rank == rank] for rank in range(2)}
    assert starts[0][0] < starts[1][0] < starts[0][-1]  # by one clock
    came = {rank: [e for e in events if isinstance(e, StageTransfer) and e.rank == rank] for rank in range(2)}
    for rank, transfers in came.items():
        assert len(transfers) == 5 * 4
        assert {(one.source, one.bytes) for one in transfers} == {(1 - rank, ROWS * WIDTH)}
    forward = {rank: [e for e in passes_of(events, rank) if e.kind == "F"] for rank in range(2)}
    for sent, transfer, used in zip(forward[0], came[1], forward[1], strict=True):
        # From the end of a pass there to the start of the next here, as exactly as clocks can be compared.
        assert sent.start + sent.seconds - allowed(1e-3) < transfer.start
        assert transfer.start + transfer.seconds < used.start + allowed(1e-3)
    told = json.loads((folder / "summary.json").read_text())["communication"]
    assert told["bytes"] == 2 * 5 * 4 * ROWS * WIDTH
    assert 0.0 <= told["hidden"] <= 1.0
    assert "coming from another machine" in timeline(events, "")


def passes_of(events: list[Event], rank: int) -> list[Pass]:
    return [event for event in events if isinstance(event, Pass) and event.rank == rank]


def first_stage(team: Team) -> set[str]:
    """The parameters of the lead's stage. Cut in the middle of the work, much crosses; a little later, little."""
    inner = [torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 16)]
    model: Any = torch.nn.Sequential(*inner, torch.nn.Tanh(), torch.nn.Linear(16, 16))
    model, _ = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    model(x).square().mean().backward()
    return {name for name, value in model.named_parameters() if not value.isnan().any()}


def test_the_cut_moves_off_a_slow_link() -> None:
    with hosts(2, "50mbit") as made, Spread(first_stage, made, 1, strategy="pipeline:stages=2,microbatches=4") as team:
        found = team.values(60.0)
    assert found[0] >= {"0.weight", "1.weight", "2.weight"}  # by work alone it would be the first


# -- faults ----------------------------------------------------------------------------------------------------------


def dies(team: Team, victim: int) -> None:
    """One worker dies in its third step."""
    model: Any = made("small")
    loader: Any = DataLoader(words(), batch_size=20)
    model, optimizer, loader = team.setup(model, adam(model), loader)
    for step, (x, y) in enumerate(itertools.chain.from_iterable(itertools.repeat(loader, 9))):
        loss = score(model(x), y)
        if step == 2 and team.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_stage_that_dies_is_named_on_all_machines(victim: int) -> None:
    launch = launched("pipeline:stages=3,microbatches=4")
    for rank, text in enumerate(run_spread(dies, "aab", victim, launch=launch, may_die=range(3))):
        if rank != victim:
            assert f"WorkerLost: rank {victim} " in text, text


UNDER_TORCHRUN = """
import os, signal, sys
import torch, paceline
torch.set_num_threads(1)
team = paceline.join("pipeline:stages=2,microbatches=2")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
x = torch.arange(64.0).view(8, 8) / 64
for step in range(4):
    if sys.argv[1:] == ["dies"] and step == 2 and team.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.6f} on {len(team._members.machines)} machines", flush=True)
"""


def test_torchrun_starts_stages_on_hosts_and_one_that_dies_is_named(two: list[Host], tmp_path: Path) -> None:
    script = write_script(tmp_path, UNDER_TORCHRUN)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, loss = torch.arange(64.0).view(8, 8) / 64, torch.zeros(())
    for _ in range(4):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for said in ([], ["dies"]):
        runs = []
        for node, host in enumerate(two):
            place = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node)]
            place += ["--master-addr", two[0].address, "--master-port", "29500"]
            runs.append(starting([TORCHRUN, *place, str(script), *said], tmp_path, host=host, PACELINE_KEY="1" * 64))
        with runs[0] as lead, runs[1] as other:
            outcome, second = lead.finish(100.0), other.finish(60.0)
        if said:
            assert outcome.code != 0 and second.code != 0
            assert "WorkerLost: rank 1 " in outcome.err, outcome.err
        else:
            assert (outcome.code, second.code) == (0, 0), outcome.err
            for one in (outcome, second):
                assert one.out.endswith(" on 2 machines\n")
                assert abs(float(one.out.split()[1]) - loss.item()) < 1e-5


def test_without_a_key_nothing_but_loopback_is_used(two: list[Host]) -> None:
    with Spread(losses, two, 1, "small", 1, strategy="pipeline:stages=2", key=None) as team:
        for result in team.results():
            assert isinstance(result, Failure)
            assert "has no key" in result.message
