"""Ray over real separate hosts: who is killed there comes back, or the others go on without it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.fork_server import ForkServer
from helpers.hosts import Host, hosts
from helpers.rays import HEAD, NODE, PORT, QUIET, RAY
from helpers.support import PACELINE, PREAMBLE, environment, started, write_script

SCRIPT = (
    PREAMBLE
    + """
import torch, paceline
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

team = paceline.join()
torch.manual_seed(3)
inputs = torch.randn(600, 6)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=5 * team.world_size)
model, optimizer, loader = team.setup(model, optimizer, loader)
note(f"here-{team.rank}-{os.getpid()}", machine=team._members.machine)
for epoch in range(3):
    for x, y in loader:
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
    note(f"epoch-{epoch}-{team.rank}", size=team.world_size, machine=team._members.machine)
if team.rank == 0 and "WAIT" in os.environ:  # until the one that was killed is there again
    while len(list(pathlib.Path(os.environ["RUN_NOTES"]).glob(f"here-{os.environ['WAIT']}-*.json"))) < 2:
        time.sleep(0.1)
note(f"end-{team.rank}", sum=float(sum(parameter.detach().double().sum() for parameter in model.parameters())))
"""
)


def variables(scratch: str, head: Host) -> dict[str, str]:
    address = f"{head.address}:{PORT}"
    own = {
        "RAY_ADDRESS": address,
        "RAY_TMPDIR": scratch,
        "TMPDIR": scratch,
        **QUIET,
    }
    return environment(**own)


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[list[Host], dict[str, str]]]:
    """Two hosts, each a node."""
    scratch = tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True)  # sockets need short names
    with hosts(2) as made:
        own = variables(scratch.name, made[0])
        head = [*HEAD, "--temp-dir", scratch.name]
        try:
            for host, words in zip(made, (head, ["--address", own["RAY_ADDRESS"]]), strict=True):
                place = ["--node-ip-address", host.address]
                done = host.run([RAY, "start", *words, *place, *NODE], 180, env={**own, "RAY_ADDRESS": ""})
                assert done.returncode == 0, done.stdout + done.stderr
            yield made, own
        finally:
            for host in made:
                _clear(host)
    scratch.cleanup()


def _clear(host: Host) -> None:
    """End by their ids whichever processes are on a host."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        listed = subprocess.run(["ip", "netns", "pids", host.name], check=True, capture_output=True, text=True)
        if not listed.stdout.split():
            return
        for pid in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.1)


@contextlib.contextmanager
def running(cluster: tuple[list[Host], dict[str, str]], folder: Path, *words: str) -> Iterator[Any]:
    made, own = cluster
    write_script(folder, SCRIPT)
    fixed = [PACELINE, "run", "train.py", "--on", "ray", "--workers", "4", "--place", "spread", "--name", "run"]
    with ForkServer() as server:
        line = made[0].command([*map(str, fixed), *server.words, "--env", "RUN_NOTES", *words])
        with started(line, folder, **own) as run:
            yield run


def _first(run: Any, pattern: str, seconds: float = 180.0) -> dict[str, Any]:
    until = time.monotonic() + seconds
    while not (found := sorted(run.notes.glob(f"{pattern}.json"))):
        assert time.monotonic() < until and not run.ended, f"no note {pattern}"
        time.sleep(0.05)
    return dict(run.note(found[0].stem))


def test_a_killed_worker_of_another_host_joins_again(
    cluster: tuple[list[Host], dict[str, str]], tmp_path: Path
) -> None:
    with running(cluster, tmp_path, "--strategy", "async", "--env", "WAIT=3") as run:
        _first(run, "epoch-0-3")
        note = _first(run, "here-3-*")
        assert note["machine"] == 1
        os.kill(note["pid"], signal.SIGKILL)
        outcome = run.finish(100)
    assert outcome.code == 0, outcome.err
    assert "rank 3 was killed by signal 9 (SIGKILL); it is started again" in outcome.err
    assert "rank 3 has joined; there are" in outcome.err
    assert run.summary("run")["updates"] == 360
    joined = [event["pid"] for event in run.events("run") if event["event"] == "join" and event["rank"] == 3]
    assert len(set(joined)) == 2
    left = {event["rank"] for event in run.events("run") if event["event"] == "leave"}
    assert left == {0, 1, 2, 3}


@pytest.mark.parametrize("victim", [2, 0])  # which the other worker of its host knows as the first there; the hub
def test_an_elastic_all_reduce_goes_on_over_hosts(
    victim: int, cluster: tuple[list[Host], dict[str, str]], tmp_path: Path
) -> None:
    with running(cluster, tmp_path, "--strategy", "all-reduce", "--elastic") as run:
        _first(run, f"epoch-0-{victim}")
        note = _first(run, f"here-{victim}-*")
        assert note["machine"] == victim // 2
        os.kill(note["pid"], signal.SIGKILL)
        outcome = run.finish(100)
    left = [rank for rank in range(4) if rank != victim]
    assert outcome.code == 0, outcome.err
    assert f"rank {victim} was killed by signal 9 (SIGKILL); the others went on without it" in outcome.err
    assert len({run.note(f"end-{rank}")["sum"] for rank in left}) == 1
    assert run.note("epoch-2-3")["size"] == 3
    roster = [event["workers"] for event in run.events("run") if event["event"] == "roster"]
    assert roster[-1] == left


def test_workers_of_another_host_that_are_all_silent_are_ended_there(
    cluster: tuple[list[Host], dict[str, str]], tmp_path: Path
) -> None:
    words = ["--strategy", "all-reduce", "--elastic", "--timeout", "8"]
    with running(cluster, tmp_path, *words) as run:
        _first(run, "epoch-0-2")
        for rank in (2, 3):
            os.kill(_first(run, f"here-{rank}-*")["pid"], signal.SIGSTOP)
        outcome = run.finish(100)
    assert outcome.code == 0, outcome.err
    # They may be stopped on both sides of a barrier: then it is said of one after the other.
    evicted = re.findall(r"(ranks? [\d and]+) did not come to \S.* within 8 s and had to be evicted", outcome.err)
    assert evicted in (["ranks 2 and 3"], ["rank 2", "rank 3"], ["rank 3", "rank 2"]), outcome.err
    assert len({run.note(f"end-{rank}")["sum"] for rank in (0, 1)}) == 1


def test_stages_are_placed_by_host_and_one_that_dies_is_named(
    cluster: tuple[list[Host], dict[str, str]], tmp_path: Path
) -> None:
    with running(cluster, tmp_path, "--strategy", "pipeline:stages=2,workers=2+2,microbatches=4") as run:
        for rank in range(4):
            assert _first(run, f"epoch-0-{rank}")["machine"] == rank // 2
        os.kill(_first(run, "here-3-*")["pid"], signal.SIGKILL)
        outcome = run.finish(100)
    assert outcome.code == 0, outcome.err
    assert "rank 3 was killed by signal 9 (SIGKILL); the team is started again" in outcome.err
    passes = {(event["rank"] // 2, event["stage"]) for event in run.events("run") if event["event"] == "pass"}
    assert passes and passes <= {(0, 0), (1, 1)}
