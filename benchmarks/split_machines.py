"""Models split over machines with shaped links, which are namespaces. `python benchmarks/split_machines.py` (as root).

| row | what is compared, in turns | goal |
|---|---|---|
| `against torch` | a pipeline over two hosts at 1 Gbit/s, and torch's on gloo over the same links | 1.2 times |
| `bytes` | what leaves a host in a step, by its interface, and the values at the cut | 3 % apart |
| `hidden` | the share of transfers in which their receiver does not wait, from the run's events, under gpipe | 70 % |
| | the same under 1f1b, of which stages of equal length wait for more than half: what the schedule hides | |
| `bubble` | the measured bubble, and that of the schedule with the measured passes and the links | 10 % apart |
| `slow replica` | updates of `mesh:data=2,pipeline=2` over four hosts, k-sync:k=1 and all-reduce, one slow | 2 times |
| `slow link` | a link of 50 Mbit/s, with the cut by work alone, and with the one that avoids it | 1 times |

It prints a table with goals, and with `--json` all numbers. `--only PART` measures one part, in less than two minutes:
`torch`, `alone` (bytes, hidden, bubble), `replicas` or `narrow`. `--short` makes fewer and smaller steps, to try it.
"""

import argparse
import copy
import importlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import transformer
from helpers.hosts import Host, hosts
from helpers.machines import Spread
from helpers.meshes import parts_amiss
from torch import distributed, nn

from paceline import Team
from paceline.collectives.machines_group import MachinesGroup
from paceline.events import Event, Leave, Pass, Stages, StageTransfer, Update, Wait
from paceline.events.bubbles import Bubbles
from paceline.events.transfers import Transfers
from paceline.schedules.timing import evaluate

MICROBATCHES, GIGABIT = 8, 125e6
PORT = 29671
HEADER = 14 + 20 + 32
"""Bytes of Ethernet, IP, and TCP with its timestamps."""


class Size:
    """How much is measured."""

    def __init__(self, short: bool) -> None:
        self.rounds, self.steps = (2, 2) if short else (8, 6)
        self.model = {"width": 96, "layers": 4, "length": 32} if short else {"width": 192, "layers": 6, "length": 64}
        self.batch = 16
        self.updates = 8 if short else 40


def batch_of(size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    source = transformer.Source(size.model["length"])
    pairs = [source[number] for number in range(size.batch)]
    return torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])


def made(size: Size) -> Any:
    torch.manual_seed(0)
    return transformer.Transformer(size.model["width"], size.model["layers"], length=size.model["length"])


def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> float:
    loss = transformer.loss_of(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def timed(team: Team, run: Callable[[], object], steps: int) -> float:
    """Seconds of a step."""
    team.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        run()
    team.barrier()
    return (time.perf_counter() - start) / steps


class Torchs:
    """torch.distributed.pipelining on gloo, cut in the middle."""

    def __init__(self, model: nn.Module, rank: int, x: torch.Tensor) -> None:
        from torch.distributed import pipelining

        middle = len(model.blocks) // 2  # type: ignore[arg-type]
        few = x[: len(x) // MICROBATCHES]
        cut = {f"blocks.{middle}": pipelining.SplitPoint.BEGINNING}
        stage = pipelining.pipeline(model, (few,), split_spec=cut).build_stage(rank, torch.device("cpu"))
        self._schedule = pipelining.Schedule1F1B(stage, MICROBATCHES, loss_fn=transformer.loss_of)
        self._rank, self._optimizer = rank, torch.optim.AdamW(stage.submod.parameters(), lr=3e-4)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        losses: list[torch.Tensor] = []
        if self._rank == 0:
            self._schedule.step(x)
        else:
            self._schedule.step(target=y, losses=losses)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if losses else 0.0


def against_torch(team: Team, size: Size, address: str) -> dict[str, list[float]]:
    """Seconds per step of both, by round."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    x, y = batch_of(size)
    model = made(size)
    distributed.init_process_group("gloo", init_method=f"tcp://{address}:{PORT}", rank=team.rank, world_size=2)
    peer = Torchs(copy.deepcopy(model), team.rank, x)
    model, optimizer = team.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-4))
    first, second = step(model, optimizer, x, y), peer.step(x, y)
    if team.rank == 1 and abs(first - second) > 1e-4:
        raise SystemExit(f"the two do not train alike: {first} and {second}")
    found: dict[str, list[float]] = {"paceline": [], "torch": []}
    for _ in range(size.rounds):
        found["paceline"].append(timed(team, lambda: step(model, optimizer, x, y), size.steps))
        found["torch"].append(timed(team, lambda: peer.step(x, y), size.steps))
    distributed.destroy_process_group()
    return found


def alone(team: Team, size: Size) -> tuple[float, float]:
    """The best seconds per step of a pipeline, and the bytes that leave this host in a step."""
    x, y = batch_of(size)
    model = made(size)
    model, optimizer = team.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-4))
    step(model, optimizer, x, y)
    before, rounds = sent(), size.rounds
    best = min(timed(team, lambda: step(model, optimizer, x, y), size.steps) for _ in range(rounds))
    return best, (sent() - before) / (rounds * size.steps)


def sent() -> int:
    """Bytes that have left this host, without the headers of packets."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "eth0" in line)
    size, packets = (int(number) for number in line.split(":")[1].split()[8:10])
    return size - HEADER * packets


def over(
    made_hosts: Sequence[Host], size: Size, schedule: str = "1f1b"
) -> tuple[float, float, list[Event], dict[str, float]]:
    """Seconds of a step, the bytes that leave a host in it, events, and the summary's facts about transfers."""
    with tempfile.TemporaryDirectory() as folder:
        options, run = f"microbatches={MICROBATCHES},schedule={schedule}", Path(folder) / "run"
        spec = f"pipeline:stages={len(made_hosts)},{options}"
        with Spread(alone, made_hosts, 1, size, strategy=spec, folder=run) as team:
            found = team.values(300.0)
            events = team.events()
        told = json.loads((run / "summary.json").read_text())["communication"]
        return max(one for one, _ in found), statistics.mean(size for _, size in found), events, told


def bubbles(events: Sequence[Event], schedule: str = "1f1b") -> dict[str, float]:
    """The measured bubble; the schedule's with the mean passes and the link, and what it hides of transfers."""
    measured = Bubbles()
    passes = [event for event in events if isinstance(event, Pass)]
    (cut,) = (event for event in events if isinstance(event, Stages))
    for event in passes:
        measured.add(event)
    first = min(event.version for event in passes)

    def mean(stage: int, kind: str) -> float:
        return statistics.mean(
            one.seconds for one in passes if (one.stage, one.kind) == (stage, kind) and one.version > first
        )

    forward, backward = (np.array([[mean(0, kind), mean(1, kind)]]) for kind in "FB")
    link = cut.bytes[1] / MICROBATCHES / GIGABIT
    timing = evaluate(schedule, MICROBATCHES, forward, backward, links=[(0.0, 0.0), (link, 1e-4)])
    hides = Transfers()
    ends = [0.0, 0.0]
    for one in sorted(timing.operations, key=lambda one: one.start):
        hides.add(Wait(one.device, ends[one.device], one.start - ends[one.device], 1 - one.device))
        ends[one.device] = one.end
        if (one.stage, one.operation.kind) in ((0, "F"), (1, "B")):
            hides.add(StageTransfer(1 - one.stage, one.end, link + 1e-4, one.stage, cut.bytes[1] // MICROBATCHES))
    found = hides.result()
    return {
        "measured": measured.measured() or 0.0,
        "schedule with links": timing.bubble,
        "hidden by the schedule": (found.hidden if found else None) or 0.0,
    }


def replicas(team: Team, size: Size, steps: int) -> None:
    """The second replica takes three times as long for each step as the first. steps: that it makes."""
    x, y = batch_of(size)
    model = made(size)
    model, optimizer = team.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-4))
    step(model, optimizer, x, y)
    for _ in range(size.updates if team.rank < 2 else steps):
        start = time.perf_counter()
        with team.step():
            transformer.loss_of(model(x), y).backward()
            if team.rank >= 2:
                time.sleep(3 * (time.perf_counter() - start) + 0.2)
            optimizer.step()
            optimizer.zero_grad()


def updates_per_second(made_hosts: Sequence[Host], size: Size, between: str) -> tuple[float, list[str]]:
    # With a server the first replica does not wait for the second, and would in the end, for all of its slow steps.
    steps = size.updates if between == "all-reduce" else size.updates // 8
    with tempfile.TemporaryDirectory() as folder:
        spec = f"mesh:data=2,pipeline=2,microbatches=2,sync={between}"
        with Spread(replicas, made_hosts, 1, size, steps, strategy=spec, folder=Path(folder) / "run") as team:
            team.values(300.0)
            events = team.events()
    done = min(event.start for event in events if isinstance(event, Leave))
    ends = {event.version: event.start for event in events if isinstance(event, Update) and event.start < done}
    amiss = parts_amiss(events, [[0, 1], [2, 3]], apart=[1, 2, 3]) if between != "all-reduce" else []
    return (len(ends) - 1) / (max(ends.values()) - min(ends.values())), amiss


def narrow(team: Team, size: Size, blind: bool) -> float:
    """Seconds per step of a model in which little crosses late; blind: the cut does not know the link."""
    if blind:
        plain = MachinesGroup.measure_links

        def endless(self: MachinesGroup) -> Any:
            links = plain(self)
            links.bandwidth = [[float("inf")] * links.size for _ in range(links.size)]
            return links

        MachinesGroup.measure_links = endless  # type: ignore[method-assign]
    inner = [nn.Linear(1024, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 16)]
    model: Any = nn.Sequential(*inner, nn.Tanh(), nn.Linear(16, 16))
    model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))

    def one() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    one()
    return min(timed(team, one, size.steps) for _ in range(size.rounds))


def compare(size: Size) -> dict[str, Any]:
    """A pipeline, and torch's, in turns."""
    with hosts(2, "1gbit") as two:
        spec = f"pipeline:stages=2,microbatches={MICROBATCHES}"
        with Spread(against_torch, two, 1, size, two[0].address, strategy=spec) as team:
            found = team.values(500.0)[0]
    rounds = zip(found["torch"], found["paceline"], strict=True)
    return {
        "against torch": {
            "milliseconds": {name: round(1e3 * min(values), 2) for name, values in found.items()},
            "ratio of best": min(found["torch"]) / min(found["paceline"]),
            "ratio, median of rounds": statistics.median(a / b for a, b in rounds),
        }
    }


def by_itself(size: Size) -> dict[str, Any]:
    """What a pipeline sends, how much of it is hidden, and its bubble."""
    with hosts(2, "1gbit") as two:
        _, bytes_per_step, events, told = over(two, size)
        _, _, later, told_later = over(two, size, "gpipe")
    hidden = {
        "1f1b": {"measured": told["hidden"], "by the schedule": bubbles(events)["hidden by the schedule"]},
        "gpipe": {
            "measured": told_later["hidden"],
            "by the schedule": bubbles(later, "gpipe")["hidden by the schedule"],
        },
    }
    (cut,) = (event for event in events if isinstance(event, Stages))
    wire = {"of a step": bytes_per_step, "at the cut": cut.bytes[1]}
    return {"hidden": hidden, "bytes": wire, "bubble": bubbles(events)}


def with_a_slow_replica(size: Size) -> dict[str, Any]:
    with hosts(4) as four:
        rates = {name: updates_per_second(four, size, name) for name in ("all-reduce", "k-sync:k=1")}
    return {
        "slow replica": {
            "updates per second": {name: rate for name, (rate, _) in rates.items()},
            "ratio": rates["k-sync:k=1"][0] / rates["all-reduce"][0],
            "not of one replica's whole gradient": rates["k-sync:k=1"][1],
        }
    }


def over_a_slow_link(size: Size) -> dict[str, Any]:
    ways: dict[str, float] = {}
    with hosts(2, "50mbit") as two:
        for name, blind in 2 * (("cut that avoids it", False), ("cut by work alone", True)):
            with Spread(narrow, two, 1, size, blind, strategy="pipeline:stages=2,microbatches=4") as team:
                ways[name] = min(ways.get(name, math.inf), round(1e3 * max(team.values(200.0)), 2))
    return {"slow link": {"milliseconds of a step": ways}}


PARTS = {"torch": compare, "alone": by_itself, "replicas": with_a_slow_replica, "narrow": over_a_slow_link}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append", help="Measure this part.")
    parser.add_argument("--short", action="store_true", help="Fewer and smaller steps, to try it.")
    parser.add_argument("--json", action="store_true", help="Print all numbers instead of the table.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    importlib.import_module("torch.distributed.pipelining")
    told: dict[str, Any] = {}
    for part in options.only or PARTS:
        told |= PARTS[part](Size(options.short))
    print(json.dumps(told, indent=2) if options.json else table(told))


def table(told: dict[str, Any]) -> str:
    """The numbers with their goals."""
    rows: list[tuple[str, str, str, bool]] = []
    if "against torch" in told:
        ratio = told["against torch"]["ratio, median of rounds"]
        rows.append(("steps per second, times torch's", f"{ratio:.2f}", ">= 1.2", ratio >= 1.2))
    if "bubble" in told:
        wire, bubble, hidden = told["bytes"], told["bubble"], told["hidden"]
        allowed, late = min(0.7, hidden["1f1b"]["by the schedule"]), hidden["gpipe"]["measured"]
        extra, apart = wire["of a step"] / wire["at the cut"] - 1, bubble["measured"] - bubble["schedule with links"]
        rows += [
            ("bytes on the wire above the cut's", f"{extra:.1%}", "<= 3 %", abs(extra) <= 0.03),
            ("transfers hidden, gpipe", f"{late:.0%}", ">= 70 %", late >= 0.7),
            (
                "transfers hidden, 1f1b",
                f"{hidden['1f1b']['measured']:.0%}",
                f">= {allowed:.0%}",
                hidden["1f1b"]["measured"] >= allowed,
            ),
            ("bubble minus the schedule's with links", f"{apart:+.1%}", "<= 10 %", abs(apart) <= 0.1),
        ]
    if "slow replica" in told:
        faster, amiss = told["slow replica"]["ratio"], told["slow replica"]["not of one replica's whole gradient"]
        rows += [
            ("k-sync:k=1, times all-reduce, a slow replica", f"{faster:.2f}", ">= 2", faster >= 2),
            ("updates not of one whole gradient", str(len(amiss)), "0", not amiss),
        ]
    if "slow link" in told:
        ways = told["slow link"]["milliseconds of a step"]
        avoiding = ways["cut by work alone"] / ways["cut that avoids it"]
        rows.append(("slow link: cut by work, times the one off it", f"{avoiding:.2f}", ">= 1", avoiding >= 1))
    wide = max(len(row[0]) for row in rows)
    return "\n".join(
        f"{what:{wide}}  {value:>8}  goal {goal:8} {'met' if met else 'missed'}" for what, value, goal, met in rows
    )


if __name__ == "__main__":
    main()
