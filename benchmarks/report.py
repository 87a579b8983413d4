"""What a report of a long run costs: 8 workers and 100,000 steps each. One command: `python benchmarks/report.py`.

Writes the events of such a run (drawn, not trained: that would take hours), has them merged and reported, and says how
long it took, how much memory, how large the page is and, with chromium and playwright, how soon it can be looked at.
"""

import argparse
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from paceline.events import Compute, Join, Load, Metric, Update, Wait
from paceline.events.summary import merge

WORKERS = 8
SLOW = 5
"""Whose steps take half as long again; every 20,000th step of worker 2 takes fifty times as long."""


def write(folder: Path, steps: int) -> None:
    """The streams of a run under all-reduce."""
    streams = folder / "streams"
    streams.mkdir(parents=True)
    files = [(streams / f"{rank}.jsonl").open("wb") for rank in range(WORKERS)]
    encode = msgspec.json.Encoder().encode
    draw = random.Random(1)
    now = 1000.0
    for rank, file in enumerate(files):
        file.write(encode(Join(rank, now, rank, "host", "cpu", "all-reduce", 1.7e9)) + b"\n")
    for step in range(steps):
        lengths = [0.001 * (1.5 if rank == SLOW else 1.0) + draw.expovariate(20000) for rank in range(WORKERS)]
        if step % 20000 == 10000:
            lengths[2] *= 50
        last = max(range(WORKERS), key=lengths.__getitem__)
        met = now + 0.0001 + lengths[last]
        for rank, file in enumerate(files):
            ready = now + 0.0001 + lengths[rank]
            lines = [
                Load(rank, now, 0.0001),
                Compute(rank, now + 0.0001, lengths[rank], step, 1, 32, 0.0, lengths[rank] / 3),
                Update(rank, met, 0.0001, step + 1, 1000, WORKERS),
            ]
            if rank != last:
                lines.insert(2, Wait(rank, ready, met - ready, last))
            if rank == 0 and step % 10 == 0:
                lines.append(Metric(0, met, step, {"loss": 2.0 / (1 + step / 1000)}))
            file.write(b"".join(encode(line) + b"\n" for line in lines))
        now = met + 0.0001
    for file in files:
        file.close()


def opened(page: Path) -> float | None:
    """Seconds until the page has drawn everything, in a real browser."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 800})
        start = time.perf_counter()
        tab.goto(page.resolve().as_uri())
        tab.wait_for_function("window.paceline && window.paceline.ready")
        seconds = time.perf_counter() - start
        browser.close()
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "long"
        print(f"writing the events of {WORKERS} workers, {options.steps:,} steps each", file=sys.stderr, flush=True)
        write(folder, options.steps)
        start = time.perf_counter()
        merge(folder, WORKERS)
        merged = time.perf_counter() - start
        size = (folder / "events.jsonl").stat().st_size
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "paceline", "report", str(folder)], check=True, stdout=subprocess.DEVNULL)
        reported = time.perf_counter() - start
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
        page = folder / "report.html"
        print(f"events        {size / 1e6:8.1f} MB, merged in {merged:.1f} s")
        print(f"report made   {reported:8.1f} s, with {memory:.2f} GB of memory")
        print(f"report.html   {page.stat().st_size / 1e6:8.1f} MB")
        seconds = opened(page)
        print("opened        " + ("– (needs playwright)" if seconds is None else f"{seconds:8.1f} s"))


if __name__ == "__main__":
    main()
