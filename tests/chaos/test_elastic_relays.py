"""Workers of a parameter server's run over hosts that are killed, and join again there or on another host."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from helpers.checker import violations
from helpers.hosts import Host, hosts
from helpers.machines import Spread, member
from helpers.support import wait_until
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from paceline.config import Launch, Timeouts
from paceline.events import Join, Lost, Push, Roster

EPOCHS = 6


def work(team: Any, notes: str) -> tuple[int, int]:
    torch.manual_seed(3)
    inputs = torch.randn(320, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    model, optimizer, loader = team.setup(model, optimizer, DataLoader(data, batch_size=4 * team.world_size))
    trainer = team._trainer
    tracked = int(model[1].num_batches_tracked)
    begun = {
        "relay_addresses": list(trainer._servers.relay_addresses),
        "tracked": tracked,
        "version": trainer.version,
    }
    Path(notes, f"begun-{team.rank}-{os.getpid()}").write_text(json.dumps(begun))
    for epoch in range(EPOCHS):
        for x, y in loader:
            with team.step():
                mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.01)
        team.barrier()
        Path(notes, f"epoch-{epoch}-{team.rank}").touch()
    return team.world_size, trainer.version


def begun(notes: Path, rank: int, pid: int | None) -> dict[str, Any]:
    path = notes / f"begun-{rank}-{pid}"
    wait_until(path.exists, 40, f"the beginning of rank {rank}")
    wait_until(lambda: path.read_text().endswith("}"), 10, "its note")
    return dict(json.loads(path.read_text()))


@pytest.mark.parametrize(
    ("strategy", "servers", "each", "where"),
    [("async", "lead", 1, 1), ("sync", "2", 2, 1), ("k-sync:k=2", "1", 2, 0), ("ssp:s=2", "2", 1, 0)],
)
def test_a_killed_worker_joins_again(strategy: str, servers: str, each: int, where: int, tmp_path: Path) -> None:
    launch = Launch(strategy=strategy, elastic=True, servers=servers, timeouts=Timeouts(barrier=30.0, join=30.0))
    context = multiprocessing.get_context("fork")
    with hosts(2) as made, Spread(work, made, each, str(tmp_path), launch=launch, folder=tmp_path / "run") as team:
        victim = team.size - 1
        wait_until((tmp_path / f"epoch-0-{victim}").exists, 60, "the first epoch")
        team.processes[victim].kill()
        team.processes[victim].join()
        door = begun(tmp_path, 0, team.processes[0].pid)["relay_addresses"][where]
        again = msgspec.structs.replace(launch, joins=door, machine=where, folder=str(tmp_path / "run"))
        place = {"RANK": str(victim), "LOCAL_RANK": "0", "WORLD_SIZE": str(team.size), "LOCAL_WORLD_SIZE": "1"}
        ours, theirs = context.Pipe(duplex=False)
        details = (work, (str(tmp_path),), made[where], {**place, **again.to_environment()}, theirs)
        newcomer = context.Process(target=member, args=details, daemon=False)
        newcomer.start()
        theirs.close()
        results = team.results(90)
        assert ours.poll(30)
        fine, value = pickle.loads(ours.recv_bytes())
        note = begun(tmp_path, victim, newcomer.pid)
        newcomer.join(10)
        recorded = team.events()
    assert fine, value
    versions = {result[1] for result in results[:victim]} | {value[1]}
    assert len(versions) == 1
    # It began with what the others had by then, of the model's other values, too.
    assert 0 < note["version"] < versions.pop()
    assert note["tracked"] > 0
    assert violations(recorded, strategy) == []
    assert [event.rank for event in recorded if isinstance(event, Lost)] == [victim]
    rosters = [event.workers for event in recorded if isinstance(event, Roster)]
    everybody, rest = list(range(victim + 1)), list(range(victim))
    assert rosters[:3] == [everybody, rest, everybody]
    joined = [event for event in recorded if isinstance(event, Join) and event.rank == victim]
    assert [event.pid for event in joined][-1] == newcomer.pid
    assert any(
        isinstance(event, Push) and event.rank == victim and event.start > joined[-1].start for event in recorded
    )


def test_the_relay_of_its_machine_ends_a_worker_that_is_silent(tmp_path: Path) -> None:
    launch = Launch(strategy="sync", elastic=True, timeouts=Timeouts(barrier=4.0, join=30.0))
    with hosts(2) as made, Spread(work, made, 1, str(tmp_path), launch=launch, folder=tmp_path / "run") as team:
        wait_until((tmp_path / "epoch-0-1").exists, 60, "the first epoch")
        stopped = team.processes[1]
        assert stopped.pid is not None
        os.kill(stopped.pid, signal.SIGSTOP)
        stopped.join(60)
        assert stopped.exitcode == -signal.SIGKILL
        results = team.results(90)
        recorded = team.events()
    assert results[0][0] == 1
    assert violations(recorded, "sync") == []
    assert [event.rank for event in recorded if isinstance(event, Lost)] == [1]


@pytest.mark.parametrize("servers", ["lead", "1"])
def test_where_all_are_killed_no_relay_waits_for_them(servers: str, tmp_path: Path) -> None:
    launch = Launch(strategy="async", elastic=True, servers=servers, timeouts=Timeouts(barrier=60.0, join=60.0))
    with hosts(2) as made, Spread(work, made, 1, str(tmp_path), launch=launch) as team:
        wait_until((tmp_path / "epoch-0-1").exists, 60, "the first epoch")
        assert all(processes_on(host) > 1 for host in made)
        for process in team.processes:
            process.kill()
            process.join()
        wait_until(lambda: not any(processes_on(host) for host in made), 30, "the end of everything there")


def processes_on(host: Host) -> int:
    listed = subprocess.run(["ip", "netns", "pids", host.name], check=True, capture_output=True, text=True)
    return len(listed.stdout.split())
