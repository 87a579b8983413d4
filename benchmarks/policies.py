"""Seconds per update and staleness of every policy, against theory. One command: `python benchmarks/policies.py`.

Four workers whose steps are of drawn length: exp(0.1) seconds, and 0.05 + exp(0.05). Each run is compared with what the
same draws give when messages and updates cost nothing (which takes the luck of the draw out), and with the expected
value. The first updates, when workers still load what a first step needs, and the last ones, when there are fewer
minibatches left than workers, are left out.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

from harness.runs import MINIBATCHES, train

from paceline.events import Update, read

WORKERS = 4
FIRST, LAST = 10, 10
"""Updates at both ends that do not count."""
EXPECTED = {
    # (policy, K): seconds per update in units of the mean, for exp(1) and for 1 + exp(1)
    ("k-sync", 1): (0.250, 1.250),
    ("k-sync", 2): (0.583, 1.583),
    ("k-sync", 4): (2.083, 3.083),
    ("k-batch-sync", 1): (0.250, 1.250),
    ("k-batch-sync", 2): (0.500, 1.580),
    ("k-batch-sync", 4): (1.000, 2.553),
    ("k-async", 1): (0.250, 0.500),
    ("k-async", 2): (0.583, 1.139),
    ("k-async", 4): (2.083, 3.083),
    ("k-batch-async", 1): (0.250, 0.500),
    ("k-batch-async", 2): (0.500, 1.000),
    ("k-batch-async", 4): (1.000, 2.000),
}
STALE = {"k-async": lambda k: WORKERS / k - 1, "k-batch-async": lambda k: (WORKERS - 1) / k}


def replay(policy: str, k: int, shift: float, mean: float, seed: int, updates: int) -> tuple[float, float]:
    """Seconds per update and mean staleness if nothing but the drawn steps took time."""
    sources = [random.Random(f"{seed}/{rank}") for rank in range(WORKERS)]

    def draw(rank: int) -> float:
        return shift + sources[rank].expovariate(1 / mean)

    ends = {rank: draw(rank) for rank in range(WORKERS)}
    versions = dict.fromkeys(range(WORKERS), 0)
    version, here, waiting = 0, 0, set[int]()
    times: list[float] = []
    stale: list[int] = []
    while len(times) < updates:
        rank = min((rank for rank in ends if rank not in waiting), key=ends.__getitem__)
        now = ends[rank]
        stale.append(version - versions[rank])
        here += 1
        again = {rank}
        if policy in ("k-sync", "k-async"):
            waiting.add(rank)
            again = set()
        if here == k:
            version += 1
            here = 0
            times.append(now)
            again = set(ends) if policy.endswith("-sync") else again | waiting
            waiting = set()
        for worker in sorted(again):
            ends[worker] = now + draw(worker)
            if policy != "k-batch-sync" or here == 0:
                versions[worker] = version
    return per_update(times), sum(stale) / len(stale)


def per_update(times: list[float]) -> float:
    inner = times[FIRST:-LAST]
    return (inner[-1] - inner[0]) / (len(inner) - 1)


def measure(spec: str, slow: str, seed: int, minibatches: int, folder: str) -> tuple[list[float], float]:
    """When the updates were made, and the mean staleness."""
    options = ["--workers", str(WORKERS), "--strategy", spec, "--slow", slow, "--seed", str(seed)]
    run = train(MINIBATCHES, Path(folder), *options, arguments=[str(minibatches)])
    seen = [event for event in read(run / "events.jsonl") if isinstance(event, Update) and event.rank < 0]
    summary = json.loads((run / "summary.json").read_text())
    return sorted(event.start + event.seconds for event in seen), summary["staleness"]["mean"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=400, help="per run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policy", action="append", choices=sorted({name for name, _ in EXPECTED}), help="only these")
    options = parser.parse_args()
    print("policy               steps           measured/replayed  measured/expected  staleness (replayed, expected)")
    for (policy, k), values in EXPECTED.items():
        if options.policy and policy not in options.policy:
            continue
        for (shift, mean), value in zip(((0.0, 0.1), (0.05, 0.05)), values, strict=True):
            spec, slow = f"{policy}:k={k}", f"all:{shift}+exp({mean})" if shift else f"all:exp({mean})"
            with tempfile.TemporaryDirectory() as folder:
                times, measured = measure(spec, slow, options.seed, k * options.updates, folder)
            seconds = per_update(times)
            ideal, stale = replay(policy, k, shift, mean, options.seed, len(times))
            known = STALE.get(policy, lambda _k: 0.0)(k)
            print(
                f"{spec:20} {slow[4:]:15} {seconds / ideal:17.3f} {seconds / (value * mean):18.3f}  "
                f"{measured:.3f} ({stale:.3f}, {known:.3f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
