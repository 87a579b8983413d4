"""The Ray engine's connection to a cluster: checks that it is there and has room, reserves it, and starts agents.

All calls of Ray itself are here.
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
"""Files that are not sent with the script, beside those that .gitignore and .rayignore name."""
PLACEMENTS = {"spread": "SPREAD", "pack": "PACK"}
"""Values of `--place`, each with Ray's name for it."""
_PROBE = 10.0
"""Seconds for a cluster to answer at all."""
_STOP = 5.0
"""Seconds for the agents to end their processes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """Resources that a run needs of a cluster."""

    workers: int
    each: dict[str, float]
    """Of one worker, by Ray's name of the resource."""
    servers: int = 0
    """Server processes in rank 0's bundle, a core each."""
    placement: str = "spread"

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
    """`cpu=1,gpu=1` by Ray's names of the resources."""
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
    """Variables given as `NAME=VALUE`, or as `NAME` for the value in this process."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or (not equals and name not in os.environ):
            raise UsageError(f"--env is '{word}'; it must be NAME=VALUE, or the NAME of a variable that is set here")
        found[name] = value if equals else os.environ[name]
    return found


class RayCluster:
    """A connection to a Ray cluster, and the placement group of one run."""

    def __init__(self, address: str | None, folder: Path | None, room: Room) -> None:
        """Connects, and checks that the cluster could have enough room at all. `folder` is sent to the nodes."""
        self.room = room
        self._group: Any = None
        self._ray = ray = _import()
        self.Lost = (ray.exceptions.RayActorError, ray.exceptions.RayTaskError, ray.exceptions.RuntimeEnvSetupError)
        """Errors by which Ray reports that an agent is lost, or that its call failed."""
        where = address or known_address() or "auto"
        _probe(where)
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
            ray.cloudpickle.register_pickle_by_value(module)  # nodes run them without importing the package
        self._check_room()

    def wait(self, references: list[Any], seconds: float) -> list[Any]:
        """The references that are ready, as soon as one is."""
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
        """The error of an agent that failed by itself, in brackets; empty if it was lost otherwise."""
        return f" ({error.cause!r})" if isinstance(error, self._ray.exceptions.RayTaskError) else ""

    def reserve(self, wait: Callable[[list[Any], float], list[Any]], seconds: float = 60.0) -> None:
        """Reserve the bundles; `wait` may raise to give up."""
        strategy = PLACEMENTS[self.room.placement]
        self._group = self._ray.util.placement_group(self.room.bundles, strategy=strategy)
        ready = self._group.ready()
        until = time.monotonic() + seconds
        while not wait([ready], 0.2):
            if time.monotonic() >= until:
                raise UsageError(
                    f"no room came free in {seconds:g} s for {_listed(self.room.total)}; {self._resources()}"
                )

    def start_agent(self, bundle: int, run: str) -> Any:
        """Start an agent in this bundle."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=bundle
        )
        needs = self.room.bundles[bundle]
        kind = self._ray.remote(
            num_cpus=needs.get("CPU", 0), num_gpus=needs.get("GPU", 0), max_concurrency=8, max_restarts=0
        )(agent_module.Agent)
        return kind.options(scheduling_strategy=strategy).remote(run)

    def check(self, facts: dict[str, str]) -> None:
        """Raises JoinError if the node of an agent does not have the same Python and Paceline as this one."""
        host, ours = facts["host"], importlib.metadata.version("paceline")
        if not facts["version"]:
            raise JoinError(f"node {host} has no paceline beside {facts['python']}; install version {ours} there")
        here = platform.python_version()
        if facts["version"] != ours or facts["python"].rpartition(".")[0] != here.rpartition(".")[0]:
            raise JoinError(
                f"node {host} has paceline {facts['version']} on Python {facts['python']}, and here it is {ours} on "
                f"{here}; they must be the same"
            )

    def kill(self, agent: Any) -> None:
        """End one agent that has started nothing."""
        with contextlib.suppress(Exception):
            self._ray.kill(agent)

    def release(self, agents: list[Any]) -> None:
        """End the agents and all that they started, free the bundles, and disconnect from the cluster."""
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
            servers = ", servers among them" if self.room.servers else ""
            sentence = f"{self.room.workers} workers need {_listed(self.room.total)}{servers}; {self._resources()}"
            self._ray.shutdown()
            raise UsageError(f"{sentence}. Start fewer, or give each less with --each cpu=0.5")

    def _resources(self) -> str:
        ray = self._ray
        nodes = sum(node["Alive"] for node in ray.nodes())
        have, free = ray.cluster_resources(), ray.available_resources()
        words = [f"{have.get(name, 0):g} {name} ({free.get(name, 0):g} free)" for name in self.room.total]
        return f"the cluster has {' and '.join(words)} on {nodes} node{'s' * (nodes != 1)}"


def _import() -> Any:
    # Before the import: switches Ray's usage statistics off.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise UsageError("--on ray needs Ray, which is not installed here: pip install 'paceline[ray]'") from None
    return ray


def known_address() -> str | None:
    """Address of the cluster that the environment names, or that was started last on this machine, as Ray finds it."""
    if named := os.environ.get("RAY_ADDRESS"):
        return named
    scratch = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    note = Path(scratch) / "ray" / "ray_current_cluster"
    return note.read_text(encoding="ascii").strip() or None if note.exists() else None


def _probe(where: str) -> None:
    """Raises UsageError if nothing listens at the address: Ray itself would wait for minutes."""
    host, colon, port = where.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # "auto", or an address that Ray itself will refuse
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PROBE).close()
    except (OSError, OverflowError):
        raise UsageError(_no_cluster(where)) from None


def _no_cluster(where: str) -> str:
    place = "on this machine" if where == "auto" else f"at '{where}'"
    return (
        f"no Ray cluster answers {place}; start one with `ray start --head`, or name another with RAY_ADDRESS or "
        f"--on ray://HOST:10001"
    )


def first_line(error: BaseException) -> str:
    """The first line of one of Ray's long messages."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _listed(amounts: dict[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in amounts.items())
