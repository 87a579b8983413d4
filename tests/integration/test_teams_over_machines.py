"""Teams on several machines: the same numbers, the same bits everywhere, and nobody waits in vain.

Machines are pretended here: members are told that they are on different ones, so what would cross a network does so.
`test_hosts.py` has real separate hosts.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # any optimizer imports it, which takes seconds: once here, not once in every fork
from helpers.load import allowed
from helpers.teams import run_spread, run_team
from helpers.training import (
    BATCH,
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
    sgd,
    values,
)
from torch import nn
from torch.utils.data import DataLoader

import paceline
from paceline import Team, TeamError
from paceline.cluster import membership
from paceline.config import Launch, Timeouts
from paceline.errors import Mismatch, TeamTimeout, WorkerLost
from paceline.transport import BarrierKind
from paceline.transport import peer_connections as connections
from paceline.transport.keys import fingerprint

torch.set_num_threads(1)
SOON = 6.0
"""Seconds in which a death must be known, on a busy machine."""


def patient(barrier: float = 20.0, **more: Any) -> Launch:
    return Launch(timeouts=Timeouts(join=30.0, barrier=barrier), **more)


# -- coming together -------------------------------------------------------------------------------------------------


def come_with(_: None, keys: list[str]) -> tuple[str, str, float]:
    os.environ["PACELINE_KEY"] = keys[int(os.environ["RANK"])]
    start = time.monotonic()
    try:
        paceline.join()
    except TeamError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", 0.0


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (["1" * 64, "1" * 64, "2" * 64], "rank 2 on 127.0.0.1 and rank 0 on 127.0.0.1 have different keys"),
        (["1" * 64, "1" * 64, ""], "rank 2 on 127.0.0.1 has no key, which rank 0 on 127.0.0.1 has"),
        (["", "", "1" * 64], "rank 0 on 127.0.0.1 has no key, which rank 2 on 127.0.0.1 has"),
    ],
)
@pytest.mark.parametrize("elastic", [False, True])
def test_another_key_on_one_machine_is_refused_at_once_and_on_all(keys: list[str], why: str, elastic: bool) -> None:
    for kind, message, waited in run_spread(come_with, "aab", keys, launch=patient(elastic=elastic), joined=False):
        assert (kind, message) == ("JoinError", f"{why}; set the same PACELINE_KEY on every machine")
        assert waited < allowed(SOON), "the time to join is 30 s"


def test_the_fingerprint_of_a_key_does_not_tell_it_and_is_another_one_each_time() -> None:
    first, second = fingerprint("1" * 64, "a"), fingerprint("1" * 64, "b")
    assert first == fingerprint("1" * 64, "a")
    assert len({first, second, fingerprint("2" * 64, "a"), fingerprint(None, "a")}) == 4


def look_around(team: Team) -> tuple[Any, ...]:
    members = team._members
    payload = bytes([team.rank]) * (3_000_000 if team.rank == 1 else team.rank)
    assert members.gather(payload) == [
        bytes([rank]) * (3_000_000 if rank == 1 else rank) for rank in range(team.world_size)
    ]
    value = torch.full((300_000,), team.rank + 1.0)
    members.mirror([value])
    assert bool((value == 1.0).all())
    memory = members.share(4096)
    memory.bytes(members.local.rank, 1)[0] = team.rank + 1
    team.barrier()
    beside = [number - 1 for number in memory.bytes(0, members.local.size)]
    assert beside == members.machines[members.machine]
    assert team.per_replica(team.rank).values == tuple(range(team.world_size))
    return members.machine, members.machines, members.local.rank, members.local.size


@pytest.mark.parametrize(
    ("places", "machines"),
    [("aabb", [[0, 1], [2, 3]]), ("aaab", [[0, 1, 2], [3]]), ("abab", [[0, 2], [1, 3]]), ("abc", [[0], [1], [2]])],
)
def test_members_know_who_is_where(places: str, machines: list[list[int]]) -> None:
    for rank, (machine, found, local, size) in enumerate(run_spread(look_around, places)):
        assert found == machines
        assert rank in machines[machine]
        assert (local, size) == (machines[machine].index(rank), len(machines[machine]))


def test_one_machine_is_the_team_itself() -> None:
    assert run_spread(lambda team: team._members.local is team._members, "aa") == [True, True]


# -- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("places", "make", "options"),
    [
        ("aabb", adamw, {}),
        ("aaab", sgd, {}),
        ("aab", sgd, {"gradients": "visible"}),
        ("abab", adafactor, {}),
    ],
)
def test_learns_what_one_process_learns(places: str, make: Any, options: dict[str, Any]) -> None:
    results = run_spread(in_team, places, make, torch.float64, 2, options)
    assert apart(results[0], plain(make, torch.float64, 2)) < 1e-12
    assert all(same_bits(results[0], other) for other in results[1:])


@pytest.mark.parametrize("topology", ["ring", "tree", "halving-doubling", "hub", "direct"])
def test_every_topology_gives_the_same_numbers(topology: str) -> None:
    launch = patient(strategy=f"all-reduce:topology={topology}")
    results = run_spread(in_team, "abc", sgd, torch.float64, 1, launch=launch)
    assert apart(results[0], plain(sgd, torch.float64, 1)) < 1e-12
    assert all(same_bits(results[0], other) for other in results[1:])


def test_branches_that_only_one_machine_uses() -> None:
    alone = divided(None)
    for result in run_spread(divided, "aab"):
        assert apart(result, alone) < 1e-12


class Wide(nn.Module):
    """Large enough for the ring's messages to be several."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 1500), nn.BatchNorm1d(1500), nn.Tanh(), nn.Linear(1500, 1500))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def everything(team: Team, folder: str) -> tuple[list[torch.Tensor], float, list[torch.Tensor]]:
    """Clipping, a gradient scaler, batch norm over the team, a balanced batch, and a checkpoint on the way."""
    torch.manual_seed(team.rank)
    model: Any = Wide().double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader: Any = DataLoader(data(samples=100), batch_size=24)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model, optimizer, loader = team.setup(model, optimizer, loader, sync_batch_norm=True, balance=True)
    norms = []
    for number, (x, _) in enumerate(loader):
        scaler.scale(model(x).square().mean()).backward()
        if number % 2:
            scaler.unscale_(optimizer)
            norms.append(float(team.clip_grad_norm_(0.05)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    path = Path(folder) / "on-the-way.pt"
    team.save(path)
    before = values(model)
    team.barrier()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    team.load(path)
    after = values(model)
    assert same_bits(before, after)
    state = optimizer.state_dict()["state"]
    return before, sum(norms), [entry["momentum_buffer"].clone() for entry in state.values()]


def test_all_that_a_team_can_do_spans_machines(tmp_path: Path) -> None:
    alone = run_team(everything, 3, str(tmp_path))
    spread = run_spread(everything, "aab", str(tmp_path))
    assert apart(spread[0][0], alone[0][0]) < 1e-9
    assert spread[0][1] == pytest.approx(alone[0][1], rel=1e-9)
    for other in spread[1:]:
        assert same_bits(spread[0][0], other[0])
        assert spread[0][1] == other[1]
        assert same_bits(spread[0][2], other[2])


def test_what_the_lead_sees_of_an_earlier_team_all_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen_by = {"0": tmp_path / "00000007.pt"}  # the others are on machines that have none
    monkeypatch.setattr("paceline.team.checkpoints.newest_checkpoint", lambda _folder: seen_by.get(os.environ["RANK"]))
    found = run_spread(lambda team: team.checkpoint, "aab", launch=patient(folder=str(tmp_path)))
    assert found == [tmp_path / "00000007.pt"] * 3


# -- faults ----------------------------------------------------------------------------------------------------------


def struck(team: Team, victim: int, how: str) -> tuple[str, str, tuple[int, ...], float]:
    """Train until something happens to the victim; what the others were told, and how soon."""
    model: Any = build()
    loader: Any = DataLoader(data(), batch_size=BATCH)
    model, optimizer, loader = team.setup(model, sgd(model.parameters()), loader)
    loop(model, optimizer, loader, 1)
    team.barrier()
    start = time.monotonic()
    if team.rank == victim:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "stopped":
            time.sleep(7.0)
        elif how == "elsewhere":
            try:
                team._members.gather(b"")
            except TeamError as error:
                return type(error).__name__, str(error), error.ranks, time.monotonic() - start
        elif how == "left":
            team.close()
            return "", "", (), 0.0
    try:
        loop(model, optimizer, loader, 20)
    except TeamError as error:
        return type(error).__name__, str(error), error.ranks, time.monotonic() - start
    return "nothing", "", (), time.monotonic() - start


@pytest.fixture
def survivors() -> Any:
    def run(places: str, victim: int, how: str, launch: Launch) -> dict[int, Any]:
        results = run_spread(struck, places, victim, how, launch=launch, may_die=[victim] if how == "killed" else [])
        return {rank: result for rank, result in enumerate(results) if rank != victim}

    return run


@pytest.mark.parametrize("victim", [3, 2], ids=["a worker", "a lead"])
def test_a_death_is_known_everywhere(survivors: Any, victim: int) -> None:
    for kind, message, ranks, seconds in survivors("aabb", victim, "killed", patient(15.0)).values():
        assert kind == WorkerLost.__name__, message
        assert ranks == (victim,)
        assert f"rank {victim} on 127.0.0.1 " in message
        assert seconds < allowed(SOON)


def test_who_does_not_come_is_named_with_its_host(survivors: Any) -> None:
    for kind, message, ranks, _ in survivors("aab", 2, "stopped", patient(2.0)).values():
        assert kind == TeamTimeout.__name__, message
        assert ranks == (2,)
        assert "rank 2 on 127.0.0.1" in message


def test_doing_different_things_is_a_mismatch(survivors: Any) -> None:
    for kind, message, _, _ in survivors("aab", 2, "elsewhere", patient()).values():
        assert kind == Mismatch.__name__, message


@pytest.mark.parametrize("victim", [1, 2], ids=["a worker", "a lead"])
def test_a_script_that_ends_early_is_missed(survivors: Any, victim: int) -> None:
    for kind, message, ranks, seconds in survivors("aab", victim, "left", patient()).values():
        assert kind == WorkerLost.__name__, message
        assert ranks == (victim,)
        assert "its script has ended" in message
        assert seconds < allowed(SOON)


def quick(team: Team) -> float:
    barrier = team._members.barrier
    taken = []
    for _ in range(200):
        start = time.perf_counter()
        barrier.wait(BarrierKind.BARRIER)
        taken.append(time.perf_counter() - start)
    return sorted(taken)[len(taken) // 10]


def test_barriers_are_quick() -> None:
    # At the time of those that nothing else on this machine held up.
    assert min(run_spread(quick, "ab")) < allowed(0.001)


# -- clocks ----------------------------------------------------------------------------------------------------------


def ahead(team: Team) -> float:
    return team._members.ahead


def test_the_first_of_each_machine_knows_rank_0s_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.getpid()
    real = time.perf_counter
    born = {"b": 1000.0, "c": -50.0}
    """What the clocks of other machines show when that of rank 0's shows 0."""

    def shifted() -> float:
        return real() + (0.0 if os.getpid() == here else born.get(str(membership.machine()), 0.0))

    monkeypatch.setattr(connections.time, "perf_counter", shifted)
    assert run_spread(ahead, "aabbc") == pytest.approx([0.0, 0.0, -1000.0, 0.0, 50.0], abs=allowed(0.05))


def drawn(team: Team) -> list[torch.Tensor]:
    """Values that each script draws itself after setup, after an update that changes none."""
    model: Any = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4))
    model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.0))
    torch.manual_seed(team.rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model(torch.ones(4, 10)).sum().backward()
    optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("strategy", ["all-reduce", "mesh:data=2,pipeline=2,microbatches=2"])
def test_values_that_scripts_draw_after_setup_are_the_leads_on_all_machines(strategy: str) -> None:
    found = run_spread(drawn, "aabb", launch=patient(strategy=strategy))
    assert all(same_bits(found[0], other) for other in found[1:])
