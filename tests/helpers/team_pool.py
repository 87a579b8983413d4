"""Processes that stay, and are the workers of one team after the other.

A worker that is forked for every team copies thousands of pages, which takes half of a small team's CPU time.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import random
import signal
import traceback
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import numpy
import torch

import helpers.loaded  # noqa: F401
from helpers import forks
from helpers.support import answered
from paceline.cluster.compiler import import_compiler_late
from paceline.config import Launch, capacity
from paceline.team import current
from paceline.transport import Barrier, Memory

_LIBC = ctypes.CDLL(None, use_errno=True)


class TeamPool:
    """Runs functions of modules as teams, as `teams.run_team` with `joined=False` does, in processes that are kept.

    A function must leave its process as it found it. After one that may not have, `renew` ends the processes.
    """

    def __init__(self) -> None:
        self._members: list[tuple[Any, Connection]] = []

    def run(
        self, work: Callable[..., Any], workers: int, *arguments: Any, launch: Launch, timeout: float = 60.0
    ) -> list[Any]:
        """What `work(None, *arguments)` returns on each worker, by rank; its exception is raised here if it fails."""
        while len(self._members) < workers:
            self._members.append(self._started())
        control = Memory.create(Barrier.memory_size(capacity(workers)))
        results, failure = [], ""
        try:
            for rank, (process, end) in enumerate(self._members[:workers]):
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
                variables = {**os.environ, **{name: str(value) for name, value in place.items()}}
                end.send_bytes(pickle.dumps((work, arguments, launch, variables)))
                reduction.send_handle(end, control.descriptor, process.pid)
            for rank, (_, end) in enumerate(self._members[:workers]):
                assert answered(end, timeout), f"rank {rank} said nothing for {timeout} s"
                fine, value = pickle.loads(end.recv_bytes())
                failure = failure or ("" if fine else f"rank {rank}: {value}")
                results.append(value)
            assert not failure, failure
        except (AssertionError, EOFError, OSError) as error:
            self.renew()
            raise AssertionError(str(error) or "a worker ended without a word") from error
        finally:
            control.close_descriptor()
        return results

    def renew(self) -> None:
        """Ends the processes; the next team gets new ones."""
        for process, end in self._members:
            process.kill()
            process.join()
            end.close()
        self._members.clear()

    def _started(self) -> tuple[Any, Connection]:
        if not self._members:
            atexit.unregister(self.renew)
            atexit.register(self.renew)  # before multiprocessing waits for them
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=_stay, args=(theirs,), daemon=False)
        process.start()
        theirs.close()
        return process, ours


def _stay(end: Connection) -> None:
    """A worker of one team after the other, until it is killed."""
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    gc.freeze()  # what was there before the fork need not be looked through, and copied
    forks.fork_servers()
    atexit._clear()  # of this process are only those that the function registers
    import_compiler_late()  # as where torch is imported by a worker
    torch.set_num_threads(1)
    numbers, others, dtype = random.getstate(), numpy.random.get_state(), torch.get_default_dtype()
    while True:
        work, arguments, launch, variables = pickle.loads(end.recv_bytes())
        descriptor = reduction.recv_handle(end)
        settings = {name: getattr(launch, name) for name in launch.__struct_fields__} | {"control": descriptor}
        os.environ.clear()
        os.environ.update(variables | Launch(**settings).to_environment())
        random.setstate(numbers)
        numpy.random.set_state(others)
        torch.set_default_dtype(dtype)
        torch.manual_seed(100 + int(variables["RANK"]))
        try:
            value: tuple[bool, Any] = (True, work(None, *arguments))
            atexit._run_exitfuncs()  # as at the end of a script
        except BaseException:
            value = (False, traceback.format_exc())
        with contextlib.suppress(OSError):
            os.close(descriptor)
        current._left = False  # one process is one worker of one team, but for this
        end.send_bytes(pickle.dumps(value))
        gc.collect()
