"""Draws what split replicas do, from real runs: `python examples/meshes.py docs/figures` writes SVG files there."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from paceline.events import Leave, read
from paceline.report import timeline

SCRIPT = Path(__file__).resolve().with_name("transformer.py")
SLOW = ["--slow", "2:4", "--slow", "3:4"]
ARGUMENTS = ["--width", "96", "--layers", "4", "--steps", "14", "--batch"]


class Figure(NamedTuple):
    title: str
    strategy: str
    workers: int
    slow: list[str]
    updates: int
    batch: int
    """Samples: 16 for each replica."""


FIGURES = {
    "tensor": Figure(
        "tensor:degree=2: both workers compute every step, half of it each", "tensor:degree=2", 2, [], 6, 16
    ),
    "mesh-all-reduce": Figure(
        "mesh, all-reduce between two pipelines, the second slow: the first waits",
        "mesh:data=2,pipeline=2,microbatches=2",
        4,
        SLOW,
        3,
        32,
    ),
    "mesh-k-sync": Figure(
        "mesh, k-sync:k=1 between them: the first goes on, the second comes too late",
        "mesh:data=2,pipeline=2,microbatches=2,sync=k-sync:k=1",
        4,
        SLOW,
        8,
        32,
    ),
}


def main(folder: Path, names: list[str]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    chosen = {name: figure for name, figure in FIGURES.items() if not names or name in names}
    for number, (name, figure) in enumerate(chosen.items(), start=1):
        print(f"{number} of {len(chosen)}: {name}", flush=True)
        with tempfile.TemporaryDirectory() as work:
            command = [sys.executable, "-m", "paceline", "run", str(SCRIPT), "--workers", str(figure.workers)]
            command += ["--quiet", "--strategy", figure.strategy, *figure.slow, "--name", "figure", "--", *ARGUMENTS]
            code = subprocess.run(
                [*command, str(figure.batch)], check=False, cwd=work, stdout=subprocess.DEVNULL
            ).returncode
            if code:
                return code
            events = list(read(Path(work) / "runs" / "figure" / "events.jsonl"))
        # Whoever is quicker is done sooner; what the others do alone then is not the point.
        over = min(event.start for event in events if isinstance(event, Leave))
        events = [event for event in events if event.start < over]
        (folder / f"{name}.svg").write_text(timeline(events, figure.title, figure.updates))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "figures"), sys.argv[2:]))
