"""A Ray cluster as the engine sees it: is there one, has it room, and agents in the places that it gives.

All that is asked of Ray itself is here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import math
import os
import platform
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.cluster import file_sync as file_sync_module
from paceline.cluster import process_set as processes_module
from paceline.cluster.engines import ray_agent as agent_module
from paceline.errors import JoinError, UsageError

_IGNORED = ["/runs/", ".git/", ".venv/", "__pycache__/", ".mypy_cache/", ".ruff_cache/", ".pytest_cache/"]
"""What does not travel with the script, besides what .gitignore and .rayignore name."""
_KNOCK = 10.0
"""Seconds for a cluster to answer at all."""
_STOP = 5.0
"""Seconds for the agents to end their processes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """What a run needs of a cluster."""

    workers: int
    each: dict[str, float]
    """For one worker, as Ray counts it."""
    servers: int = 0
    """Processes beside rank 0, a core each."""
    place: str = "spread"

    @property
    def bundles(self) -> list[dict[str, float]]:
        bundles = [dict(self.each) for _ in range(self.workers)]
        bundles[0]["CPU"] = bundles[0].get("CPU", 0.0) + self.servers
        return bundles

    @property
    def total(self) -> dict[str, float]:
        names = {name for bundle in self.bundles for name in bundle}
        return {name: sum(bundle.get(name, 0.0) for bundle in self.bundles) for name in sorted(names)}

    @property
    def threads(self) -> str:
        return str(max(1, int(self.each.get("CPU", 1))))


def parse_each(text: str) -> dict[str, float]:
    """`cpu=1,gpu=1` as Ray counts it."""
    each = {"CPU": 1.0}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if key not in ("cpu", "gpu") or not 0 <= number < math.inf:
            raise UsageError(f"--each is '{text}'; it must be like cpu=1,gpu=1, with numbers of 0 or more")
        each[key.upper()] = number
    return {key: value for key, value in each.items() if value}


def parse_environment(words: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE`, or `NAME` for the value that it has here."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or (not equals and name not in os.environ):
            raise UsageError(f"--env is '{word}'; it must be NAME=VALUE, or the NAME of a variable that is set here")
        found[name] = value if equals else os.environ[name]
    return found


class RayCluster:
    """A connection to a Ray cluster, and places for workers there."""

    def __init__(self, address: str | None, folder: Path | None, room: Room) -> None:
        """Connect, and see whether so much could be had at all. `folder` travels to the nodes."""
        self.room = room
        self._group: Any = None
        self._ray = ray = _import()
        self.Lost = (ray.exceptions.RayActorError, ray.exceptions.RayTaskError, ray.exceptions.RuntimeEnvSetupError)
        """How Ray says that an agent is not there any more, or could not do as it was told."""
        where = address or known_address() or "auto"
        _knock(where)
        try:
            ray.init(
                address=where,
                runtime_env={"working_dir": str(folder), "excludes": _IGNORED} if folder else None,
                log_to_driver=False,
                logging_level="ERROR",
            )
        except (ConnectionError, TimeoutError, OSError) as error:
            raise UsageError(_no_cluster(where)) from error
        except (RuntimeError, ValueError) as error:
            raise UsageError(f"Ray at '{where}' did not take this run: {first_line(error)}") from None
        for module in (agent_module, processes_module, file_sync_module):
            ray.cloudpickle.register_pickle_by_value(module)  # a node need not import ours to run them
        self._check_room()

    def wait(self, references: list[Any], seconds: float) -> list[Any]:
        """Those that are ready, as soon as one is."""
        if not references:
            time.sleep(seconds)
            return []
        ready: list[Any] = self._ray.wait(references, num_returns=1, timeout=seconds)[0]
        if ready:  # perhaps not the only one
            ready = self._ray.wait(references, num_returns=len(references), timeout=0)[0]
        return ready

    def get(self, reference: Any) -> Any:
        return self._ray.get(reference)

    def cause(self, error: BaseException) -> str:
        """Why an agent is not there any more, where it failed by itself: " (so)", or nothing."""
        return f" ({error.cause!r})" if isinstance(error, self._ray.exceptions.RayTaskError) else ""

    def reserve(self, wait: Callable[[list[Any], float], list[Any]], seconds: float = 60.0) -> None:
        """Get the places; `wait` may raise to give up."""
        strategy = {"spread": "SPREAD", "pack": "PACK"}[self.room.place]
        self._group = self._ray.util.placement_group(self.room.bundles, strategy=strategy)
        ready = self._group.ready()
        until = time.monotonic() + seconds
        while not wait([ready], 0.2):
            if time.monotonic() >= until:
                raise UsageError(
                    f"no room came free in {seconds:g} s for {_listed(self.room.total)}; {self._what_there_is()}"
                )

    def hire(self, bundle: int, run: str) -> Any:
        """A new agent in this place."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=bundle
        )
        needs = self.room.bundles[bundle]
        kind = self._ray.remote(
            num_cpus=needs.get("CPU", 0), num_gpus=needs.get("GPU", 0), max_concurrency=8, max_restarts=0
        )(agent_module.Agent)
        return kind.options(scheduling_strategy=strategy).remote(run)

    def check(self, facts: dict[str, str]) -> None:
        """Whether the node of this agent has what a worker needs."""
        host, ours = facts["host"], importlib.metadata.version("paceline")
        if not facts["version"]:
            raise JoinError(f"node {host} has no paceline beside {facts['python']}; install version {ours} there")
        here = platform.python_version()
        if facts["version"] != ours or facts["python"].rpartition(".")[0] != here.rpartition(".")[0]:
            raise JoinError(
                f"node {host} has paceline {facts['version']} on Python {facts['python']}, and here it is {ours} on "
                f"{here}; they must be alike"
            )

    def dismiss(self, agent: Any) -> None:
        """End one agent, of whom nothing is asked."""
        with contextlib.suppress(Exception):
            self._ray.kill(agent)

    def release(self, agents: list[Any]) -> None:
        """End the agents and all that they started, give the places back, and take leave of the cluster."""
        ray = self._ray
        with contextlib.suppress(Exception):
            stopping = [agent.stop.remote() for agent in agents]
            if stopping:
                ray.wait(stopping, num_returns=len(stopping), timeout=_STOP)
        for agent in agents:
            with contextlib.suppress(Exception):
                ray.kill(agent)
        with contextlib.suppress(Exception):
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
        ray.shutdown()

    def _check_room(self) -> None:
        have = self._ray.cluster_resources()
        if any(have.get(name, 0.0) < amount for name, amount in self.room.total.items()):
            servers = f" and {self.room.servers} for servers" if self.room.servers else ""
            needed = _listed(self.room.total)
            sentence = f"{self.room.workers} workers need {needed}{servers and ', servers among them'}"
            there = self._what_there_is()
            self._ray.shutdown()
            raise UsageError(f"{sentence}; {there}. Start fewer, or give each less with --each cpu=0.5")

    def _what_there_is(self) -> str:
        ray = self._ray
        nodes = sum(node["Alive"] for node in ray.nodes())
        have, free = ray.cluster_resources(), ray.available_resources()
        words = [f"{have.get(name, 0):g} {name} ({free.get(name, 0):g} free)" for name in self.room.total]
        return f"the cluster has {' and '.join(words)} on {nodes} node{'s' * (nodes != 1)}"


def _import() -> Any:
    # Before Ray is imported: it tells nobody that it is used.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise UsageError("--on ray needs Ray, which is not installed here: pip install 'paceline[ray]'") from None
    return ray


def known_address() -> str | None:
    """Of the cluster that the environment names, or that was started last on this machine; as Ray finds it."""
    if named := os.environ.get("RAY_ADDRESS"):
        return named
    scratch = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    note = Path(scratch) / "ray" / "ray_current_cluster"
    return note.read_text(encoding="ascii").strip() or None if note.exists() else None


def _knock(where: str) -> None:
    """Whether anybody is there: Ray itself would wait for minutes."""
    host, colon, port = where.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # "auto", or something that Ray itself will refuse
    try:
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK).close()
    except (OSError, OverflowError):
        raise UsageError(_no_cluster(where)) from None


def _no_cluster(where: str) -> str:
    place = "on this machine" if where == "auto" else f"at '{where}'"
    return (
        f"no Ray cluster answers {place}; start one with `ray start --head`, or name another with RAY_ADDRESS or "
        f"--on ray://HOST:10001"
    )


def first_line(error: BaseException) -> str:
    """What matters of Ray's long messages."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _listed(amounts: dict[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in amounts.items())
