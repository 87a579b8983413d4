"""Does advice bring what it promises? One command: `python benchmarks/advice.py`.

Six clusters of four workers are slow in different ways, by sleeping. Of each one run is made, and its report's advice
is followed, piece by piece: the advised line is run, or what it says is done to the cluster. The table has the time per
update as it was, as promised, and as reached, and which share of the promised gain was reached. What is simulated are
updates per second; policies that use stale gradients are left out, since they may need more updates.
"""

import argparse
import copy
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.runs import train

from paceline.report.source import open_run

WORKERS, EACH = 4, 8
SCRIPT = """
import json, random, sys, time

import paceline
import torch
from torch.utils.data import DataLoader, Dataset

told = json.loads(sys.argv[1])
team = paceline.join()
mine = told["workers"].get(str(team.rank), {})


class Samples(Dataset):
    def __len__(self):
        return told["updates"] * 8 * team.world_size

    def __getitem__(self, index):
        time.sleep(mine.get("loading", 0.0))
        return torch.ones(4)


model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(Samples(), batch_size=8 * team.world_size, num_workers=told["loaders"])
model, optimizer, loader = team.setup(model, optimizer, loader, balance=told["balance"])
source = random.Random(team.rank)
for step, x in enumerate(loader):
    with team.step():
        loss = model(x).mean()
        seconds = len(x) * told["sample"] * mine.get("times", 1.0)
        if source.random() < mine.get("often", 0.0):
            seconds += mine["stall"]
        if step == mine.get("once"):
            seconds += mine["stall"]
        time.sleep(seconds)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def cluster(workers: dict[str, dict[str, float]], slow: str = "", updates: int = 60) -> dict[str, Any]:
    """workers: by rank, what is slow about it; slow: an option --slow for a link, by rank."""
    told = {"workers": workers, "sample": 0.005, "loaders": 0, "balance": False, "updates": updates}
    return {"told": told, "slow": [slow] if slow else [], "count": WORKERS}


CLUSTERS = {
    "persistent straggler": cluster({"3": {"times": 4.0}}),
    "jitter": cluster({str(rank): {"often": 0.15, "stall": 0.2} for rank in range(WORKERS)}, updates=150),
    "loader-bound": cluster({"2": {"loading": 0.01}}),
    "slow link": cluster({}, "1:0.12+exp(0.004)@link"),
    "uneven devices": cluster({"2": {"times": 2.5}, "3": {"times": 2.5}}, updates=120),
    "one-off": cluster({"1": {"once": 25, "stall": 3.0}}),
}


def run(which: dict[str, Any], strategy: str, folder: Path) -> dict[str, Any]:
    """The facts of a run."""
    folder.mkdir()
    options = ["--workers", str(which["count"]), "--strategy", strategy]
    options += [word for slow in which["slow"] for word in ("--slow", slow)]
    where = train(SCRIPT, folder, *options, arguments=[json.dumps(which["told"])])
    return open_run(where).facts(pictures=False)


def follow(advice: dict[str, Any], which: dict[str, Any], facts: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The cluster and the strategy after a piece of advice."""
    changed, strategy, words = copy.deepcopy(which), "all-reduce", advice["change"]
    slow = {str(rank) for one in facts["slowness"] for rank in one["ranks"]}
    if advice["command"]:
        line = shlex.split(advice["command"])
        strategy, changed["count"] = line[line.index("--strategy") + 1], int(line[line.index("--workers") + 1])
    if words.startswith("balance"):
        changed["told"]["balance"] = True
        changed["told"]["updates"] *= 3  # the first ones are those by which paces are measured
    elif words.startswith("more loader"):
        changed["told"]["loaders"] = 3
    elif not words.startswith("--strategy"):
        # Without the slow workers, or with what is slow about them mended; the others keep their own, in order.
        rest = [str(rank) for rank in range(WORKERS) if str(rank) not in slow or changed["count"] == WORKERS]
        kept = {rank: {} if rank in slow else what for rank, what in changed["told"]["workers"].items()}
        changed["told"]["workers"] = {str(new): kept.get(old, {}) for new, old in enumerate(rest)}
        changed["slow"] = [one for one in changed["slow"] if one.partition(":")[0] not in slow]
    return changed, strategy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", action="append", choices=CLUSTERS, help="only these")
    options = parser.parse_args()
    print(f"{'cluster':22}{'advice':48}{'was':>8}{'promised':>10}{'reached':>9}{'of the gain':>13}", flush=True)
    missed = 0
    for name in options.cluster or CLUSTERS:
        which = CLUSTERS[name]
        with tempfile.TemporaryDirectory() as parent:
            facts = run(which, "all-reduce", Path(parent) / "was")
            pieces = [one for one in facts["advice"] if one["staleness"] <= 0.05]
            if not pieces:
                missed += 1
                print(f"{name:22}nothing is advised: {' '.join(facts['verdict'])}", flush=True)
            for number, one in enumerate(pieces):
                changed, strategy = follow(one, which, facts)
                now = run(changed, strategy, Path(parent) / str(number))
                was, promised, reached = one["now"], one["seconds_per_update"], now["seconds_per_update"]
                # By samples, since an update of fewer workers, or of fewer gradients, is worth less.
                told, got = one["samples"] - 1, now["samples_per_second"] / facts["samples_per_second"] - 1
                share = got / told
                missed += share < 0.9
                times = f"{1e3 * was:6.1f}ms{1e3 * promised:8.1f}ms{1e3 * reached:7.1f}ms"
                print(f"{name:22}{one['change'][:46]:48}{times}{share:12.0%}", flush=True)
    print(f"below 90 % of what was promised: {missed}")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
