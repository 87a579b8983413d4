"""Asynchronous training on two workers and one server, against the peers.

One command: `python benchmarks/parameter_server.py`.

Contestants take turns, in processes of their own: Paceline, torch.distributed.rpc, TensorFlow's ParameterServerStrategy
(in a virtual environment that this makes), and two processes that each train alone. What counts is the ratio of their
medians. `--without tensorflow` leaves one out.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.runs import ENVIRONMENT, train

HERE = Path(__file__).resolve().parent
PEERS = HERE / "peers"
TENSORFLOW = HERE.parent / ".venv-tensorflow"
WORKERS = 2
PARTS = 5
"""Of each turn, of which the median counts."""


def tensorflow() -> str:
    """The Python that has TensorFlow; made on first use."""
    python = TENSORFLOW / "bin" / "python"
    if not (TENSORFLOW / "ready").exists():
        print("installing TensorFlow into .venv-tensorflow", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(TENSORFLOW)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "tensorflow==2.21.0"], check=True)
        (TENSORFLOW / "ready").touch()
    return str(python)


SCRIPT = """
import json
import pathlib
import sys
import time

import paceline
import torch
from paceline.bench.contestants import Alone, Paceline
from paceline.bench.tasks import TrainTask
from paceline.bench.workloads import WORKLOADS
from paceline.cluster.process import return_freed_memory

task = json.loads(sys.argv[1])
team = paceline.join()
work = WORKLOADS[task["model"]]
kind = Paceline if task["contestant"] == "paceline" else Alone
if kind is Alone:
    return_freed_memory()  # as plain processes do
step = kind(work, TrainTask(model=work.name, contestants=[], batch=work.batch), team).step
for _ in range(5):
    step()
rates = []
for _ in range(task["rounds"]):
    team.barrier()
    start, count = time.perf_counter(), 0
    while time.perf_counter() < start + task["seconds"]:
        step()
        count += 1
    rates.append(count / (time.perf_counter() - start))
together = team.per_replica(rates).values
if team.is_lead:
    sums = [sum(parts) for parts in zip(*together, strict=True)]
    pathlib.Path(task["output"]).write_text(json.dumps({"minibatches_per_second": sums}))
"""


def ours(model: str, seconds: float, contestant: str) -> float:
    """Minibatches per second of all workers together."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        task = {"model": model, "contestant": contestant, "seconds": seconds / PARTS, "rounds": PARTS}
        strategy = "async" if contestant == "paceline" else "all-reduce"
        options = ["--workers", str(WORKERS), "--strategy", strategy]
        train(SCRIPT, Path(folder), *options, arguments=[json.dumps({**task, "output": str(output)})])
        rates: list[float] = json.loads(output.read_text())["minibatches_per_second"]
        return statistics.median(rates)


def peer(model: str, seconds: float, python: str, script: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        task = {"model": model, "workers": WORKERS, "seconds": seconds / PARTS, "rounds": PARTS, "output": str(output)}
        words = [python, str(PEERS / script), json.dumps(task)]
        subprocess.run(words, check=True, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
        rates: list[float] = json.loads(output.read_text())["minibatches_per_second"]
        return statistics.median(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each turn")
    parser.add_argument("--model", action="append", choices=["small", "mlp25m"], help="both by default")
    parser.add_argument("--without", action="append", default=[], choices=["rpc", "tensorflow", "alone"])
    options = parser.parse_args()
    contestants = {
        "paceline": lambda model: ours(model, options.seconds, "paceline"),
        "rpc": lambda model: peer(model, options.seconds, sys.executable, "rpc_server.py"),
        "tensorflow": lambda model: peer(model, options.seconds, tensorflow(), "tensorflow_server.py"),
        "alone": lambda model: ours(model, options.seconds, "alone"),
    }
    for name in options.without:
        del contestants[name]
    for model in options.model or ["small", "mlp25m"]:
        rates: dict[str, list[float]] = {name: [] for name in contestants}
        for number in range(options.rounds):
            for name, run in contestants.items():
                print(f"{model}: round {number + 1} of {options.rounds}: {name}", file=sys.stderr, flush=True)
                rates[name].append(run(model))
        own = statistics.median(rates["paceline"])
        for name, values in rates.items():
            if name != "paceline":
                print(f"{model}: {own / statistics.median(values):.2f} times {name}", flush=True)
        print(f"{model}: minibatches per second, by round: {json.dumps(rates)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
