"""Runs a function as a team whose workers are on separate hosts, forked so that they start at once."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch._dynamo  # any optimizer imports it, which takes seconds: once here, not once in every fork

import helpers.loaded  # noqa: F401
import paceline
from helpers import forks
from helpers.hosts import Host
from helpers.support import answered
from paceline.config import Launch, Timeouts
from paceline.events import Event, read
from paceline.events.summary import merge
from paceline.transport.keys import VARIABLE, new_key

_PORT = 29400


class Failure(Exception):
    """What a worker ended with, if not with a value."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}\n{trace}")
        self.kind, self.message = kind, message


class Spread:
    """A team on hosts: so many workers on each."""

    def __init__(
        self,
        work: Callable[..., Any],
        hosts: Sequence[Host],
        per_host: int,
        *arguments: Any,
        launch: Launch | None = None,
        folder: Path | None = None,
        key: str | None = "",
        timeouts: Timeouts | None = None,
        strategy: str = "sync",
        servers: str | None = None,
    ) -> None:
        """key: by default a new one; None for a team without."""
        timeouts = timeouts or Timeouts(barrier=60.0, join=60.0)
        launch = launch or Launch(strategy=strategy, servers=servers, timeouts=timeouts)
        launch = msgspec.structs.replace(launch, folder=None if folder is None else str(folder))
        self.key = new_key() if key == "" else key
        self.folder, self.size = folder, len(hosts) * per_host
        context = multiprocessing.get_context("fork")
        self.processes, self._ends = [], []
        for rank in range(self.size):
            ours, theirs = context.Pipe(duplex=False)
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % per_host),
                "WORLD_SIZE": str(self.size),
                "LOCAL_WORLD_SIZE": str(per_host),
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": str(_PORT),
                **launch.to_environment(),
                **({} if self.key is None else {VARIABLE: self.key}),
            }
            host = hosts[rank // per_host]
            process = context.Process(target=member, args=(work, arguments, host, environment, theirs), daemon=False)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._ends.append(ours)

    def results(self, seconds: float = 60.0) -> list[Any]:
        """By rank, what its function returned, or a Failure."""
        until = time.monotonic() + seconds
        results: list[Any] = []
        for rank, end in enumerate(self._ends):
            try:
                if not answered(end, max(0.0, until - time.monotonic())):
                    results.append(Failure("Hang", f"rank {rank} said nothing for {seconds} s", ""))
                    continue
                fine, value = pickle.loads(end.recv_bytes())
                results.append(value if fine else Failure(*value))
            except EOFError:
                results.append(Failure("Death", f"rank {rank} ended without a word", ""))
        return results

    def values(self, seconds: float = 60.0) -> list[Any]:
        """The same; raises the first failure."""
        results = self.results(seconds)
        for result in results:
            if isinstance(result, Failure):
                raise result
        self.close()
        return results

    def events(self) -> list[Event]:
        """Of a run that is over, by time."""
        assert self.folder is not None
        self.close()
        merge(self.folder, self.size)
        return list(read(self.folder / "events.jsonl"))

    def close(self) -> None:
        for process in self.processes:
            process.join(8.0)
            if process.is_alive():
                process.kill()
                process.join()
        for end in self._ends:
            end.close()

    def __enter__(self) -> Spread:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.is_alive():
                with contextlib.suppress(OSError):
                    process.kill()
        self.close()


def member(
    work: Callable[..., Any], arguments: tuple[Any, ...], host: Host, environment: dict[str, str], end: Any
) -> None:
    gc.freeze()  # what was there before the fork need not be looked through, and copied, by every worker
    host.enter()
    forks.fork_servers()
    gc.freeze()  # or every collection would touch, and so copy, all that was imported before
    torch.set_num_threads(1)
    torch.manual_seed(1)
    os.environ.update(environment)
    try:
        with paceline.join() as team:
            value = work(team, *arguments)
        end.send_bytes(pickle.dumps((True, value)))
    except BaseException as error:
        end.send_bytes(pickle.dumps((False, (type(error).__name__, str(error), traceback.format_exc()))))
    finally:
        end.close()
