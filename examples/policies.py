"""Draws what every policy does: trains under each, on four workers of which the last is slow, and draws the timeline.

`python examples/policies.py docs/figures` writes `policy-NAME.svg` there.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.events.schema import read
from paceline.report import timeline

SCRIPT = Path(__file__).resolve().with_name("train_paceline.py")
SLOW = ["--slow", "all:0.02+exp(0.02)", "--slow", "3:0.06+exp(0.06)", "--seed", "2"]
"""Every worker's steps are of drawn length, and the last one's three times as long."""
POLICIES = {
    "sync": "sync: everybody waits for the slowest",
    "k-sync:k=2": "k-sync:k=2: the first two make an update, the others are cancelled",
    "k-batch-sync:k=4": "k-batch-sync:k=4: four minibatches make an update, whoever they are from",
    "async": "async: every gradient is an update",
    "k-async:k=2": "k-async:k=2: two gradients make an update, the others go on, stale",
    "k-batch-async:k=4": "k-batch-async:k=4: four minibatches make an update, nobody waits",
    "ssp:s=2": "ssp:s=2: nobody gets more than two steps ahead of the slowest",
    "groups:size=2": "groups:size=2: two groups, all-reduce inside, async between",
    "adaptive:of=k-sync": "adaptive:of=k-sync: K grows as the loss falls",
}


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    for number, (spec, title) in enumerate(POLICIES.items(), start=1):
        print(f"{number} of {len(POLICIES)}: {spec}", flush=True)
        with tempfile.TemporaryDirectory() as work:
            command = [sys.executable, "-m", "paceline", "run", str(SCRIPT), "--workers", "4", "--strategy", spec]
            command += [*SLOW, "--name", "figure", "--quiet", "--", "--epochs", "2"]
            code = subprocess.run(command, check=False, cwd=work).returncode
            if code:
                return code
            events = list(read(Path(work) / "runs" / "figure" / "events.jsonl"))
        (folder / f"policy-{spec.partition(':')[0]}.svg").write_text(timeline(events, title, updates=10))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "figures")))
