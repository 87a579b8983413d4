"""The report tells why a worker is slow where the kernel does. Each reason is really caused, on worker 1."""

from __future__ import annotations

import contextlib
import gc
import mmap
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.load import above_noise
from helpers.split_models import launched
from helpers.teams import run_team

from paceline import Team
from paceline.report.source import open_run

WORKERS, STEPS, VICTIM = 3, 16, 1
BURNERS = 4


def compute(seconds: float) -> None:
    """Takes so many seconds on a core, however long that lasts."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def _burn(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


@contextmanager
def _burners(core: int) -> Iterator[None]:
    """Processes that compute on one core."""
    context = multiprocessing.get_context("fork")
    burners = [context.Process(target=_burn, args=(core,), daemon=True) for _ in range(BURNERS)]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.join()


class Causes:
    """What a worker does in its forward passes, by cause."""

    def __init__(self, cause: str, folder: Path, factor: float) -> None:
        self._seconds, self._folder = 0.004 * factor, folder
        self._work: Callable[[], None] = getattr(self, cause)
        self._garbage: list[Any] = []

    def step(self, *, slow: bool) -> None:
        compute(self._seconds)
        if slow:
            self._work()

    def queued(self) -> None:
        """Others compute on its core."""

    def collecting(self) -> None:
        if not self._garbage:
            self._garbage += [{"number": number} for number in range(20_000)]
        began = time.perf_counter()
        while time.perf_counter() - began < 4 * self._seconds:
            gc.collect()

    def reading(self) -> None:
        """Faults in pages of a file that are not in memory."""
        with (self._folder / "data").open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                mapped.madvise(mmap.MADV_RANDOM)
                began = time.perf_counter()
                for page in range(0, len(mapped), mmap.PAGESIZE):
                    mapped[page]
                    if time.perf_counter() - began > 8 * self._seconds:
                        break

    def mapping(self) -> None:
        began = time.perf_counter()
        while time.perf_counter() - began < 4 * self._seconds:
            with mmap.mmap(-1, 1 << 22) as mapped:
                mapped.madvise(mmap.MADV_NOHUGEPAGE)
                for page in range(0, len(mapped), mmap.PAGESIZE):
                    mapped[page] = 1

    def blocked(self) -> None:
        time.sleep(4 * self._seconds)


def train(team: Team, cause: str, folder: str, factor: float) -> None:
    causes, slow = Causes(cause, Path(folder), factor), team.rank == VICTIM
    if cause == "queued" and slow:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    else:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))  # whatever else runs on this machine
    model: Any = torch.nn.Linear(2, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = team.setup(model, optimizer)
    for _ in range(STEPS):
        causes.step(slow=slow)
        model(torch.ones(1, 2)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


WORDS = {
    "queued": "it waited for a core",
    "collecting": "it collected garbage (Python's gc)",
    "reading": "it waited for files or pages that were read from storage",
    "mapping": "it mapped memory anew (page faults)",
    "blocked": "it slept, or waited for another process, a lock or a socket",
}


@pytest.mark.parametrize("cause", WORDS)
def test_the_reason_is_named_and_how_much_of_the_time_it_took(cause: str, tmp_path: Path) -> None:
    def check(factor: float) -> None:
        folder = tmp_path / f"{factor:g}"
        folder.mkdir()
        if cause == "reading":
            with (folder / "data").open("wb") as file:
                file.write(os.urandom(1 << 24))
                os.fsync(file.fileno())
        core = min(os.sched_getaffinity(0))
        arguments = (cause, str(folder), factor)
        launch = launched("all-reduce", folder=str(folder / "run"))
        if cause == "queued":
            with _burners(core):
                run_team(train, WORKERS, *arguments, launch=launch)
        else:
            run_team(train, WORKERS, *arguments, launch=launch)
        facts = open_run(folder / "run").facts(pictures=False)
        found = next(one for one in facts["slowness"] if one["ranks"] == [VICTIM])
        assert found["reason"] == cause, facts["verdict"]
        share = found["reason_share"]
        assert 0.3 < share <= 1.0
        assert f"{WORDS[cause]} {share:.0%} of the time" in facts["verdict"][0]
        assert WORDS[cause].removeprefix("it ") in facts["workers"][VICTIM]["because"]

    above_noise(check, (1.0, 1.5, 2.0))
