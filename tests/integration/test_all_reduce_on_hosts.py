"""All-reduce between real separate hosts: what crosses the cable, what happens when it is pulled, and torchrun."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # any optimizer imports it, which takes seconds: once here, not once in every fork
import yaml
from helpers.fork_server import ForkServer
from helpers.forks import starting
from helpers.hosts import Host, hosts
from helpers.machines import Failure, Spread
from helpers.support import PYTHON, TORCHRUN, finished, free_port, started, wait_until, write_script
from helpers.teams import run_team
from helpers.training import adamw, apart, in_team, plain, same_bits
from torch import nn

from paceline import Team
from paceline.config import Timeouts

torch.set_num_threads(1)
ROOT = Path(__file__).parents[2]
RESUME = ROOT / "examples" / "train_resume.py"
SIZE = 8 * 2**20
"""Bytes of the gradients whose way is watched."""
HEADER = 14 + 20 + 32
"""Of Ethernet, IP, and TCP with its timestamps."""


def crossed(team: Team) -> tuple[list[float], int]:
    """Bytes that leave and reach this host in an update."""
    model: Any = nn.Linear(2048, SIZE // 4 // 2048, bias=False)
    model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    statistics = Path("/proc/net/dev")
    found = []
    for _ in range(5):
        team.barrier()
        before = _payload(statistics)
        team.barrier()
        model(torch.ones(1, 2048)).sum().backward()
        optimizer.step()
        team.barrier()
        found.append(_payload(statistics) - before)
        optimizer.zero_grad()
    return found, len(team._members.machines)


def _payload(path: Path) -> int:
    """Bytes sent over the cable since it was plugged in, without the headers of packets."""
    line = next(line for line in path.read_text().splitlines() if "eth0" in line)
    sent, packets = (int(number) for number in line.split(":")[1].split()[8:10])
    return sent - HEADER * packets


def test_each_byte_crosses_the_cable_once() -> None:
    with hosts(2) as made, Spread(crossed, made, 2, strategy="all-reduce") as team:
        for found, machines in team.values():
            assert machines == 2
            # Of M = 2 machines each sends 2(M−1)/M·S = S, and some notes; at times TCP sends a little of it again.
            assert SIZE <= min(found) <= 1.001 * SIZE
            assert max(found) <= 1.1 * SIZE


def test_learns_over_hosts_what_one_process_learns(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with (
        hosts(3) as made,
        Spread(in_team, made, 1, adamw, torch.float64, 2, strategy="all-reduce", folder=folder) as team,
    ):
        results = team.values()
        assert apart(results[0], plain(adamw, torch.float64, 2)) < 1e-12
        assert all(same_bits(results[0], other) for other in results[1:])
        events = team.events()
    for rank in range(3):
        assert sum(type(event).__name__ == "Update" and event.rank == rank for event in events) == 10
    assert sorted({type(event).__name__ for event in events} & {"Join", "Leave"}) == ["Join", "Leave"]
    assert not list(folder.glob("machine-*"))


def look_at_links(team: Team) -> tuple[list[int], list[list[float]]]:
    model: Any = nn.Linear(256, 256)
    model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    between = team._trainer._machines.between  # type: ignore[union-attr]
    return between.order, between.links.bandwidth


def slow_down(host: Host, to: Host, rate: str) -> None:
    """Let what a host sends to one other go at this rate, and all else as it did."""
    for words in (
        "qdisc add dev eth0 root handle 1: htb default 10",
        "class add dev eth0 parent 1: classid 1:10 htb rate 10gbit quantum 60000",
        f"class add dev eth0 parent 1: classid 1:20 htb rate {rate} quantum 60000",
        f"filter add dev eth0 parent 1: protocol ip u32 match ip dst {to.address}/32 flowid 1:20",
    ):
        subprocess.run(["tc", "-n", host.name, *words.split()], check=True, capture_output=True)


def test_the_ring_follows_the_fast_links() -> None:
    with hosts(4) as made:
        slow = [(0, 1), (2, 3)]  # of which both would be in a ring in the order of machines
        for one, other in slow:
            slow_down(made[one], made[other], "20mbit")
            slow_down(made[other], made[one], "20mbit")
        with Spread(look_at_links, made, 1, strategy="all-reduce:topology=ring") as team:
            results = team.values()
    order, bandwidth = results[0]
    assert all(found == order for found, _ in results)
    for one, other in slow:
        assert bandwidth[one][other] < 20e6 / 8 * 1.5
        assert abs(order.index(one) - order.index(other)) == 2


# -- the cable -------------------------------------------------------------------------------------------------------


def keep_training(team: Team, folder: str, seconds: float) -> int:
    model: Any = nn.Linear(64, 64)
    model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    Path(folder, f"began-{team.rank}").touch()
    start, steps = time.monotonic(), 0
    while team.per_replica(time.monotonic() - start < seconds)[0]:
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps


@pytest.mark.parametrize(("pulled", "timeout"), [(3.0, 20.0), (8.0, 3.0)], ids=["3 s", "too long"])
def test_a_pulled_cable_heals_or_is_named(tmp_path: Path, pulled: float, timeout: float) -> None:
    timeouts = Timeouts(join=30.0, barrier=timeout)
    arguments = (str(tmp_path), pulled + 3.0)
    with hosts(2) as made, Spread(keep_training, made, 2, *arguments, strategy="all-reduce", timeouts=timeouts) as team:
        wait_until(lambda: len(list(tmp_path.glob("began-*"))) == 4, 40.0, "the team")
        time.sleep(0.5)
        made[1].cable(plugged=False)
        time.sleep(pulled)
        made[1].cable(plugged=True)
        results = team.results(40.0)
    if pulled < timeout:
        assert all(isinstance(steps, int) and steps > 10 for steps in results), results
        assert len(set(results)) == 1
        return
    for rank, failure in enumerate(results):
        assert isinstance(failure, Failure)
        assert failure.kind in ("TeamTimeout", "WorkerLost"), failure
        assert made[1 - rank // 2].address in failure.message


# -- torchrun --------------------------------------------------------------------------------------------------------

STRUCK = f"""
import os, runpy, signal, sys, paceline
save = paceline.Team.save
def hook(team, path, **extra):
    result = save(team, path, **extra)
    if team.rank == 1 and extra["epochs"] == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        team.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    if extra["epochs"] == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        team.barrier()
    return result
paceline.Team.save = hook
sys.argv[0] = {str(RESUME)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""The example, in which a worker is killed after its second epoch, unless it has been started again."""


def agent(node: int, address: str, port: int, *words: Any, each: int) -> list[str]:
    place = ["--nnodes", "2", "--nproc-per-node", str(each), "--node-rank", str(node)]
    return [TORCHRUN, *place, "--master-addr", address, "--master-port", str(port), *map(str, words)]


def said_loss(out: str) -> float:
    found = re.search(r"loss ([0-9.]+) after", out)
    assert found, out
    return float(found[1])


def play(team: Team, folder: str) -> float:
    """The example as it is, in a team on one machine."""
    sys.argv = [str(RESUME), "--epochs", "4", "--checkpoint", f"{folder}/calm.pt"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(str(RESUME), run_name="__main__")
    return said_loss(out.getvalue()) if team.is_lead else 0.0


def test_torchrun_trains_over_hosts_and_restarts_a_killed_worker(tmp_path: Path) -> None:
    script = write_script(tmp_path, STRUCK)
    calm = run_team(play, 2, str(tmp_path))[0]
    with hosts(2) as made:
        folders = [tmp_path / "one", tmp_path / "other"]  # which do not see each other's files
        runs = []
        for node, (host, folder) in enumerate(zip(made, folders, strict=True)):
            folder.mkdir()
            words = ("--max-restarts", 2, script, "--epochs", 4, "--checkpoint", "c.pt", "--name", "run")
            runs.append(starting(agent(node, made[0].address, 29400, *words, each=1), folder, host=host))
        with runs[0] as lead, runs[1] as other:
            outcome = lead.finish(200.0)
            assert (outcome.code, other.finish(30.0).code) == (0, 0), outcome.err
    assert "going on after epoch 2" in outcome.out
    assert said_loss(outcome.out) == calm
    summary = json.loads((folders[0] / "runs" / "run" / "summary.json").read_text())
    assert summary["world_size"] == 2
    assert len(summary["workers"]) == 2
    assert all(worker["minibatches"] >= 2 * 16 for worker in summary["workers"].values())
    assert not (folders[1] / "c.pt").exists()


COUNT = """
import os, pathlib, signal, sys
import torch, paceline
torch.manual_seed(0)
team = paceline.join()
model = torch.nn.Embedding(48, 1)
torch.nn.init.zeros_(model.weight)
loader = torch.utils.data.DataLoader(range(48), 4, shuffle=True)
model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
for epoch in range(int(sys.argv[1])):
    for index in loader:
        model(index).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if writer := team._training.snapshots._writer:
            writer.join()  # so that every second version has a snapshot
        found = [int(path.stem) for path in pathlib.Path("runs/first/snapshots").glob("[0-9]*.pt")]
        if first and sys.argv[2:] and max(found, default=0) >= 14:
            os.kill(os.getpid(), signal.SIGKILL)
team.barrier()
team.close()
if team.is_lead:
    print("counts", sorted({-int(row) for row in model.weight.detach().flatten()}), flush=True)
"""


def test_torchrun_starts_a_team_again_from_its_newest_snapshot_and_resumes_it_over_hosts(tmp_path: Path) -> None:
    script = write_script(tmp_path, COUNT)
    folders = [tmp_path / "one", tmp_path / "other"]  # which do not see each other's files
    for folder in folders:
        folder.mkdir()
    with hosts(2) as made:
        for command, said in [
            (("--name", "first", "--snapshot", "0s", "--", "3", "dies"), "goes on from snapshot"),
            (("--resume", "first", "--", "5"), "epochs are over in the run before"),
        ]:
            runs = []
            for node, (host, folder) in enumerate(zip(made, folders, strict=True)):
                words = ("--max-restarts", 1, "-m", "paceline", "run", script, *command)
                runs.append(starting(agent(node, made[0].address, 29400, *words, each=1), folder, host=host))
            with runs[0] as lead, runs[1] as other:
                outcome = lead.finish(200.0)
                assert (outcome.code, other.finish(30.0).code) == (0, 0), outcome.err
            assert said in outcome.err
            assert f"counts [{command[command.index('--') + 1]}]" in outcome.out
    assert not (folders[1] / "runs" / "first" / "snapshots").exists()


GROWING = """
import os, pathlib, sys, time
import torch, paceline
torch.manual_seed(0)
team = paceline.join()
model = torch.nn.Embedding(96, 1)
torch.nn.init.zeros_(model.weight)
loader = torch.utils.data.DataLoader(range(96), 4, shuffle=True)
model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)
for epoch in range(3):
    for index in loader:
        model(index).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        pathlib.Path(f"trained-{team.world_size}").touch()
        time.sleep(0.0 if team.world_size > 1 or pathlib.Path("go-on").exists() else 0.2)
        while team.world_size > 1 and not pathlib.Path("go-on").exists():
            time.sleep(0.01)
team.barrier()
team.close()
if team.is_lead:
    print(team.world_size, "counts", sorted({-int(row) for row in model.weight.detach().flatten()}), flush=True)
"""


def test_torchrun_takes_a_machine_in_and_the_team_goes_on_from_its_newest_snapshot(tmp_path: Path) -> None:
    script = write_script(tmp_path, GROWING)
    folders = [tmp_path / "one", tmp_path / "other"]  # which do not see each other's files
    with hosts(2) as made, contextlib.ExitStack() as stack:
        runs = []
        for host, folder in zip(made, folders, strict=True):
            folder.mkdir()
            place = ["--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "run"]
            place += [
                "--rdzv-endpoint",
                f"{made[0].address}:29400",
                "--rdzv-conf",
                f"is_host={int(not runs)},last_call_timeout=1",
            ]
            place += ["--monitor-interval", "0.1", "--local-addr", host.address]
            words = ["-m", "paceline", "run", str(script), "--strategy", "all-reduce", "--name", "first"]
            command = [TORCHRUN, *place, *words, "--snapshot", "0s"]
            # In torch 2.13 a torchrun that joins waits in vain for the address of a store that is shared.
            own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            runs.append(stack.enter_context(starting(command, folder, host=host, **own)))
            trained = [one / f"trained-{len(runs)}" for one in folders]
            wait_until(lambda paths=trained: any(map(Path.exists, paths)), 90, f"{len(runs)} to train")
            if len(runs) == 1:
                wait_until(lambda: len(list(folders[0].glob("runs/first/snapshots/[0-9]*.pt"))) > 1, 60, "snapshots")
        for folder in folders:
            (folder / "go-on").touch()
        outcomes = [run.finish(120.0) for run in runs]
    said = "".join(outcome.out + outcome.err for outcome in outcomes)
    assert [outcome.code for outcome in outcomes] == [0, 0], said
    assert said.count("torchrun has started the team again, which goes on from snapshot") == 1, said
    assert "2 counts [3]" in said, said


TOLD = """
import paceline, torch
team = paceline.join("all-reduce", name="of-the-script")
model = torch.nn.Linear(8, 1)
data = torch.utils.data.TensorDataset(torch.ones(64, 8), torch.ones(64, 1))
loader = torch.utils.data.DataLoader(data, batch_size=16)
model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
for x, y in loader:
    with team.step():
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
if team.is_lead:  # two who write to one pipe at once write into each other's lines
    print("told", team.rank, team.strategy, flush=True)
"""


def test_workers_of_torchrun_are_told_what_paceline_run_can_be_told(tmp_path: Path) -> None:
    script = write_script(tmp_path, TOLD)
    words = ("--strategy", "k-async:k=1", "--servers", "all", "--slow", "3:0.05+exp(0.01)", "--name", "told")
    with hosts(2) as made:
        folders = [tmp_path / "one", tmp_path / "other"]
        runs = []
        for node, (host, folder) in enumerate(zip(made, folders, strict=True)):
            folder.mkdir()
            line = agent(node, made[0].address, 29400, "-m", "paceline", "run", script, *words, each=2)
            runs.append(starting(line, folder, host=host, PACELINE_KEY="1" * 64))
        with runs[0] as lead, runs[1] as other:
            outcome = lead.finish(200.0)
            assert (outcome.code, other.finish(30.0).code) == (0, 0), outcome.err
    assert "told 0 k-async:k=1" in outcome.out
    summary = json.loads((folders[0] / "runs" / "told" / "summary.json").read_text())
    assert summary["strategy"] == "k-async:k=1"
    assert summary["minibatches"] == 16
    slow = summary["workers"]["3"]
    assert slow["minibatches"] == 0 or slow["computing"] / slow["minibatches"] >= 0.05


def test_what_is_torchruns_is_refused_in_one_sentence(tmp_path: Path) -> None:
    script = write_script(tmp_path, TOLD)
    command = [PYTHON, "-m", "paceline", "run", script, "--workers", "3", "--restarts", "1"]
    outcome = finished(command, tmp_path, TORCHELASTIC_RUN_ID="none", RANK="0", WORLD_SIZE="2")
    assert outcome.code == 2
    assert outcome.err == (
        "paceline: --workers, --restarts: torchrun has started this worker, and decides how many there are, where, "
        "what is shown of them and what is started again (--nproc-per-node, --max-restarts)\n"
    )


# -- other people's clusters -----------------------------------------------------------------------------------------


def commands(tmp_path: Path, name: str, text: str) -> None:
    path = write_script(tmp_path, text, name)
    path.chmod(0o755)


TOGETHER = f"""
import runpy, sys, paceline
sys.argv[0] = {str(RESUME)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
team = paceline.join()
if team.is_lead:
    print("machines", team._members.machines, flush=True)
"""
"""The example, which says in the end who shared memory with whom."""


def test_the_slurm_script_starts_a_torchrun_per_machine(tmp_path: Path) -> None:
    """Its commands are executed, with SLURM's own two replaced: `scontrol` names hosts, `srun` starts on each."""
    # In one write: its reader takes the first line and leaves.
    commands(tmp_path, "scontrol", "#!/bin/sh\nprintf '127.0.0.1\\nother\\n'\n")
    commands(
        tmp_path,
        "srun",
        """#!/bin/bash
shift
for node in 0 1; do SLURM_PROCID=$node "$@" & pids="$pids $!"; done
for pid in $pids; do wait $pid || exit 1; done
""",
    )
    environment = {
        "PATH": f"{tmp_path}:{Path(PYTHON).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "2",
        "WORKERS": "1",
        "SCRIPT": str(write_script(tmp_path, TOGETHER)),
    }
    command = ["bash", ROOT / "examples" / "cluster" / "slurm.sbatch", "--epochs", "1"]
    with ForkServer() as server, started(command, tmp_path, **environment, **server.variables) as run:
        outcome = run.finish(120.0)
    assert outcome.code == 0, outcome.err
    assert "loss " in outcome.out
    # Two agents on one host are one machine.
    assert "machines [[0, 1]]" in outcome.out


def test_the_kubernetes_job_starts_a_torchrun_per_pod(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "cluster" / "kubernetes.yaml").read_text()
    parts = {part["kind"]: part for part in yaml.safe_load_all(text)}
    assert set(parts) == {"Service", "Secret", "Job"}
    job = parts["Job"]["spec"]
    assert job["completionMode"] == "Indexed"
    pod = job["template"]["spec"]
    assert pod["subdomain"] == parts["Service"]["metadata"]["name"]
    container = pod["containers"][0]
    given = {entry["name"]: entry.get("value", "0" * 64) for entry in container["env"]}
    assert given["MASTER"] == f"{parts['Job']['metadata']['name']}-0.{pod['subdomain']}"
    assert int(given["NODES"]) == job["completions"] == job["parallelism"]
    # The command line of each pod, on this machine: another master, fewer workers, and no volume.
    given |= {"MASTER": "127.0.0.1", "WORKERS": "1", "PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}"}
    line = container["args"][0].replace("/checkpoints/", f"{tmp_path}/").replace("--epochs 10", "--epochs 1")
    line = line.replace("29400", str(free_port())).replace("examples/", f"{ROOT}/examples/")
    with ForkServer() as server, contextlib.ExitStack() as stack:
        given |= server.variables
        runs = [
            started([*container["command"], line], tmp_path, **given, JOB_COMPLETION_INDEX=str(pod_number))
            for pod_number in range(2)
        ]
        first, second = (stack.enter_context(run) for run in runs)
        outcome = first.finish(120.0)
        assert (outcome.code, second.finish(30.0).code) == (0, 0), outcome.err
    assert "loss " in outcome.out
