"""Runs that are hurt at points which a seed draws, and what they have done wrong: by their events, and by a model that
counts how often each sample was applied.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from helpers.checker import violations
from helpers.counting import Counting
from helpers.forks import QuickRun, playing
from helpers.hosts import hosts
from helpers.machines import Failure, Spread
from helpers.support import PACELINE, Run, started, wait_until, write_script
from paceline import failpoints
from paceline.config import Launch, Timeouts
from paceline.events import Join, Push, Recovery, Update, read
from paceline.failpoints import Fault, draw_fault, parse_faults

WORKERS, SAMPLES, EPOCHS = 3, 90, 2

SCRIPT = """
import json, os, pathlib, sys
import paceline
from helpers.faulted import count

team = paceline.join()
found = count(team, *map(int, sys.argv[1:]))
pathlib.Path(os.environ["RUN_NOTES"], f"counts-{team.rank}").write_text(json.dumps(found))
"""


def count(team: Any, samples: int, epochs: int, loaders: int, pause: float = 0.0) -> list[float]:
    """Trains on every sample once an epoch; returns how often each was applied to this worker's last version.

    pause: seconds that every step takes longer.
    """
    torch.manual_seed(5)
    model = Counting(samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = TensorDataset(torch.arange(samples))
    loader = DataLoader(data, batch_size=2 * team.world_size, shuffle=True, num_workers=loaders)
    model, optimizer, loader = team.setup(model, optimizer, loader)
    for _ in range(epochs):
        for (numbers,) in loader:
            with team.step():
                model(numbers).sum().backward()  # a sum: every sample adds 1, however many are in an update
                time.sleep(pause)
                optimizer.step()
                optimizer.zero_grad()
    return [float(value) for value in model.counts.detach()]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A kind of fault, and the runs that must survive it."""

    name: str
    strategies: Sequence[str]
    points: Sequence[str]
    processes: Sequence[str]
    """Those that it happens in."""
    actions: Sequence[str]
    words: Sequence[str] = ()
    """Options of `paceline run`."""
    faults: int = 1
    """How many there are in a run."""
    latest: int = 12
    """Which time at a point is the last that is drawn."""
    first: str = ""
    """Further faults, as the environment variable gives them, which every run has."""
    loaders: int = 0
    """Processes of each worker's loader."""

    def case(self, seed: int) -> Case:
        """One run of it."""
        source = random.Random(f"{self.name}/{seed}")
        strategy = self.strategies[seed % len(self.strategies)]
        faults = []
        for number in range(self.faults):
            point = self.points[(seed // len(self.strategies) + number) % len(self.points)]  # all of them, in turn
            faults.append(draw_fault(source, [point], tuple(self.actions), tuple(self.processes), self.latest))
        faults += parse_faults(self.first)
        stopped = source.uniform(0.2, 1.0)
        return Case(self.name, seed, strategy, tuple(self.words), tuple(faults), stopped, self.loaders)


SPARING = ("async", "k-sync:k=2", "k-batch-sync:k=2", "k-async:k=2", "k-batch-async:k=2", "ssp:s=1", "groups:size=1")
"""Policies that can do without one of three workers."""
POLICIES = ("sync", *SPARING, "adaptive:of=k-async,start=1")
STEP = ("push.made", "request.sent", "pull.begin", "pull.done")
COORDINATOR = (
    *("push.received", "push.held", "update.begin", "update.chunk", "chunk.written", "update.written"),
    *("update.published", "answer.begin", "answer.sent"),
)
REDUCE = ("reduce.agreed", "update.chunk", "reduce.written", "reduce.published")
RECOVER = ("recover.begin", "recover.entry", "recover.done")
JOIN = ("join.begin", "join.sent", "join.done")
_RANKS = tuple(f"worker{rank}" for rank in range(WORKERS))
_LEFT, _AGAIN = ("--elastic",), ("--restarts", "3")
_SERVERS, _TWO = ("server0", "server1"), ("--servers", "2")
_CHUNK, _COLLECT = ("update.chunk", "chunk.written"), ("collect.chunk", "chunk.written")
_COLLECTING = ("k-batch-sync:k=2", "k-batch-async:k=2")
"""Policies under which a server adds gradients to a sum before it updates."""

SCENARIOS = (
    Scenario("worker killed", SPARING, STEP, _RANKS, ("kill",)),
    Scenario("worker killed, elastic", POLICIES, STEP, _RANKS, ("kill",), _LEFT),
    Scenario("worker killed, started again", POLICIES, STEP, _RANKS, ("kill",), _AGAIN),
    Scenario("two workers killed, started again", POLICIES, STEP, _RANKS, ("kill",), _AGAIN, faults=2),
    Scenario("worker with loader processes killed", POLICIES, STEP, _RANKS, ("kill",), _AGAIN, loaders=1),
    Scenario(
        "worker killed as it joins", POLICIES, JOIN, ("worker1",), ("kill",), _AGAIN, 1, 1, "worker1/push.made:3:kill"
    ),
    Scenario("worker stopped for a second", POLICIES, STEP, _RANKS, ("stop",)),
    Scenario("worker delayed", POLICIES, STEP, _RANKS, ("delay",), (), 3),
    Scenario("server stopped for a second", POLICIES, COORDINATOR, ("server0",), ("stop",)),
    Scenario("server of a shard stopped", POLICIES, ("update.chunk",), ("server1",), ("stop",), ("--servers", "2")),
    Scenario("server delayed", POLICIES, COORDINATOR, ("server0",), ("delay",), ("--servers", "2"), 3),
    Scenario("server killed", POLICIES, COORDINATOR, ("server0",), ("kill",)),
    Scenario("server killed, of two", POLICIES, COORDINATOR, ("server0",), ("kill",), _TWO, loaders=1),
    Scenario(
        "server of a shard killed",
        POLICIES,
        ("update.chunk", "chunk.written"),
        ("server1",),
        ("kill",),
        ("--servers", "2"),
    ),
    Scenario(
        "server killed while it collects",
        _COLLECTING,
        ("collect.chunk", "chunk.written"),
        _SERVERS,
        ("kill",),
        ("--servers", "2"),
    ),
    Scenario(
        "both servers killed", POLICIES, ("update.chunk", "chunk.written"), _SERVERS, ("kill",), ("--servers", "2"), 2
    ),
    Scenario("server killed twice", POLICIES, COORDINATOR, ("server0",), ("kill",), (), 2),
    Scenario("server killed late", POLICIES, ("push.received", "answer.sent"), ("server0",), ("kill",), latest=80),
    Scenario("server killed, with snapshots", POLICIES, COORDINATOR, ("server0",), ("kill",), ("--snapshot", "0.02s")),
    Scenario(
        *("server killed as a worker joins", POLICIES, ("join.admitted",), ("server0",), ("kill",), _AGAIN, 1, 1),
        "worker1/push.made:3:kill",
    ),
    Scenario("all-reduce: worker killed", ("all-reduce",), REDUCE, _RANKS, ("kill",), _LEFT),
    Scenario("all-reduce: two workers killed", ("all-reduce",), REDUCE, _RANKS, ("kill",), _LEFT, 2),
    Scenario("all-reduce: worker stopped", ("all-reduce",), REDUCE, _RANKS, ("stop",)),
    Scenario("all-reduce: worker delayed", ("all-reduce",), REDUCE, _RANKS, ("delay",), (), 3),
    Scenario(
        *("server killed in a snapshot", POLICIES, ("snapshot.marked", "snapshot.copy"), ("server0",), ("kill",)),
        *(("--snapshot", "0.02s"), 1, 1),
    ),
    Scenario(
        *("lead killed in a snapshot", POLICIES, ("snapshot.write",), ("worker0",), ("kill",)),
        *((*_AGAIN, "--snapshot", "0.02s"), 1, 1),
    ),
    Scenario(
        *("server killed as it comes back", POLICIES, RECOVER, ("server0",), ("kill",), (), 1, 1),
        "server0/update.chunk:9:kill",
    ),
)
"""What is hurt, where and how, and what must go on. A fault whose remedy does not exist is not in it."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One run with its faults."""

    scenario: str
    seed: int
    strategy: str
    words: tuple[str, ...]
    faults: tuple[Fault, ...]
    stopped: float
    """Seconds after which a stopped process goes on."""
    loaders: int = 0

    def __str__(self) -> str:
        return f"{self.scenario} {self.seed}: {self.strategy} {' '.join(self.words)} {','.join(map(str, self.faults))}"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of one run."""

    case: Case
    code: int
    said: str
    fired: list[str]
    """The faults that have happened."""
    seconds: float
    lost: int
    """How often a sample should have been applied and was not, in the end."""
    doubled: int
    wrong: list[str]
    """What the events show."""
    pushes: int
    updates: int
    away: float
    """The longest time without an update after the first fault, in seconds."""
    back: Sequence[float] = ()
    """Of each server that was killed, the seconds until it was back."""

    @property
    def well(self) -> bool:
        return self.code == 0 and not (self.lost or self.doubled or self.wrong)


def run_case(case: Case, folder: Path, seconds: float = 90.0, *, fresh: bool = False) -> Verdict:
    """Runs it, and judges it; fresh: in processes that import all by themselves, as a user's do."""
    fired = folder / "fired"
    fired.mkdir(parents=True)
    settings = {failpoints.VARIABLE: ",".join(map(str, case.faults)), failpoints.FIRED: str(fired)}
    if fresh:
        settings["PYTHONPATH"] = str(Path(__file__).parents[1])  # where the script finds this module
    script = write_script(folder, SCRIPT)
    words = ["--workers", str(WORKERS), "--strategy", case.strategy, "--name", "hurt", "--slow", "all:0.001+exp(0.002)"]
    began = time.monotonic()
    words = [*words, *case.words, "--", str(SAMPLES), str(EPOCHS), str(case.loaders)]
    with (
        started([PACELINE, "run", script, *words], folder, **settings)
        if fresh
        else playing([script, *words], folder, **settings) as run
    ):
        _wake_stopped(run, fired, case.stopped, seconds)
        outcome = run.finish(seconds)
        took = time.monotonic() - began
        counts = [json.loads(path.read_text()) for path in sorted(run.notes.glob("counts-*"))]
    lost, doubled = judge(counts, EPOCHS)
    path = folder / "runs" / "hurt" / "events.jsonl"
    events = list(read(path)) if path.exists() else []
    at = min((_moment(word) for word in fired.iterdir()), default=0.0)
    updates = [event.start for event in events if isinstance(event, Update)]
    gaps = [after - before for before, after in itertools.pairwise(updates) if after >= at]
    server = not case.strategy.startswith("all-reduce")
    wrong = violations(events, case.strategy) if events and server else []
    killed = sorted(_moment(word) for word in fired.iterdir() if word.name.startswith("server") and "kill" in word.name)
    returns = [event.start for event in events if isinstance(event, Recovery)]
    if not min(1, len(killed)) <= len(returns) <= len(killed):  # one that is killed before it is back is back once
        wrong.append(f"{len(killed)} servers were killed, and {len(returns)} came back")
    again = sum(isinstance(event, Join) for event in events) - WORKERS
    if killed and again > sum(fault.action == "kill" for fault in case.faults) - len(killed):
        wrong.append(f"{again} workers were started again")
    return Verdict(
        case,
        outcome.code,
        outcome.err,
        sorted(word.name.replace("@", "/") for word in fired.iterdir()),
        took,
        lost,
        doubled,
        wrong,
        sum(isinstance(event, Push) for event in events),
        len({event.version for event in events if isinstance(event, Update) and not event.skipped}),
        max(gaps, default=0.0),
        [after - before for before, after in zip(killed, returns, strict=False)],
    )


BITS = "server killed: bits of sync"
_BITS_SCRIPT = """
import hashlib, json, os, pathlib, sys
import paceline, torch
from helpers.faulted import train

team = paceline.join()
found = train(team, sys.argv[1])
pathlib.Path(os.environ["RUN_NOTES"], f"counts-{team.rank}").write_text(json.dumps(found))
"""


def train(team: Any, optimizer_name: str) -> str:
    """Trains a model with an optimizer that has state; returns a digest of the parameters and of that state."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(64, 700), torch.nn.Tanh(), torch.nn.Linear(700, 300), torch.nn.Tanh())
    model.append(torch.nn.Linear(300, 1))
    kind = getattr(torch.optim, optimizer_name)
    optimizer = kind(model.parameters(), lr=0.01, **({"momentum": 0.9} if optimizer_name in ("SGD", "Muon") else {}))
    inputs = torch.randn(96, 64)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4 * team.world_size)
    model, optimizer, loader = team.setup(model, optimizer, loader)
    for _ in range(2):
        for x, y in loader:
            with team.step():
                torch.nn.functional.mse_loss(model(x), y).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                optimizer.zero_grad()
    digest = hashlib.sha256()
    state = optimizer.state_dict()["state"]
    for tensor in (*model.state_dict().values(), *(value for one in state.values() for value in one.values())):
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def run_bits(seed: int, folder: Path, seconds: float = 90.0) -> Verdict:
    """Trains twice, once with a server killed inside an update; the two must be equal to the last bit."""
    source = random.Random(f"{BITS}/{seed}")
    servers = 1 + seed % 2
    optimizer = ("Adam", "SGD", "AdamW", "Adagrad")[seed // 2 % 4]
    point = source.choice(["update.chunk", "chunk.written", "chunk.written", "update.written"])
    process = "server0" if point == "update.written" else f"server{source.randrange(servers)}"
    fault = Fault(point, source.randint(1, 16), "kill", 0.0, process)
    case = Case(BITS, seed, "sync", ("--servers", str(servers)), (fault,), 0.0)
    began, digests, said, code = time.monotonic(), [], "", 0
    for name, faults in (("whole", ""), ("hurt", str(fault))):
        place = folder / name
        fired = place / "fired"
        fired.mkdir(parents=True)
        settings = {failpoints.VARIABLE: faults, failpoints.FIRED: str(fired)}
        script = write_script(place, _BITS_SCRIPT)
        words: list[str | Path] = [script, "--workers", "2", "--strategy", "sync", "--name", name, *case.words]
        with playing([*words, "--", optimizer], place, **settings) as run:
            outcome = run.finish(seconds)
            digests += [json.loads(path.read_text()) for path in sorted(run.notes.glob("counts-*"))]
        said, code = said + outcome.err, code or outcome.code
    path = folder / "hurt" / "runs" / "hurt" / "events.jsonl"
    events = list(read(path)) if path.exists() else []
    wrong = [] if len(digests) == 4 and len(set(digests)) == 1 else [f"the bits differ with {optimizer}: {digests}"]
    struck = [word.name.replace("@", "/") for word in fired.iterdir()]
    updates = len([event for event in events if isinstance(event, Update)])
    pushes = sum(isinstance(event, Push) for event in events)
    wrong += violations(events, "sync") if events else ["there are no events"]
    return Verdict(case, code, said, struck, time.monotonic() - began, 0, 0, wrong, pushes, updates, 0.0)


CUT = "cable of a host pulled"


def run_cut(seed: int, folder: Path, seconds: float = 90.0) -> Verdict:
    """Runs a team on two hosts, of which one is cut off from the other for a while; as root."""
    source = random.Random(f"{CUT}/{seed}")
    strategy, servers = POLICIES[seed % len(POLICIES)], ("lead", "each", "2")[seed % 3]
    case = Case(CUT, seed, strategy, ("--servers", servers), (), source.uniform(0.3, 2.5))
    began, run = time.monotonic(), folder / "run"
    arguments = (SAMPLES, EPOCHS, 0, 0.02)
    with (
        hosts(2) as (first, second),
        Spread(count, [first, second], 2, *arguments, strategy=strategy, servers=servers, folder=run) as team,
    ):
        after = source.randint(1, 10)
        wait_until(lambda: _updates(run) >= after, seconds, "the run to begin")
        second.cable(False)
        at = time.perf_counter()
        time.sleep(case.stopped)
        cut = any(process.is_alive() for process in team.processes)
        second.cable(True)
        results = team.results(seconds)
        events = team.events()
    failed = [str(result) for result in results if isinstance(result, Failure)]
    lost, doubled = judge([result for result in results if not isinstance(result, Failure)], EPOCHS)
    updates = [event.start for event in events if isinstance(event, Update)]
    gaps = [later - before for before, later in itertools.pairwise(updates) if later >= at]
    return Verdict(
        case,
        len(failed),
        "\n".join(failed),
        [CUT] if cut else [],
        time.monotonic() - began,
        lost,
        doubled,
        violations(events, strategy),
        sum(isinstance(event, Push) for event in events),
        len(updates),
        max(gaps, default=0.0),
    )


CUT_HUB = "all-reduce: rank 0's host of three cut off"
_TIMEOUT, _CUT_EPOCHS = 6.0, 4


def run_cut_hub(seed: int, folder: Path, seconds: float = 90.0) -> Verdict:
    """Cuts rank 0's host off for good: the other two go on by themselves, and rank 0's ends; as root."""
    source = random.Random(f"{CUT_HUB}/{seed}")
    case = Case(CUT_HUB, seed, "all-reduce", ("--elastic",), (), 0.0)
    launch = Launch(strategy="all-reduce", elastic=True, timeouts=Timeouts(barrier=_TIMEOUT, join=60.0))
    began, run, each = time.monotonic(), folder / "run", 1 + seed % 2
    arguments = (SAMPLES, _CUT_EPOCHS, 0, 0.1)
    rate = "50mbit" if seed % 4 > 1 else None  # on slow links it is mostly in an exchange
    with hosts(3, rate) as made, Spread(count, made, each, *arguments, launch=launch, folder=run) as team:
        wait_until(lambda: _updates(run, 0) > 0, seconds, "the run to begin")
        time.sleep(source.uniform(0.0, 0.5))
        made[0].cable(False)
        at = time.perf_counter()
        results = team.results(seconds)
        team.folder = run / "machine-1"  # of the new lead
        events = team.events()
    cut, others = results[:each], results[each:]
    failed = [str(result) for result in others if isinstance(result, Failure)]
    ended = [isinstance(one, Failure) and "only a majority goes on" in one.message for one in cut]
    wrong = [] if all(ended) else [f"the host that was cut off did not end as it should: {cut}"]
    lost, doubled = judge([result for result in others if not isinstance(result, Failure)], _CUT_EPOCHS)
    updates = [event.start for event in events if isinstance(event, Update)]
    gaps = [later - before for before, later in itertools.pairwise(updates) if later >= at]
    away = max(gaps, default=0.0)
    return Verdict(
        case,
        len(failed),
        "\n".join(failed),
        [CUT_HUB] if away > 1.0 else [],
        time.monotonic() - began,
        lost,
        doubled,
        wrong,
        0,
        len(updates),
        away - _TIMEOUT,
    )


def _updates(run: Path, stream: int = -1) -> int:
    path = run / "streams" / f"{stream}.jsonl"
    return path.read_bytes().count(b'"event":"update"') if path.exists() else 0


def judge(counts: list[list[float]], epochs: int) -> tuple[int, int]:
    """How often samples were applied too rarely, and too often, by the counts of the worst of the workers."""
    if not counts:
        return SAMPLES * epochs, 0
    lost = max(round(sum(max(0.0, epochs - value) for value in one)) for one in counts)
    return lost, max(round(sum(max(0.0, value - epochs) for value in one)) for one in counts)


def _moment(word: Path) -> float:
    """When a fault happened, by the clock that all processes of a machine share."""
    return float(word.read_text().split()[0])


def _wake_stopped(run: QuickRun | Run, fired: Path, after: float, seconds: float) -> None:
    """Lets each process that a fault stops go on after so many seconds, until the run has ended."""
    until, woken = time.monotonic() + seconds, set[str]()
    while not run.ended and time.monotonic() < until:
        for word in fired.iterdir():
            text = word.read_text().split()
            if (
                word.name.endswith(":stop")
                and word.name not in woken
                and text
                and time.monotonic() > float(text[0]) + after
            ):
                woken.add(word.name)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(text[1]), signal.SIGCONT)
        time.sleep(0.02)
