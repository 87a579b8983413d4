"""Hurts a training every so often, for a long time: how much of its work is left, compared with undisturbed time."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness.contestants import Contestant, Paceline, PacelineHosts, TorchFT, Torchrun, Work

Span = tuple[float, float]
COLUMNS = ("faults", "goodput", "samples/s", "lost", "twice", "again", "loss")
_START = 180.0
"""Seconds until a training has begun."""
_STOPPED = 3.0
"""Seconds for which a process is stopped."""
_CUT = 2.0
"""Seconds for which a cable is pulled."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=20.0, help="with faults, for each contestant (default: 20)")
    parser.add_argument("--every", type=float, default=30.0, help="seconds from a fault to the next (default: 30)")
    parser.add_argument("--strategy", action="append", help="of Paceline; repeatable (default: async)", default=None)
    parser.add_argument("--folder", type=Path, help="where to keep the outputs of all processes")
    parser.add_argument("--without", default="", help="contestants to leave out: hosts,torchft,torchrun,reference")


def soak(options: argparse.Namespace) -> None:
    """Prints a line per contestant."""
    without = options.without.split(",")
    entrants: list[Callable[[Path], Contestant]] = [
        lambda folder, strategy=strategy: Paceline(folder, strategy)  # type: ignore[misc]
        for strategy in options.strategy or ["async"]
    ]
    if os.geteuid() == 0 and "hosts" not in without:
        entrants.append(lambda folder: PacelineHosts(folder, "async"))
    entrants += [kind for kind in (TorchFT, Torchrun) if kind.__name__.lower() not in without]
    cycles = max(1, round(options.minutes * 60 / (2 * options.every)))
    print(
        f"two workers; {cycles} times {options.every:g} s undisturbed, then {2 * options.every:g} s with 2 faults; "
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\ngoodput: samples per second that count, with faults "
        "over without; lost: samples without an effect; twice: counted twice in an epoch; again: computed again after "
        "a restart; loss: at the end, on other samples"
    )
    print(f"{'':<40}" + "".join(f"{column:>11}" for column in COLUMNS))
    with tempfile.TemporaryDirectory() as scratch:
        place = options.folder or scratch
        for number, make in enumerate(entrants):
            contestant = make(Path(place) / str(number))
            try:
                quiet, hurt, struck = _segments(contestant, cycles, options.every)
            except BaseException:  # an interrupt, or a contestant that does not come back
                contestant.end()
                raise
            work = contestant.work()
            _print(contestant.name, work, _rate(work, quiet), _rate(work, hurt), struck)
            if isinstance(contestant, Paceline) and "reference" not in without:
                reference = make(Path(place) / f"{number}-undisturbed")
                _until(reference, sum(samples for _, samples in work.counted))
                done = reference.work()
                span = [(done.counted[0][0], done.counted[-1][0])]
                _print("  the same, undisturbed", done, _rate(done, span), _rate(done, span), 0)


def _segments(contestant: Contestant, cycles: int, every: float) -> tuple[list[Span], list[Span], int]:
    """Trains in quiet and in hurt segments in turn; returns both, and how many faults there were."""
    contestant.start()
    _wait_begun(contestant)
    time.sleep(min(5.0, every))  # the first steps are slower
    quiet, hurt, struck = list[tuple[float, float]](), list[tuple[float, float]](), 0
    for _ in range(cycles):
        begin = time.monotonic()
        _sleep(contestant, begin + every)
        quiet.append((begin, time.monotonic()))
        begin = time.monotonic()
        for fault in range(2):
            _sleep(contestant, begin + fault * every)
            struck += _strike(contestant, contestant.targets[struck % len(contestant.targets)])
        _sleep(contestant, begin + 2 * every)
        hurt.append((begin, time.monotonic()))
    contestant.stop()
    return quiet, hurt, struck


def _strike(contestant: Contestant, target: str) -> int:
    """Kills a process, or stops it for a while; waits for one that is being started again."""
    if target.startswith("cable"):
        assert isinstance(contestant, PacelineHosts)
        contestant.cut(_CUT)
        return 1
    until = time.monotonic() + 60.0
    while (pid := contestant.find(target.replace("stop", "worker"))) is None:
        if time.monotonic() > until or not contestant.alive:
            sys.exit(f"{contestant.name}: there is no {target} after 60 s; see {contestant.folder}")
        time.sleep(0.05)
    if not target.startswith("stop"):
        os.kill(pid, signal.SIGKILL)
        return 1
    os.kill(pid, signal.SIGSTOP)
    time.sleep(_STOPPED)
    os.kill(pid, signal.SIGCONT)
    return 1


def _until(contestant: Contestant, samples: int) -> None:
    """Trains undisturbed on so many samples."""
    contestant.start()
    _wait_begun(contestant)
    while contestant.samples() < samples:
        _sleep(contestant, time.monotonic() + 0.2)
    contestant.stop()


def _wait_begun(contestant: Contestant) -> None:
    until = time.monotonic() + _START
    while not contestant.begun:
        if time.monotonic() > until:
            contestant.end()
            sys.exit(f"{contestant.name} has not begun after {_START:g} s; see {contestant.folder}")
        time.sleep(0.1)


def _sleep(contestant: Contestant, until: float) -> None:
    while (left := until - time.monotonic()) > 0:
        if not contestant.alive:
            contestant.work()
            sys.exit(f"{contestant.name} has ended by itself; see {contestant.folder}")
        time.sleep(min(left, 0.2))


def _rate(work: Work, spans: list[tuple[float, float]]) -> float:
    inside = sum(samples for moment, samples in work.counted if any(a < moment <= b for a, b in spans))
    return inside / sum(b - a for a, b in spans)


def _print(name: str, work: Work, quiet: float, hurt: float, struck: int) -> None:
    values = f"{struck:>11}{hurt / quiet:>11.1%}{quiet:>11,.0f}{work.lost:>11,}{work.twice:>11,}{work.again:>11,}"
    print(f"{name:<40}{values}{work.loss:>11.4f}", flush=True)
