"""What faults do to a run, and what they must not. One command: `python benchmarks/faults.py`.

`python benchmarks/faults.py soak` hurts one training every 30 s for 20 minutes, and its peers likewise
(`harness/soak.py`); `python benchmarks/faults.py spot` replays a trace of spot instances (`harness/spot.py`). The rest
is about the first.

Every run trains a model whose parameters count how often each sample was applied, is hurt at points which a seed draws
(`paceline/failpoints.py`), and is judged by these counts and by its events: every sample exactly once an epoch, every
push at most once, every version from one update, the policy's own laws. A fault that did not happen does not count.
Runs are forked from a process that has imported all; in fresh processes a killed server takes longer to come back.
As root also between hosts that are network namespaces: cables are pulled, and relays and servers killed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or torch says of every host that it has no name

from harness import soak, spot
from helpers.faulted import (
    BITS,
    CUT,
    CUT_HUB,
    EPOCHS,
    SAMPLES,
    SCENARIOS,
    Scenario,
    Verdict,
    run_bits,
    run_case,
    run_cut,
    run_cut_hub,
)
from helpers.faulted_hosts import HOST_SCENARIOS, HostScenario, run_on_hosts

COLUMNS = ("runs", "faults", "pushes", "updates", "lost", "doubled", "broken", "ended well", "pause", "longest", "back")
FRESH = "server killed, in fresh processes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=18, help="runs of each kind of fault (default: 18)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--only", default="", help="kinds of faults whose names have this text")
    others = parser.add_subparsers(dest="what")
    soak.add_options(others.add_parser("soak", help="a fault every 30 s for 20 minutes"))
    spot.add_options(others.add_parser("spot", help="workers come and go as a trace of spot instances says"))
    options = parser.parse_args()
    if options.what:
        (soak.soak if options.what == "soak" else spot.spot)(options)
        return
    kinds = {scenario.name: run_drawn(scenario) for scenario in SCENARIOS}
    killed = next(scenario for scenario in SCENARIOS if scenario.name == "server killed")
    kinds[FRESH] = lambda seed, folder: run_case(killed.case(seed), folder, fresh=True)
    kinds[BITS] = run_bits
    if os.geteuid() == 0:
        kinds |= {scenario.name: run_hurt(scenario) for scenario in HOST_SCENARIOS}
        kinds[CUT] = run_cut
        kinds[CUT_HUB] = run_cut_hub
    wanted = {name: run for name, run in kinds.items() if options.only in name}
    width = max(map(len, wanted))
    print(
        f"{SAMPLES} samples, {EPOCHS} epochs; pause: without an update after the fault, median and longest, in seconds"
        " (of a host that is cut off for good, beyond the timeout)"
        "; back: until a killed server is, median"
    )
    print(" " * width + "".join(f"{column:>11}" for column in COLUMNS))
    bad: list[Verdict] = []
    for name, run in wanted.items():
        verdicts = []
        for seed in range(options.first, options.first + options.seeds):
            with tempfile.TemporaryDirectory() as folder:
                verdicts.append(run(seed, Path(folder)))
        print(f"{name:<{width}}" + row(verdicts), flush=True)
        bad += [verdict for verdict in verdicts if verdict.fired and not verdict.well]
    for verdict in bad:
        said = verdict.said.strip().splitlines()[-1:]
        print(
            f"\n{verdict.case}\n  code {verdict.code}, lost {verdict.lost}, doubled {verdict.doubled}, {verdict.wrong}"
        )
        print(f"  {said}")
    sys.exit(bool(bad))


def run_drawn(scenario: Scenario) -> Callable[[int, Path], Verdict]:
    return lambda seed, folder: run_case(scenario.case(seed), folder)


def run_hurt(scenario: HostScenario) -> Callable[[int, Path], Verdict]:
    return lambda seed, folder: run_on_hosts(scenario.case(seed), folder, bits=scenario.bits)


def row(verdicts: list[Verdict]) -> str:
    """The columns of one kind of fault, without the runs in which it did not happen."""
    hurt = [verdict for verdict in verdicts if verdict.fired]
    pauses = [verdict.away for verdict in hurt] or [0.0]
    values = (
        len(hurt),
        sum(len(verdict.fired) for verdict in hurt),
        sum(verdict.pushes for verdict in hurt),
        sum(verdict.updates for verdict in hurt),
        sum(verdict.lost for verdict in hurt),
        sum(verdict.doubled for verdict in hurt),
        sum(len(verdict.wrong) for verdict in hurt),
        sum(verdict.code == 0 for verdict in hurt),
    )
    back = [seconds for verdict in hurt for seconds in verdict.back]
    times = (statistics.median(pauses), max(pauses), *([statistics.median(back)] if back else []))
    return "".join(f"{value:>11,}" for value in values) + "".join(f"{value:>11.2f}" for value in times)


if __name__ == "__main__":
    main()
