"""Runs torch's own tests of process groups, from torch's wheel, on gloo and on paceline, and compares the results.

    python benchmarks/upstream.py                       # all of distributed_test.py, with 2 and with 3 members
    python benchmarks/upstream.py --world 2 --only all_gather,monitored_barrier

The tests are chosen by the name of a backend when they are loaded: those of gloo, for both. Then they run on groups of
the backend.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUITE = "torch.testing._internal.distributed.distributed_test"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", default="2,3", help="members of a group, as 2,3")
    parser.add_argument("--backends", default="gloo,paceline")
    parser.add_argument("--only", default="", help="parts of the names of tests, as gather,barrier")
    parser.add_argument("--details", action="store_true", help="print the text of each failure")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(options.run, int(options.world), options.only.split(","))))
        return
    unequal = False
    for world in options.world.split(","):
        results = {name: start(name, world, options.only) for name in options.backends.split(",")}
        for name, result in results.items():
            counts = {kind: sum(kind == got for got, _ in result.values()) for kind in ("passed", "skipped", "failed")}
            print(f"{world} members, {name:>8}: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))
        for test in sorted({test for result in results.values() for test in result}):
            outcomes = {name: result.get(test, ("absent", ""))[0] for name, result in results.items()}
            if len(set(outcomes.values())) > 1 or "failed" in outcomes.values():
                unequal |= len(set(outcomes.values())) > 1
                print(f"    {test}: " + ", ".join(f"{name} {outcome}" for name, outcome in outcomes.items()))
                for name, result in results.items():
                    if options.details and result.get(test, ("", ""))[0] == "failed":
                        print(f"      {name}: {result[test][1]}")
    sys.exit(unequal)


class Name(str):
    """A backend's name that also equals "gloo": a few tests ask in their bodies whether they are on gloo."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other in (str(self), "gloo")


def start(backend: str, world: str, only: str) -> dict[str, list[str]]:
    """Runs the tests in a process of their own; returns outcome and text by name."""
    command = [sys.executable, str(Path(__file__)), "--run", backend, "--world", world, "--only", only]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    results: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return results


def run(backend: str, world: int, parts: list[str]) -> dict[str, list[str]]:
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(world), OMP_NUM_THREADS="1")
    os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "200")
    tests = load(backend)
    chosen = [name for name in unittest.TestLoader().getTestCaseNames(tests) if any(part in name for part in parts)]
    results = {}
    for name in chosen:
        with silent():
            result = unittest.TestResult()
            tests(name).run(result)
        problems = [text for _, text in result.failures + result.errors]
        outcome = "failed" if problems else "skipped" if result.skipped else "passed"
        results[name] = [outcome, problems[0] if problems else ""]
        print(name, outcome, file=sys.stderr, flush=True)
    return results


def load(backend: str) -> Any:
    """Torch's tests, in processes that are forked, on groups of this backend."""
    import torch
    from torch import multiprocessing

    # A package of the base class of torch's tests; those of process groups use nothing of it.
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    from torch.testing._internal.distributed import distributed_test as suite

    torch.set_num_threads(1)
    suite.BACKEND = Name(backend)
    for kind in ("", "CUDA_", "SEND_RECV_"):
        getattr(suite, f"{kind}PROFILING_SUPPORTED_BACKENDS").append(backend)

    class Tests(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    return Tests


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Drops the output of this process and of those that it starts."""
    kept, nothing = [os.dup(1), os.dup(2)], os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1), os.dup2(nothing, 2)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        os.dup2(kept[0], 1), os.dup2(kept[1], 2)
        for descriptor in (*kept, nothing):
            os.close(descriptor)


if __name__ == "__main__":
    main()
