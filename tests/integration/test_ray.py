"""Runs in a Ray cluster of two nodes: as on one machine, brought back when killed, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.fork_server import ForkServer
from helpers.forks import played, starting
from helpers.rays import CORES, RayNetwork, ray_network
from helpers.support import PACELINE, PREAMBLE, Run, finished, wait_until, write_script

SCRIPT = (
    PREAMBLE
    + """
import threading, torch, paceline
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from beside import EPOCHS

team = paceline.join()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(128, 8)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8 * team.world_size)
model, optimizer, loader = team.setup(model, optimizer, loader)
first = 0
if team.checkpoint is not None:
    first = team.load(team.checkpoint)["epoch"] + 1
    print(f"rank {team.rank} resumes with epoch {first}")
if '"joins":"' in os.environ["PACELINE_LAUNCH"].replace(" ", ""):
    note("again")
may_end = pathlib.Path(os.environ["RUN_NOTES"], "may-end.json")
note(f"begins-{team.rank}")
if "WAIT" in os.environ:
    time.sleep(0.6)  # with the next step it writes its events, that it has joined among them, before it may be killed
for epoch in range(first, EPOCHS):
    if "WAIT" in os.environ and epoch == EPOCHS - 1 and team.is_lead:  # for whoever is started again
        until = time.monotonic() + 240
        while not may_end.exists() and time.monotonic() < until:
            time.sleep(0.05)
    for x, y in loader:
        for thread in threading.enumerate():
            if "WAIT" in os.environ and thread.name == "paceline snapshot":
                thread.join(60)  # else all steps may be made while a slow disk takes one of the first snapshots
        with team.step():
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            team.report(loss=loss)
    team.save(epoch=epoch)
    note(f"epoch-{team.rank}", epoch=epoch)
print(f"ends on {os.environ['RANK']} of {os.environ['LOCAL_WORLD_SIZE']} with {os.environ.get('GREETING')}")
"""
)


@pytest.fixture(scope="module")
def network() -> Iterator[RayNetwork]:
    with ray_network() as network:
        yield network
        all_room_is_free(network)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """Forks the workers that agents start; those of the first test import torch themselves."""
    with ForkServer() as server:
        yield server


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a script and a module of the user's own."""
    write_script(tmp_path, "EPOCHS = 4\n", "beside.py")
    write_script(tmp_path, SCRIPT)
    return tmp_path


def nothing_left(network: RayNetwork) -> None:
    """No agent, no worker, no folder."""
    try:
        wait_until(lambda: not network.agents() and not network.folders(), 90, "the end of the run on its nodes")
    except AssertionError as error:
        raise AssertionError(f"{network.agents()} and {network.folders()} are left") from error


def all_room_is_free(network: RayNetwork) -> None:
    """Of whatever was run here, nothing holds a place any more."""
    code = "import ray; ray.init(log_to_driver=False); print(ray.available_resources()['CPU'])"
    variables = {**os.environ, **network.variables}
    words = network.inside(sys.executable, "-c", code)
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert float(done.stdout) == 2 * CORES, done.stdout + done.stderr


def test_the_same_script_gives_the_same_loss_as_on_one_machine(network: RayNetwork, project: Path) -> None:
    local = played(["train.py", "--workers", "2", "--name", "here"], project, 120)
    assert local.code == 0, local.err
    words = ("run", "train.py", "--on", "ray", "--workers", "2", "--name", "there", "--all-output")
    outcome = network.finished(project, *words, "--env", "GREETING=hello", "--env", "RUN_NOTES")
    assert outcome.code == 0, outcome.err
    run = outcome.run
    assert run.summary("there")["last"] == local.run.summary("here")["last"]
    assert run.summary("there")["updates"] == local.run.summary("here")["updates"] == 32
    # Both nodes are one machine; what the user's script says comes from every rank, under its name.
    for rank in (0, 1):
        line = f"ends on {rank} of 2 with hello"
        assert f"[{rank}] {line}" in outcome.out
        assert line in (project / "runs" / "there" / "output" / f"{rank}.log").read_text()
    saved = {path.name: path.read_bytes() for path in (project / "runs" / "there" / "checkpoints").iterdir()}
    assert sorted(saved) == [f"{version:08d}.pt" for version in (8, 16, 24, 32)]
    assert {event["rank"] for event in run.events("there") if event["event"] == "join"} == {0, 1}
    assert "done: 32 updates" in outcome.err
    nothing_left(network)


def processes_of_rank_1(run: Run) -> set[int]:
    return {event["pid"] for event in run.events("hurt") if event["event"] == "join" and event["rank"] == 1}


@pytest.mark.parametrize("snapshot", ["off", "0s"])
def test_a_killed_worker_brings_the_team_back(
    network: RayNetwork, server: ForkServer, project: Path, snapshot: str
) -> None:
    words = ("run", "train.py", "--on", "ray", "--workers", "2", "--name", "hurt", "--strategy", "all-reduce")
    more = ("--all-output", *server.words, "--env", "RUN_NOTES", "--env", "WAIT=1", "--snapshot", snapshot)
    with network.run(project, *words, *more) as run:
        os.kill(run.note("epoch-1", 180)["pid"], signal.SIGKILL)
        may_end(run)
        outcome = run.finish(180)
    assert outcome.code == 0, outcome.err
    how = "with checkpoint" if snapshot == "off" else "and goes on from snapshot"
    assert f"rank 1 was killed by signal 9 (SIGKILL); the team is started again {how}" in outcome.err
    assert len(processes_of_rank_1(run)) == 2
    assert ("rank 1 resumes with epoch" in outcome.out) == (snapshot == "off")
    snapshots = sorted(path.stem for path in (project / "runs" / "hurt").glob("snapshots/*"))
    assert len(snapshots) == (0 if snapshot == "off" else 2)
    assert run.summary("hurt")["updates"] == 32
    assert "ends on 1" in outcome.out
    nothing_left(network)
    if snapshot != "off":  # one more epoch, in another run
        write_script(project, "EPOCHS = 5\n", "beside.py")
        resumed = ("run", "--resume", "hurt", "--on", "ray", *server.words, "--env", "RUN_NOTES")
        outcome = network.finished(project, *resumed)
        assert outcome.code == 0, outcome.err
        assert "are over in the run before" in outcome.err
        assert 24 <= int(snapshots[-1]) <= 32
        assert outcome.run.summary("hurt")["updates"] == 5 * 8 - int(snapshots[-1])


def may_end(run: Run) -> None:
    (run.notes / "may-end.json").write_text("{}")


def test_with_a_server_a_killed_worker_comes_back_alone_and_with_a_new_one_all_do(
    network: RayNetwork, server: ForkServer, project: Path
) -> None:
    words = ("run", "train.py", "--on", "ray", "--workers", "2", "--name", "hurt", "--strategy", "async")
    more = ("--restarts", "2", "--place", "pack", *server.words, "--env", "RUN_NOTES", "--env", "WAIT=1")
    more = (*more, "--snapshot", "off")
    with network.run(project, *words, *more) as run:
        os.kill(run.note("epoch-1", 180)["pid"], signal.SIGKILL)
        run.note("again", 180)
        run.note("epoch-0", 180)
        os.kill(server_in(network), signal.SIGKILL)
        may_end(run)
        outcome = run.finish(180)
    assert outcome.code == 0, outcome.err
    assert "rank 1 was killed by signal 9 (SIGKILL); it is started again" in outcome.err
    assert "server 0 was killed by signal 9 (SIGKILL); the team is started again with checkpoint" in outcome.err
    assert "rank 0 resumes with epoch" in outcome.out
    assert len(processes_of_rank_1(run)) == 3
    nothing_left(network)


def server_in(network: RayNetwork) -> int:
    """The process that an agent has started for the one server, which ends with it."""
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in network.pids()}
    found = [pid for pid, line in words.items() if b"server/main.py" in line]
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in found}
    (keeper,) = [pid for pid, parent in parents.items() if parent not in found]
    return keeper


def test_what_ends_the_driver_ends_all(network: RayNetwork, server: ForkServer, project: Path) -> None:
    words = ("run", "train.py", "--on", "ray", "--workers", "2", "--env", "RUN_NOTES", "--env", "WAIT=1")
    words = (*words, *server.words, "--name")
    with network.run(project, *words, "stopped") as stopped, network.run(project, *words, "killed") as killed:
        workers = [run.note("begins-0", 180)["pid"] for run in (stopped, killed)]
        stopped.process.send_signal(signal.SIGINT)
        killed.process.send_signal(signal.SIGKILL)
        outcome = stopped.finish(90)
        killed.finish(90)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), 60, "the end of all workers")
    assert outcome.code == 130
    assert "stopped by SIGINT; all workers have ended" in outcome.err
    assert outcome.tracebacks == 0
    assert (project / "runs" / "stopped" / "summary.json").exists()
    nothing_left(network)


def test_an_error_of_the_script_is_told_once_and_not_tried_again(
    network: RayNetwork, server: ForkServer, project: Path
) -> None:
    write_script(project, "import paceline\nteam = paceline.join()\nteam.barrier()\nraise KeyError('mine')\n", "bad.py")
    # Through the port for clients from outside the cluster.
    words = ("run", "bad.py", "--on", "ray://127.0.0.1:10001", "--name", "bad", *server.words)
    outcome = network.finished(project, *words)
    assert outcome.code == 1
    assert outcome.err.count("KeyError: 'mine'\n") + outcome.err.count('KeyError: "mine"\n') >= 1
    assert outcome.tracebacks == 1
    assert "started again" not in outcome.err


def test_too_little_room_is_one_sentence(network: RayNetwork, project: Path) -> None:
    outcome = network.finished(project, "run", "train.py", "--on", "ray", "--workers", "9")
    assert outcome.code == 2
    sentence = outcome.err.strip().splitlines()[-1]
    assert sentence.startswith(f"paceline: 9 workers need 9 CPU; the cluster has {2 * CORES} CPU ({2 * CORES} free)")
    assert "on 2 nodes" in sentence
    assert not (project / "runs").exists()


def test_the_doctor_examines_the_nodes_and_their_links(network: RayNetwork, project: Path) -> None:
    outcome = network.finished(project, "doctor", "--on", "ray", "--json")
    assert outcome.code == 0, outcome.err
    facts = json.loads(outcome.out)
    assert len(facts["machines"]) == 1  # both nodes are this machine
    assert len(facts["links"]["hosts"]) == 2
    assert facts["links"]["latency"][0][1] > 0 and facts["links"]["bandwidth"][1][0] > 0
    assert facts["links"]["bandwidth"][0][0] is None


def test_no_cluster_is_one_sentence(tmp_path: Path) -> None:
    write_script(tmp_path, "")
    words = [PACELINE, "run", "train.py", "--on", "ray"]
    outcome = finished(words, tmp_path, RAY_ADDRESS="127.0.0.1:9", RAY_USAGE_STATS_ENABLED="0")
    assert outcome.code == 2
    assert "paceline: no Ray cluster answers at '127.0.0.1:9'; start one with `ray start --head`" in outcome.err
    assert not (tmp_path / "runs").exists()


def test_without_ray_it_says_how_to_get_it(tmp_path: Path) -> None:
    write_script(tmp_path, "")
    (tmp_path / "none").mkdir()
    write_script(tmp_path / "none", "raise ModuleNotFoundError('No module named ray')\n", "ray.py")
    words = [PACELINE, "run", "train.py", "--on", "ray"]
    outcome = finished(words, tmp_path, PYTHONPATH=str(tmp_path / "none"))
    assert outcome.code == 2
    assert outcome.err == "paceline: --on ray needs Ray, which is not installed here: pip install 'paceline[ray]'\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--on", "moon"], "--on is 'moon'; it must be 'local', 'ray' or 'ray://HOST:PORT'"),
        (["--on", "ray", "--place", "up"], "--place is 'up'; it must be one of 'spread', 'pack'"),
        (["--on", "ray", "--each", "cpu=x"], "--each is 'cpu=x'; it must be like cpu=1,gpu=1"),
        (["--on", "ray", "--env", "NO_SUCH"], "--env is 'NO_SUCH'; it must be NAME=VALUE, or the NAME of a variable"),
        (["--env", "A=1"], "--env is for --on ray; this run is on local"),
        (["--place", "pack"], "--place is for --on ray; this run is on local"),
        (["--on", "ray", "--restarts", "-1"], "--restarts is -1; it must be 0 or more"),
    ],
)
def test_what_cannot_be_is_one_sentence(tmp_path: Path, words: list[str], sentence: str) -> None:
    write_script(tmp_path, "")
    with starting([PACELINE, "run", "train.py", *words], tmp_path) as run:
        outcome = run.finish()
    assert outcome.code == 2
    assert outcome.err.startswith(f"paceline: {sentence}")
    assert len(outcome.err.splitlines()) == 1
