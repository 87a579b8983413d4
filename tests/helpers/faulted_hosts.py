"""Runs over two hosts whose relays or servers are killed at points that a seed draws, and what they have done wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from helpers.checker import violations
from helpers.faulted import COORDINATOR, EPOCHS, POLICIES, SAMPLES, Case, Verdict, count, judge, train
from helpers.hosts import hosts
from helpers.machines import Failure, Spread
from paceline import failpoints
from paceline.config import Launch, Timeouts
from paceline.events import Event, Push, Recovery, Update
from paceline.failpoints import draw_fault

RELAY = ("relay.request", "relay.answer", "relay.taken", "relay.chunk", "relay.stored", "relay.confirmed")
_STARTED = 5
"""How often a point is reached until the run has begun, at the most."""
_CHUNK = ("update.chunk", "chunk.written")
_RELAYS = ("relay0", "relay1")


@dataclasses.dataclass(frozen=True)
class HostScenario:
    """A kind of fault in runs over two hosts, which all of them must survive."""

    name: str
    points: Sequence[str]
    processes: Sequence[str]
    servers: Sequence[str]
    """Where the servers are, in turns, as `--servers` says it."""
    faults: int = 1
    bits: bool = False
    """True if the run is of sync, and its bits must be those of an undisturbed one."""

    def case(self, seed: int) -> Case:
        """One run of it."""
        source = random.Random(f"{self.name}/{seed}")
        strategy = "sync" if self.bits else POLICIES[seed % len(POLICIES)]
        servers = self.servers[seed // len(POLICIES) % len(self.servers)]
        faults = []
        for number in range(self.faults):
            point = self.points[(seed + seed // len(POLICIES) + number) % len(self.points)]
            kind = "relay" if point.startswith("relay") else "server"
            processes: Sequence[str] = [one for one in self.processes if one.startswith(kind)]
            if point == "relay.taken":
                processes = ("relay0",)
            elif point in ("relay.chunk", "relay.stored", "relay.confirmed") and servers != "each":
                processes = ("relay0",) if point == "relay.stored" else ("relay1",)
            drawn = draw_fault(source, [point], ("kill",), tuple(processes), 12)
            faults.append(dataclasses.replace(drawn, nth=drawn.nth + _STARTED * (kind == "relay")))
        return Case(self.name, seed, strategy, ("--servers", servers), tuple(faults), 0.0, 1 + source.randrange(2))


HOST_SCENARIOS = (
    HostScenario("relay killed", RELAY, _RELAYS, ("1", "each", "2")),
    HostScenario("relays killed, both", RELAY, _RELAYS, ("1", "each", "lead"), 2),
    HostScenario("coordinator of machines killed", COORDINATOR, ("server0",), ("1", "each", "2")),
    HostScenario("servers of machines killed", _CHUNK, ("server0", "server1"), ("each", "2")),
    HostScenario(
        "server and relay of machines killed", (*_CHUNK, *RELAY), (*_RELAYS, "server0", "server1"), ("each",), 2
    ),
    HostScenario("server of machines killed: bits of sync", _CHUNK, ("server0", "server1"), ("each", "2"), bits=True),
    HostScenario("relay killed: bits of sync", RELAY, _RELAYS, ("1", "each"), bits=True),
)


def run_on_hosts(case: Case, folder: Path, seconds: float = 60.0, *, bits: bool = False) -> Verdict:
    """Runs it, and judges it; as root."""
    began = time.monotonic()
    (_, servers), each = case.words, case.loaders
    launch = Launch(strategy=case.strategy, servers=servers, timeouts=Timeouts(barrier=25.0, join=25.0))
    if not bits:
        results, events, fired = _played(count_slowly, each, launch, folder, case, seconds)
        counts = [result for result in results if not isinstance(result, Failure)]
        lost, doubled = judge(counts, EPOCHS)
        wrong = []
    else:
        name = ("Adam", "SGD", "AdamW", "Adagrad")[case.seed % 4]
        whole, _, _ = _played(train, 1, launch, folder / "whole", dataclasses.replace(case, faults=()), seconds, name)
        results, events, fired = _played(train, 1, launch, folder / "hurt", case, seconds, name)
        lost = doubled = 0
        digests = {str(result) for result in (*whole, *results)}
        wrong = [] if len(digests) == 1 else [f"the bits differ with {name}: {digests}"]
    failed = [str(result) for result in results if isinstance(result, Failure)]
    moments = sorted(float(word.read_text().split()[0]) for word in fired.iterdir())
    updates = [event.start for event in events if isinstance(event, Update)]
    gaps = [later - before for before, later in itertools.pairwise(updates) if moments and later >= moments[0]]
    return Verdict(
        case,
        len(failed),
        "\n".join(failed),
        sorted(word.name.replace("@", "/") for word in fired.iterdir()),
        time.monotonic() - began,
        lost,
        doubled,
        wrong + violations(events, case.strategy),
        sum(isinstance(event, Push) for event in events),
        len(updates),
        max(gaps, default=0.0),
        _returns(fired, events),
    )


def count_slowly(team: Any) -> list[float]:
    """As `faulted.count`, so long that a fault strikes in its middle."""
    return count(team, SAMPLES, EPOCHS, 0, 0.002)


def _returns(fired: Path, events: Sequence[Event]) -> list[float]:
    """Of each server that was killed, the seconds until it was back."""
    killed = sorted(float(word.read_text().split()[0]) for word in fired.glob("server*"))
    back = [event.start for event in events if isinstance(event, Recovery)]
    return [after - before for before, after in zip(killed, back, strict=False)]


def _played(
    work: Callable[..., Any], each: int, launch: Launch, folder: Path, case: Case, seconds: float, *arguments: Any
) -> tuple[list[Any], list[Event], Path]:
    """What the workers returned, the events, and the folder that has the faults which have happened."""
    fired = folder / "fired"
    fired.mkdir(parents=True)
    with (
        _variables({failpoints.VARIABLE: ",".join(map(str, case.faults)), failpoints.FIRED: str(fired)}),
        hosts(2) as made,
        Spread(work, made, each, *arguments, launch=launch, folder=folder / "run") as team,
    ):
        results = team.results(seconds)
        events = team.events()
    return results, events, fired


@contextlib.contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """With these environment variables, also in processes that start meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
