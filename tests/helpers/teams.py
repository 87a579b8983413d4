"""Runs a function as a whole team: real processes on real shared memory, forked so that they start at once."""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import pickle
import runpy
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import helpers.loaded  # noqa: F401
import paceline
from helpers import forks
from helpers.load import allowed
from helpers.support import answered
from paceline.cli import main
from paceline.cluster import membership
from paceline.cluster.compiler import import_compiler_late
from paceline.config import Launch, Timeouts, capacity
from paceline.transport import Barrier, Memory


def run_team(
    work: Callable[..., Any],
    workers: int,
    *arguments: Any,
    launch: Launch | None = None,
    timeout: float = 60.0,
    places: str | None = None,
    more: dict[str, str] | None = None,
    may_die: Sequence[int] = (),
    joined: bool = True,
) -> list[Any]:
    """What `work(team, *arguments)` returns on each worker, by rank; its exception is raised here if it fails.

    joined: whether to join the team first; if not, `work` is given None for it.
    """
    control = Memory.create(Barrier.memory_size(capacity(workers)))
    launch = launch or Launch(timeouts=Timeouts(barrier=60.0, join=60.0))
    settings = {name: getattr(launch, name) for name in launch.__struct_fields__}
    if places is None:
        settings["control"] = control.descriptor
    context = multiprocessing.get_context("fork")
    ends = []
    for rank in range(workers):
        ours, theirs = context.Pipe(duplex=False)
        place = (rank, workers, Launch(**settings), places, more or {}, joined)
        process = context.Process(target=_member, args=(work, arguments, place, theirs), daemon=False)
        process.start()
        theirs.close()
        ends.append((process, ours))
    results, failure = [], None
    for rank, (_, end) in enumerate(ends):
        try:
            assert answered(end, timeout), f"rank {rank} said nothing for {timeout} s"
            fine, value = pickle.loads(end.recv_bytes())
        except (EOFError, AssertionError) as error:
            fine, value = False, f"rank {rank} ended without a word: {error}"
        if not fine and failure is None and rank not in may_die:
            failure = f"rank {rank}: {value}"
        results.append(value)
    for process, _ in ends:
        process.join(5.0)
        if process.is_alive():
            process.kill()
            process.join()
    control.close_descriptor()
    if failure is not None:
        raise AssertionError(failure)
    return results


def run_script(
    script: Path, workers: int, *arguments: str, launch: Launch | None = None, timeout: float = 60.0
) -> list[tuple[str, str]]:
    """Run a script on each worker as `paceline run` would, without its launcher: torch need not be imported anew.

    Returns how it ended on each: the name of its exception and what that says, or two empty texts.
    """
    return run_team(_script, workers, str(script), arguments, launch=launch, timeout=timeout, joined=False)


def _script(_team: None, script: str, arguments: tuple[str, ...]) -> tuple[str, str]:
    sys.argv = [script, *arguments]
    os.chdir(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def run_command(words: Sequence[str | Path], cwd: Path, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run `paceline` with these words, in a fork: what it needs of torch need not be imported anew."""
    command = [str(word) for word in words]
    with tempfile.TemporaryDirectory(prefix="paceline-test-") as folder:
        out, err = Path(folder) / "stdout", Path(folder) / "stderr"
        process = multiprocessing.get_context("fork").Process(target=_command, args=(command, cwd, out, err))
        process.start()
        process.join(timeout)
        process.join(max(0.0, allowed(timeout) - timeout))
        if process.is_alive():
            process.kill()
            process.join()
            raise AssertionError(f"'paceline {' '.join(command)}' took more than {timeout} s:\n{err.read_text()}")
        return subprocess.CompletedProcess(command, process.exitcode or 0, out.read_text(), err.read_text())


def _command(command: list[str], cwd: Path, out: Path, err: Path) -> None:
    for number, path in ((1, out), (2, err)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    # Whoever tests may have put something else in their places.
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    sys.argv = ["paceline", *command]
    forks.fork_programs()
    os.chdir(cwd)
    main()


def run_spread(
    work: Callable[..., Any],
    places: str,
    *arguments: Any,
    launch: Launch | None = None,
    timeout: float = 60.0,
    may_die: Sequence[int] = (),
    joined: bool = True,
) -> list[Any]:
    """As `run_team`, on pretended machines: a letter per rank says on which; what would cross a network does so."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(holder.getsockname()[1])}
        return run_team(
            work,
            len(places),
            *arguments,
            launch=launch,
            timeout=timeout,
            places=places,
            more=environment,
            may_die=may_die,
            joined=joined,
        )


def _member(
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
    place: tuple[int, int, Launch, str | None, dict[str, str], bool],
    end: Connection,
) -> None:
    gc.freeze()  # what was there before the fork need not be looked through, and copied, by every worker
    rank, workers, launch, places, more, joined = place
    if places is not None:
        membership.machine = lambda: places[rank]
    forks.fork_servers()
    atexit._clear()  # of this process are only those that the script registers
    import_compiler_late()  # as where torch is imported by a worker
    gc.freeze()  # or every collection would touch, and so copy, all that was imported before
    torch.set_num_threads(1)
    torch.manual_seed(100 + rank)
    os.environ.update(
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers)}
    )
    os.environ.update(launch.to_environment())
    os.environ.update(more)
    try:
        with paceline.join() if joined else contextlib.nullcontext() as team:
            value = work(team, *arguments)
        if not joined:
            atexit._run_exitfuncs()  # as at the end of a script
        end.send_bytes(pickle.dumps((True, value)))  # by value: torch would hand over shared memory
    except BaseException:
        end.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        end.close()
