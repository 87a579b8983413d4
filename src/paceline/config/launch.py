"""Settings that a launcher passes to its workers, timeouts among them, and a worker's place in its team."""

from __future__ import annotations

import math
import os
import re
from typing import Annotated, ClassVar

import msgspec

from paceline.config.checks import DECIMAL
from paceline.config.slowness import Slowness
from paceline.errors import UsageError

RECORD_LIMIT = 256_000_000
"""Bytes of a run's recorded events above which they are thinned, by default."""
LONGEST = 1e6
"""Seconds: a longer timeout is refused, as the system's calls cannot wait so long."""
Positive = Annotated[float, msgspec.Meta(gt=0)]


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts, in seconds. Every wait in Paceline ends by one of these."""

    join: Positive = 120.0
    """Until all members of the team have joined, counted from this one's join."""
    barrier: Positive = 300.0
    """For other workers, at an update, a barrier or the start of an epoch."""
    notice: Positive = 5.0
    """Until a waiting worker prints which workers it waits for."""
    stop: Positive = 2.0
    """For the other processes to end by themselves after one has failed; then they are stopped."""


class Profiling(msgspec.Struct, frozen=True, kw_only=True):
    """A request to run a script only until its model is traced, and to measure its operations."""

    path: str
    """The file that the measurements are written to."""
    microbatches: int
    norm: str = "batch"


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that `paceline run` passes to each worker, in one environment variable."""

    VARIABLE: ClassVar[str] = "PACELINE_LAUNCH"

    strategy: str | None = None
    """The strategy of the command line; it wins over the script's."""
    timeouts: Timeouts = Timeouts()
    slow: dict[int, Slowness] = {}
    seed: int = 0
    """Seed of drawn slowness."""
    folder: str | None = None
    """The folder of the run's events, checkpoints and summary."""
    name: str | None = None
    """The name of the folder under `runs/`, where the workers create it; it wins over the script's."""
    record: bool = True
    """True if events are recorded."""
    record_limit: int | None = RECORD_LIMIT
    """Bytes of recorded events above which they are thinned; None for no limit."""
    loggers: list[str] = []
    """Loggers, where the workers start them; they win over the script's."""
    push_metrics: str | None = None
    """The Pushgateway, likewise."""
    control: int | None = None
    """Descriptor of the shared memory of the workers' barriers."""
    starter: int | None = None
    """Descriptor of the socket at which the launcher takes requests for servers."""
    servers: str | None = None
    """Where the parameters are held: a number of processes, `lead`, `all`, `each` or `MACHINE:COUNT,…`."""
    corrections: list[str] = []
    compress: str | None = None
    key: str | None = None
    """The run's secret, known to its machines only."""
    elastic: bool = False
    """True if the run goes on, under any strategy, when a worker is lost."""
    restarts: bool = False
    """True if the team is started again after a loss; so a split model need not survive one, even if `elastic`."""
    grace: float = 30.0
    """Seconds from SIGTERM to a worker until it must have left."""
    joins: str | None = None
    """For a worker that joins a running team: the address of the server, or of its machine's relay."""
    machine: int = 0
    """The number of the machine of a worker that joins."""
    open: str | None = None
    """The port, or address and port, at which other machines may join the run; None if none may."""
    plan: str | None = None
    """For a worker of a machine that joins a running team: the file with the plan of the run."""
    snapshot: float | None = None
    """Seconds between snapshots of the run; None for none."""
    resume: str | None = None
    """The folder of a run whose newest snapshot this one goes on from."""
    profiling: Profiling | None = None
    prelude: str | None = None
    """A module that a worker imports before its script."""

    def to_environment(self) -> dict[str, str]:
        return {self.VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def from_environment(cls) -> Launch:
        text = os.environ.get(cls.VARIABLE)
        return msgspec.json.decode(text, type=cls) if text else cls()


def parse_snapshot(text: str) -> float | None:
    """Seconds between snapshots, from "30s", "5min" or "1h"; None for "off"."""
    if text == "off":
        return None
    return _parse_time("--snapshot", text, "30s, 5min or 1h, or off")


def parse_grace(text: str) -> float:
    """Seconds from SIGTERM to a worker until it must have left, from "30s" or "2min"."""
    return _parse_time("--grace", text, "30s or 2min")


def parse_record_limit(text: str) -> int | None:
    """Bytes of recorded events above which they are thinned, from "256MB" or "2GB"; None for "off"."""
    if text == "off":
        return None
    match = re.fullmatch(rf"({DECIMAL})(kB|MB|GB|TB)", text)
    found = float(match[1]) * {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[match[3]] if match else 0.0
    if not _LEAST_RECORD <= found < math.inf:
        raise UsageError(f"--record-limit is '{text}'; it must be a size of at least 100kB, as 256MB or 2GB, or off")
    return int(found)


_LEAST_RECORD = 1e5
"""Bytes: below this the sums alone would soon take more."""


def parse_door(text: str, option: str) -> tuple[str, int]:
    """Address and port, from "10.0.0.1:29600" or, if there may be none, "29600"; the address is empty then."""
    address, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 1 << 16 or (option == "--join" and not address):
        example = "10.0.0.1:29600" if option == "--join" else "29600 or 10.0.0.1:29600"
        raise UsageError(f"{option} is '{text}'; it must be an address with a port, as {example}")
    return address.strip("[]"), int(port)


def _parse_time(option: str, text: str, examples: str) -> float:
    match = re.fullmatch(rf"({DECIMAL})(s|min|h)", text)
    if match is None or not (found := float(match[1]) * {"s": 1.0, "min": 60.0, "h": 3600.0}[match[3]]) <= LONGEST:
        raise UsageError(f"{option} is '{text}'; it must be a time, as {examples}")
    return found


def capacity(workers: int) -> int:
    """The number of workers that a run which starts with `workers` has room for. Unused room takes no memory."""
    return max(2 * workers, workers + 4)


JOINING_MACHINES = 16
"""Machines that may join a run that is open to them, over its whole time."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The place of this process in its team, from the environment variables that torchrun sets."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> Place:
        def number(name: str, default: int) -> int:
            value = os.environ.get(name, str(default))
            if not value.isdecimal():
                raise UsageError(f"{name} is '{value}' in the environment; it must be a whole number")
            return int(value)

        world_size = number("WORLD_SIZE", 1)
        rank = number("RANK", 0)
        place = cls(
            rank=rank,
            local_rank=number("LOCAL_RANK", rank),
            world_size=world_size,
            local_world_size=number("LOCAL_WORLD_SIZE", world_size),
        )
        if not (world_size >= 1 and rank < world_size):
            raise UsageError(f"RANK is {rank} and WORLD_SIZE {world_size}; RANK must be below WORLD_SIZE")
        return place
