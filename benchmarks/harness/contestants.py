"""Trainings that are hurt for a long time: how each is started, struck and stopped, and what of its work counts."""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from helpers.hosts import hosts

from paceline.events import LeaseGiven, Push, Seen, Update, read
from paceline.transport.keys import new_key

PEERS = Path(__file__).resolve().parents[1] / "peers"
TORCHFT = PEERS.parents[1] / ".venv-torchft"
BATCH, WORKERS = 32, 2
"""As in `peers/soak_task.py`."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@dataclasses.dataclass
class Work:
    """What a training has done."""

    counted: list[tuple[float, int]]
    """Time and samples of each update that belongs to the history of the final model."""
    lost: int = 0
    """Samples that were passed over without an effect."""
    twice: int = 0
    """Samples that count more than once in an epoch."""
    again: int = 0
    """Samples whose work was undone and had to be done again."""
    loss: float = float("nan")


class Contestant(abc.ABC):
    """One training in a folder of its own."""

    name: str
    targets: Sequence[str]
    """Processes that are killed or stopped, in turn."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)

    @abc.abstractmethod
    def start(self) -> None: ...

    @abc.abstractmethod
    def work(self) -> Work:
        """What it has done, after it has ended."""

    @property
    @abc.abstractmethod
    def alive(self) -> bool: ...

    def find(self, target: str) -> int | None:
        """The process of a target, `worker N`; None if it is not there."""
        with contextlib.suppress(OSError, ValueError):
            pid = int((self.folder / f"worker-{target.split()[1]}.pid").read_text())
            os.kill(pid, 0)
            return pid
        return None

    @property
    def begun(self) -> bool:
        """True if every worker has trained."""
        return all((path := self._log(rank)).exists() and path.stat().st_size > 0 for rank in range(WORKERS))

    def _log(self, rank: int) -> Path:
        return self.folder / f"steps-{rank}.log"

    def _lines(self, rank: int) -> list[list[str]]:
        return [line.split() for line in self._log(rank).read_text().splitlines()]

    def samples(self) -> int:
        """About as many as were trained on so far."""
        return sum(self._log(rank).read_bytes().count(b"\n") * BATCH for rank in range(WORKERS))

    def stop(self, seconds: float = 120.0) -> None:
        """Lets it end by itself."""
        (self.folder / "stop").touch()
        until = time.monotonic() + seconds
        while self.alive:
            if time.monotonic() > until:
                self.end()
                sys.exit(f"{self.name} did not end in {seconds:g} s; see {self.folder}")
            time.sleep(0.05)

    @abc.abstractmethod
    def end(self) -> None:
        """Ends its processes at once."""

    def _loss(self) -> float:
        paths = sorted(self.folder.glob("loss-*"))
        return float(paths[0].read_text()) if paths else float("nan")

    def _popen(self, words: Sequence[str], name: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.out").open("ab") as out:
            return subprocess.Popen(words, cwd=self.folder, env=ENVIRONMENT, stdout=out, stderr=out)


class Paceline(Contestant):
    """Two workers and a server process; lost workers are started again."""

    name = "paceline"
    targets: Sequence[str] = ("worker 1", "server 0", "worker 0", "stop 1")

    def __init__(self, folder: Path, strategy: str) -> None:
        super().__init__(folder)
        self.name, self._strategy = f"paceline, {strategy}", strategy
        if strategy.startswith("all-reduce"):
            self.targets = ("worker 1", "stop 1")

    def start(self) -> None:
        options = ["--workers", str(WORKERS), "--strategy", self._strategy, "--restarts", "100000", "--name", "run"]
        options += ["--record-limit", "off", "--snapshot", "off", "--timeout", "60", "--quiet"]
        script = str(PEERS / "soak_paceline.py")
        words = [sys.executable, "-m", "paceline", "run", script, *options, "--", str(self.folder)]
        self._process = self._popen(words, "paceline")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def find(self, target: str) -> int | None:
        if not target.startswith("server"):
            return super().find(target)
        others = {super(Paceline, self).find(f"worker {rank}") for rank in range(WORKERS)}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                name, _, rest = (path / "stat").read_text().rpartition(")")
                spare = name.endswith("(paceline spare")
                if int(rest.split()[1]) == self._process.pid and int(path.name) not in others and not spare:
                    return int(path.name)
        return None

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(60)

    def work(self) -> Work:
        if self._process.returncode:
            sys.exit(f"{self.name} ended with {self._process.returncode}; see {self.folder}/paceline.out")
        events = list(read(self.folder / "runs" / "run" / "events.jsonl"))
        pushes = {event.ticket: event for event in events if isinstance(event, Push)}
        if not pushes:
            return self._without_server()
        leases = {event.number: event for event in events if isinstance(event, LeaseGiven)}
        counted, done = list[tuple[float, int]](), collections.Counter[tuple[int, int]]()
        numbers = list[int]()
        for event in events:
            if isinstance(event, Update):
                used = [pushes[ticket] for ticket in event.pushes]
                counted.append((event.start + event.seconds, sum(push.samples for push in used)))
                numbers += [number for push in used for number in push.leases]
            elif isinstance(event, Seen):
                numbers += event.leases
        for lease in map(leases.__getitem__, numbers):
            done.update((lease.epoch, place) for place in range(lease.first, lease.first + lease.samples))
        epochs = collections.Counter(epoch for epoch, _ in done)
        full = max(place for _, place in done) + 1
        lost = sum(full - epochs[number] for number in range(max(epochs)))  # the last one was not finished
        twice = sum(count - 1 for count in done.values())
        return Work(counted, lost, twice, 0, self._loss())

    def _without_server(self) -> Work:
        """All workers are in every update: the steps of all, each with its share of the samples."""
        lines = [(float(moment), int(samples)) for rank in range(WORKERS) for moment, samples in self._lines(rank)]
        return Work(sorted(lines), loss=self._loss())


class PacelineHosts(Paceline):
    """A worker and the server on one host, and a worker of another host that has joined them; as root.

    Hosts are network namespaces. A killed worker of the first is started again; the cable of the second is pulled.
    """

    targets = ("worker 0", "cable 1")

    def __init__(self, folder: Path, strategy: str) -> None:
        super().__init__(folder, strategy)
        self.name, self.targets = f"paceline, {strategy}, two hosts", type(self).targets
        self._open = contextlib.ExitStack()

    def start(self) -> None:
        self._hosts = self._open.enter_context(hosts(2))
        script, door = str(PEERS / "soak_paceline.py"), 29600
        environment = {**ENVIRONMENT, "PACELINE_KEY": new_key()}
        common = [sys.executable, "-m", "paceline", "run", script, "--workers", "1", "--timeout", "60", "--quiet"]
        options = ["--strategy", self._strategy, "--restarts", "100000", "--name", "run", "--open", str(door)]
        options += ["--record-limit", "off", "--snapshot", "off"]
        joins = ["--join", f"{self._hosts[0].address}:{door}"]
        for name, host, own in zip(("paceline", "joining"), self._hosts, (options, joins), strict=True):
            with (self.folder / f"{name}.out").open("ab") as out:
                words = [*common, *own, "--", str(self.folder)]
                process = host.popen(words, cwd=self.folder, env=environment, stdout=out, stderr=out)
            if name == "paceline":
                self._process = process
                while not self._log(0).exists() and self.alive:
                    time.sleep(0.1)

    def cut(self, seconds: float) -> None:
        """Pulls the cable of the second host for a while."""
        self._hosts[1].cable(False)
        time.sleep(seconds)
        self._hosts[1].cable(True)

    def work(self) -> Work:
        self._open.close()
        return super().work()

    def end(self) -> None:
        super().end()
        self._open.close()


class TorchFT(Contestant):
    """A lighthouse and two replicas, each of which is started again when it is gone."""

    name = "torchft 0.2.0, DDP"
    targets = ("worker 1", "worker 0", "worker 1", "stop 1")

    def start(self) -> None:
        python = torchft()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
        lighthouse = [str(Path(python).with_name("torchft_lighthouse")), "--bind", f"[::]:{port}", *options]
        self._lighthouse = self._popen(lighthouse, "lighthouse")
        script = str(PEERS / "torchft_ddp.py")
        address = f"http://{socket.gethostname()}:{port}"
        self._words = [[python, script, str(self.folder), str(rank), address] for rank in range(WORKERS)]
        self._replicas = [self._popen(words, f"replica-{rank}") for rank, words in enumerate(self._words)]
        self._watch = threading.Thread(target=self._start_again, daemon=True)
        self._watch.start()

    def _start_again(self) -> None:
        while not (self.folder / "stop").exists():
            for rank, replica in enumerate(self._replicas):
                if replica.poll() is not None:
                    self._replicas[rank] = self._popen(self._words[rank], f"replica-{rank}")
            time.sleep(0.1)

    @property
    def alive(self) -> bool:
        going = any(replica.poll() is None for replica in self._replicas)
        if not going:
            self._lighthouse.kill()
            self._lighthouse.wait()
        return going

    def end(self) -> None:
        self._watch.join(10)
        for process in (*self._replicas, self._lighthouse):
            process.kill()
            process.wait()

    def work(self) -> Work:
        """Its steps; those that a replica made before both began anew, at an earlier step, have no effect."""
        steps = sorted(
            (float(moment), rank, int(number), int(step) if int(committed) else 0)
            for rank in range(WORKERS)
            for moment, number, committed, step in self._lines(rank)
        )
        seen, counted = collections.Counter[tuple[int, int]](), list[tuple[float, int, int, int]]()
        for moment, rank, number, step in steps:
            seen[rank, number] += bool(step)
            if step and counted and step < max(counted[-WORKERS:], key=lambda one: one[3])[3] - 1:
                undone = [one for one in counted if one[3] >= step]
                seen.subtract((by, place) for _, by, place, _ in undone)
                counted = [one for one in counted if one[3] < step]
            if step:
                counted.append((moment, rank, number, step))
        lost = BATCH * sum(not count for count in seen.values())
        twice = BATCH * sum(count - 1 for count in seen.values() if count > 1)
        return Work([(moment, BATCH) for moment, *_ in counted], lost, twice, 0, self._loss())


class Torchrun(Contestant):
    """DDP under torchrun, which starts all workers again from the last checkpoint."""

    name = "torchrun, DDP, checkpoints"
    targets = ("worker 1", "worker 0", "worker 1", "stop 1")
    every = 5.0
    """Seconds between checkpoints."""

    def start(self) -> None:
        options = ["--nproc-per-node", str(WORKERS), "--max-restarts", "100000", "--monitor-interval", "0.1"]
        options.append("--standalone")
        script = str(PEERS / "torchrun_ddp.py")
        words = [sys.executable, "-m", "torch.distributed.run", *options, script, str(self.folder), str(self.every)]
        self._process = self._popen(words, "torchrun")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(60)

    def work(self) -> Work:
        if self._process.returncode:
            sys.exit(f"{self.name} ended with {self._process.returncode}; see {self.folder}/torchrun.out")
        newest: dict[int, float] = {}
        steps = self._lines(0)
        for moment, step, _ in steps:
            for later in [one for one in newest if one >= int(step)]:
                del newest[later]
            newest[int(step)] = float(moment)
        again = (len(steps) - len(newest)) * BATCH * WORKERS
        return Work([(moment, BATCH * WORKERS) for moment in newest.values()], again=again, loss=self._loss())


def torchft() -> str:
    """The Python that has torchft; made on first use."""
    python = TORCHFT / "bin" / "python"
    if not (TORCHFT / "ready").exists():
        print("installing torchft into .venv-torchft", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(TORCHFT)], check=True)
        versions = ["torchft==0.2.0", "torch==2.13.0", "numpy"]
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *versions], check=True)
        (TORCHFT / "ready").touch()
    return str(python)
