"""Runs a function as a whole process group of torch.distributed: real processes, forked so that they start at once."""

from __future__ import annotations

import contextlib
import datetime
import gc
import multiprocessing
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import paceline  # noqa: F401  (makes the backend known)
from helpers.support import answered

Work = Callable[..., Any]


class Pool:
    """Processes of one group that stay, and do one function after the other: `pool.run(work, *arguments)`."""

    def __init__(self, size: int, backend: str = "paceline", timeout: float = 30.0) -> None:
        import helpers.loaded  # noqa: F401  (only here: scripts that check primitives fork nobody)

        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-test-")
        context = multiprocessing.get_context("fork")
        self._members = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            settings = (rank, size, backend, timeout, str(Path(self._folder.name) / "store"))
            process = context.Process(target=_member, args=(theirs, *settings), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process, _ in self._members]

    def begin(self, work: Work, *arguments: Any) -> None:
        """Have all members call `work(rank, *arguments)`, a function of a module."""
        for _, end in self._members:
            end.send_bytes(pickle.dumps((work, arguments)))

    def finish(self, timeout: float = 60.0, dead: tuple[int, ...] = ()) -> list[Any]:
        """What each returned, or the exception that it raised; None for those that are known to be dead."""
        results: list[Any] = []
        for rank, (_, end) in enumerate(self._members):
            if rank in dead:
                results.append(None)
                continue
            assert answered(end, timeout), f"rank {rank} said nothing for {timeout} s"
            results.append(pickle.loads(end.recv_bytes()))
        return results

    def run(self, work: Work, *arguments: Any, timeout: float = 60.0) -> list[Any]:
        """What `work(rank, *arguments)` returned on each member; an exception of one is raised here."""
        self.begin(work, *arguments)
        results = self.finish(timeout)
        for rank, result in enumerate(results):
            if isinstance(result, BaseException):
                raise AssertionError(f"rank {rank}: {result.__notes__[0]}") from result
        return results

    def close(self) -> None:
        for _, end in self._members:
            with contextlib.suppress(OSError):  # it may be dead
                end.send_bytes(pickle.dumps((None, ())))
        for process, end in self._members:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
            end.close()
        self._folder.cleanup()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_group(work: Work, size: int, *arguments: Any, backend: str = "paceline", timeout: float = 30.0) -> list[Any]:
    """What `work(rank, *arguments)` returns on each member of a new group."""
    with Pool(size, backend, timeout) as pool:
        return pool.run(work, *arguments)


def _member(end: Connection, rank: int, size: int, backend: str, timeout: float, path: str) -> None:
    gc.freeze()  # what was there before the fork need not be looked through, and copied, by every worker
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started us may have had it ignored
    gc.freeze()  # or every collection would touch, and so copy, all that was imported before
    torch.set_num_threads(1)
    torch.manual_seed(100 + rank)
    store = distributed.FileStore(path, size)  # type: ignore[attr-defined]
    limit = datetime.timedelta(seconds=timeout)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    while True:
        work, arguments = pickle.loads(end.recv_bytes())
        if work is None:
            break
        try:
            result = work(rank, *arguments)
        except BaseException as error:
            error.add_note(traceback.format_exc())
            result = error
        end.send_bytes(pickle.dumps(result))
    distributed.destroy_process_group()
