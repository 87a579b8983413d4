"""Cables that are pulled, and links that are slow: a run over hosts heals, or says whom it has lost."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checker import violations
from helpers.hosts import Host, hosts
from helpers.load import allowed
from helpers.machines import Failure, Spread

from paceline.config import Timeouts
from paceline.events import Refused, Update


def paced(team: Any, steps: int, seconds: float) -> list[Any]:
    torch.manual_seed(1)
    model = torch.nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = team.setup(model, optimizer)
    for number in range(steps):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(number))
        model(x).square().mean().backward()
        time.sleep(seconds)
        optimizer.step()
        optimizer.zero_grad()
    return []


def _after_first_updates(team: Spread, seconds: float = 40.0) -> None:
    assert team.folder is not None
    path = team.folder / "streams" / "-1.jsonl"
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if path.exists() and path.read_bytes().count(b'"event":"update"') >= 2:
            return
        time.sleep(0.05)
    raise AssertionError("the run did not begin")


def test_a_cable_pulled_for_three_seconds_heals_by_itself(tmp_path: Path) -> None:
    with hosts(2) as (a, b), Spread(paced, [a, b], 1, 30, 0.1, folder=tmp_path / "run", servers="lead") as team:
        _after_first_updates(team)
        b.cable(False)
        time.sleep(3.0)
        b.cable(True)
        team.values(40)
        recorded = team.events()
    assert violations(recorded, "sync") == []
    updates = [event for event in recorded if isinstance(event, Update)]
    assert len(updates) == 30
    assert [event for event in recorded if isinstance(event, Refused)] == [], "its own hosts call again"
    # The fault has happened: nothing went on while the cable was out.
    assert max(after.start - before.start for before, after in itertools.pairwise(updates)) > 2.5


def test_a_cable_pulled_for_longer_is_an_error_that_names_the_host(tmp_path: Path) -> None:
    timeouts = Timeouts(join=20.0, barrier=3.0)
    with (
        hosts(2) as (a, b),
        Spread(paced, [a, b], 1, 600, 0.1, folder=tmp_path / "run", servers="lead", timeouts=timeouts) as team,
    ):
        _after_first_updates(team)
        b.cable(False)
        pulled = time.monotonic()
        results = team.results(40)
        assert time.monotonic() - pulled < allowed(30.0)
    assert isinstance(results[0], Failure) and isinstance(results[1], Failure)
    assert results[0].kind in ("WorkerLost", "TeamTimeout"), results[0]
    assert b.address in results[0].message, results[0]
    assert results[1].kind == "ServerLost", results[1]
    assert a.address in results[1].message


def _relays(host: Host) -> list[int]:
    """The process that keeps a host's relay, and the relay."""
    pids = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True).stdout.split()
    found = [int(pid) for pid in pids if b"relay/main.py" in Path("/proc", pid, "cmdline").read_bytes()]
    return sorted(
        found, key=lambda pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) in found
    )


def test_a_relay_that_is_stopped_is_an_error_and_is_not_left_behind(tmp_path: Path) -> None:
    timeouts = Timeouts(join=20.0, barrier=3.0)
    with (
        hosts(2) as (a, b),
        Spread(paced, [a, b], 1, 600, 0.1, folder=tmp_path / "run", servers="lead", timeouts=timeouts) as team,
    ):
        _after_first_updates(team)
        _, relay = _relays(b)
        os.kill(relay, signal.SIGSTOP)
        results = team.results(40)
        team.close()
        left = [pid for host in (a, b) for pid in _relays(host)]
    assert isinstance(results[0], Failure) and isinstance(results[1], Failure)
    assert results[0].kind in ("WorkerLost", "TeamTimeout") and b.address in results[0].message, results[0]
    assert results[1].kind == "TeamTimeout", results[1]
    assert left == []


@pytest.mark.parametrize("away", [True, False], ids=["away", "home"])
def test_a_relay_that_does_not_come_back_is_noticed_long_before_the_timeout(tmp_path: Path, away: bool) -> None:
    timeouts = Timeouts(join=20.0, barrier=240.0)
    with (
        hosts(2) as (a, b),
        Spread(paced, [a, b], 1, 600, 0.1, folder=tmp_path / "run", servers="lead", timeouts=timeouts) as team,
    ):
        _after_first_updates(team)
        keeper, _ = _relays(b if away else a)
        os.kill(keeper, signal.SIGKILL)
        killed = time.monotonic()
        results = team.results(40)
        assert time.monotonic() - killed < allowed(20.0)
    here, there = results[0 if away else 1], results[1 if away else 0]
    assert isinstance(here, Failure) and isinstance(there, Failure)
    assert here.kind in ("WorkerLost", "ServerLost"), here
    assert "its relay, through which its workers are reached, has died" in here.message, here
    assert (b if away else a).address in here.message
    assert there.kind == "ServerLost", there
    lost = f"the relay of its machine, through which rank {1 if away else 0} reaches the server, died"
    assert there.message == lost


@pytest.mark.parametrize(("strategy", "how"), [("async", "cable"), ("k-sync:k=1", "relay")])
def test_the_loss_of_a_machine_with_a_shard_is_the_loss_of_a_server(tmp_path: Path, strategy: str, how: str) -> None:
    # A worker alone could be spared.
    timeouts = Timeouts(join=20.0, barrier=4.0 if how == "cable" else 240.0)
    folder = tmp_path / "run"
    with (
        hosts(2) as (a, b),
        Spread(
            paced, [a, b], 1, 3000, 0.02, folder=folder, servers="each", strategy=strategy, timeouts=timeouts
        ) as team,
    ):
        _after_first_updates(team)
        hurt = time.monotonic()
        if how == "cable":
            b.cable(False)
        else:
            os.kill(_relays(b)[0], signal.SIGKILL)
        here, _ = team.results(40)
        assert time.monotonic() - hurt < allowed(20.0)
    assert isinstance(here, Failure)
    assert here.kind == "ServerLost", here
    assert f"machine 1 ({b.address})" in here.message, here
    assert here.message.endswith("; it holds a shard of the parameters")
