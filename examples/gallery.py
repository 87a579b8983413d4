"""Draws the gallery: what every policy does, what bubbles are, what a stale gradient is, each from a real run.

`python examples/gallery.py docs/figures` writes SVG files there; `python examples/topologies.py docs/figures` those of
the collectives.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from paceline.events import Event, read
from paceline.report import timeline
from paceline.report.race import Runner, race

SCRIPT = Path(__file__).resolve().with_name("train_paceline.py")
DRAWN = ["--slow", "all:0.02+exp(0.02)", "--slow", "3:0.06+exp(0.06)", "--seed", "2"]
"""Every worker's steps are of drawn length, and the last one's three times as long."""
FIXED = ["--slow", "3:4"]


class Figure(NamedTuple):
    title: str
    strategy: str
    slow: list[str]
    arguments: tuple[str, ...] = ()
    updates: int = 8
    staleness: bool = False


FIGURES = {
    "even": Figure("all-reduce: a step of four equal workers", "all-reduce", []),
    "slow": Figure("all-reduce, worker 3 slow: the gaps are bubbles", "all-reduce", FIXED),
    "balanced": Figure("all-reduce, worker 3 slow, batches split by pace", "all-reduce", FIXED, ("--balance",)),
    "policy-sync": Figure("sync: everybody waits for the slowest", "sync", DRAWN),
    "policy-k-sync": Figure(
        "k-sync:k=2: the first two make an update, the others are cancelled", "k-sync:k=2", DRAWN, updates=10
    ),
    "policy-k-batch-sync": Figure(
        "k-batch-sync:k=4: four minibatches make an update, whoever they are from", "k-batch-sync:k=4", DRAWN
    ),
    "policy-async": Figure("async: every gradient is an update", "async", DRAWN, updates=16),
    "policy-k-async": Figure(
        "k-async:k=2: two gradients make an update, the others go on, stale", "k-async:k=2", DRAWN, updates=10
    ),
    "policy-k-batch-async": Figure(
        "k-batch-async:k=4: four minibatches make an update, nobody waits", "k-batch-async:k=4", DRAWN
    ),
    "policy-ssp": Figure("ssp:s=2: nobody gets more than two steps ahead of the slowest", "ssp:s=2", DRAWN, updates=16),
    "policy-groups": Figure("groups:size=2: two groups, all-reduce inside, async between", "groups:size=2", DRAWN),
    "policy-adaptive": Figure("adaptive:of=k-sync: K grows as the loss falls", "adaptive:of=k-sync", DRAWN, updates=10),
    "stale": Figure(
        "stale gradients: the number at a push is how many updates came in between",
        "async",
        DRAWN,
        updates=12,
        staleness=True,
    ),
}


RACE = ["--slow", "all:0.02+exp(0.01)", "--slow", "3:0.08+exp(0.04)", "--seed", "1"]
"""Steps of drawn length, those of the last worker four times as long."""


def racing() -> str:
    """The same second under two strategies."""
    runners = {
        "all-reduce": "all-reduce: every update waits for worker 3",
        "k-batch-sync:k=4": "k-batch-sync:k=4: an update takes the first four minibatches, from any worker",
    }
    runs = [Runner(title, recorded(strategy, RACE, "--epochs", "4")) for strategy, title in runners.items()]
    return race("Four workers, worker 3 four times slower: one second of two real runs", runs, 1.0)


SCALED = [
    "--workers",
    "2",
    "--strategy",
    "k-async:k=2",
    "--slow",
    "all:0.12+exp(0.08)",
    "--name",
    "figure",
]


def elastic() -> str:
    """A run in which workers come and go, whole."""
    with tempfile.TemporaryDirectory() as work:
        command = [sys.executable, "-m", "paceline"]
        run = subprocess.Popen(
            [*command, "run", str(SCRIPT), *SCALED, "--quiet", "--", "--epochs", "6"],
            cwd=work,
            stdout=subprocess.DEVNULL,
        )
        streams = Path(work) / "runs" / "figure" / "streams"
        for workers, known in ((4, 1), (2, 3)):
            while run.poll() is None and not any("compute" in line for line in _lines(streams / f"{known}.jsonl")):
                time.sleep(0.1)
            time.sleep(1.5)
            subprocess.run([*command, "scale", "figure", str(workers)], cwd=work, check=True)
        if run.wait(120):
            raise RuntimeError("the run failed")
        events = list(read(Path(work) / "runs" / "figure" / "events.jsonl"))
    return timeline(events, "k-async:k=2: two workers, two more join, two leave", whole=True)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def recorded(strategy: str, slow: list[str], *arguments: str) -> list[Event]:
    """The events of a run of four workers."""
    with tempfile.TemporaryDirectory() as work:
        command = [sys.executable, "-m", "paceline", "run", str(SCRIPT), "--workers", "4", "--quiet"]
        command += ["--strategy", strategy, *slow, "--name", "figure", "--", *arguments]
        subprocess.run(command, check=True, cwd=work, stdout=subprocess.DEVNULL)
        return list(read(Path(work) / "runs" / "figure" / "events.jsonl"))


def main(folder: Path, names: list[str]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    chosen = {name: figure for name, figure in FIGURES.items() if not names or name in names}
    for number, (name, figure) in enumerate(chosen.items(), start=1):
        print(f"{number} of {len(chosen)}: {name}", flush=True)
        events = recorded(figure.strategy, figure.slow, "--epochs", "2", *figure.arguments)
        drawn = timeline(events, figure.title, figure.updates, staleness=figure.staleness)
        (folder / f"{name}.svg").write_text(drawn)
    for name, draw in {"elastic": elastic, "race": racing}.items():
        if not names or name in names:
            print(name, flush=True)
            (folder / f"{name}.svg").write_text(draw())
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "figures"), sys.argv[2:]))
