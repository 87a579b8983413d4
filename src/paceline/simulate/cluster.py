"""What a simulated run runs on: workers, their steps, links, servers, and what goes wrong."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np

from paceline.config import parse_compression, parse_servers
from paceline.errors import UsageError
from paceline.simulate.distributions import Distribution, Exponential
from paceline.topologies import Link

_MOST = 1_000_000
"""Workers that can be simulated."""


@dataclasses.dataclass(frozen=True)
class Spells:
    """Transient slowness: now and then a worker is slow for a while."""

    factor: float
    """Its steps then take so many times as long."""
    every: float
    """Mean seconds from one spell to the next."""
    lasting: float
    """Mean seconds of a spell."""

    def __post_init__(self) -> None:
        if not (1 <= self.factor < math.inf and 0 < self.every < math.inf and 0 < self.lasting < math.inf):
            raise UsageError(
                f"spells of slowness are {self.factor:g},{self.every:g},{self.lasting:g}; it must be a factor of at "
                "least 1, mean seconds between them, and mean seconds that they last, both above 0"
            )


@dataclasses.dataclass(frozen=True)
class Failures:
    """Workers die, and come back."""

    every: float
    """Mean seconds until a worker dies."""
    restart: float
    """Seconds until it is back."""

    def __post_init__(self) -> None:
        if not (0 < self.every < math.inf and 0 <= self.restart < math.inf):
            raise UsageError(
                f"failures are {self.every:g},{self.restart:g}; it must be mean seconds until a worker dies, above 0, "
                "and seconds until it is back, 0 or more"
            )


@dataclasses.dataclass(frozen=True)
class Cores:
    """Of a machine, that its workers share: when more of them compute than there are, all take longer."""

    count: int
    active: tuple[float, ...] = ()
    """The share of each worker's step in which it keeps a core busy; all of it if empty."""
    slept: tuple[float, ...] = ()
    """The share, at its end, that is slept on purpose, and is the longer the longer the rest was; none if empty."""
    fixed: tuple[bool, ...] = ()
    """Workers whose steps last as long as drawn, however crowded it is."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"a machine has {self.count} cores; there must be at least 1")
        if any(not 0 <= share <= 1 for share in (*self.active, *self.slept)):
            raise UsageError("a share of a step must be from 0 to 1")

    def of(self, ranks: Iterable[int | None]) -> Cores:
        """For workers that are like these; like most of them, where it is not said whom."""
        like = list(ranks)
        usual = float(np.median(self.active)) if self.active else 1.0
        return Cores(
            self.count,
            tuple(usual if one is None else self.active[one] for one in like) if self.active else (),
            tuple(0.0 if one is None else self.slept[one] for one in like) if self.slept else (),
            tuple(all(self.fixed) if one is None else self.fixed[one] for one in like) if self.fixed else (),
        )


@dataclasses.dataclass(frozen=True)
class SimulatedCluster:
    """Times are in seconds, sizes in bytes."""

    workers: int = 4
    compute: Distribution = dataclasses.field(default_factory=lambda: Exponential(1.0, 1.0))
    """How long a minibatch takes."""
    factors: tuple[float, ...] = ()
    """Persistent slowness: how many times as long each worker's steps take; all alike if empty."""
    own: tuple[Distribution | None, ...] = ()
    """Workers whose steps are of another kind; their factors do not count."""
    cores: Cores | None = None
    """Of each machine; None if there are always enough."""
    spells: Spells | None = None
    failures: Failures | None = None
    batch: int = 1
    """Samples in a minibatch."""
    size: float = 0.0
    """Of a gradient, and of the parameters."""
    compress: str = "none"
    """What a pushed gradient is written as."""
    link: Link = dataclasses.field(default_factory=Link)
    """Of every worker's machine."""
    links: tuple[tuple[int, Link], ...] = ()
    """Workers whose machine has another one."""
    per_machine: int = 1
    """Workers that share a machine, and its link."""
    servers: str = "1"
    """Where the parameters are: so many machines of their own, `lead` or `all`."""
    server_link: Link | None = None
    """Of a server's machine; a worker's if not given."""
    push_seconds: float = 0.0
    """Of a server, for taking in a gradient."""
    update_seconds: float = 0.0
    """Of a server, for an update."""
    overlap: float = 0.0
    """The share of a step, at its end, in which its gradient is sent already."""

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= _MOST:
            most = "at least 1" if self.workers < 1 else f"at most {_MOST:,}"
            raise UsageError(f"there are {self.workers} workers; there must be {most}")
        if self.batch < 1:
            raise UsageError(f"there are {self.batch} samples in a minibatch; there must be at least 1")
        cores = self.cores or Cores(1)
        for name, each in (
            ("factors", self.factors),
            ("distributions", self.own),
            ("shares", cores.active),
            ("shares", cores.slept),
            ("marks", cores.fixed),
        ):
            if each and len(each) != self.workers:
                raise UsageError(f"there are {len(each)} {name} for {self.workers} workers; it must be one each")
        if any(not 0 < factor < math.inf for factor in self.factors):
            raise UsageError("a worker's factor must be above 0")
        for name, value in (
            ("size", self.size),
            ("push", self.push_seconds),
            ("update", self.update_seconds),
        ):
            if not 0 <= value < math.inf:
                raise UsageError(f"the {name} is {value:g}; it must be 0 or more")
        if self.per_machine < 1:
            raise UsageError(f"there are {self.per_machine} workers on a machine; there must be at least 1")
        if not 0 <= self.overlap < 1:
            raise UsageError(f"the overlap is {self.overlap:g}; it must be from 0 to below 1")
        for rank, _ in self.links:
            if not 0 <= rank < self.workers:
                raise UsageError(f"there is no worker {rank}; ranks are from 0 to {self.workers - 1}")
        parse_servers(self.servers)
        parse_compression(self.compress)

    def steps_of(self, rank: int) -> tuple[Distribution, float]:
        """How long a worker's steps are: drawn from here, times a factor."""
        if self.own and (one := self.own[rank]) is not None:
            return one, 1.0
        return self.compute, self.factors[rank] if self.factors else 1.0

    @property
    def machines(self) -> int:
        return -(-self.workers // self.per_machine)

    @property
    def pushed(self) -> float:
        """Bytes of a gradient on its way."""
        return self.size * compressed_share(self.compress)

    @property
    def plain(self) -> bool:
        """Whether nothing takes time but the steps, which are all alike and never end early."""
        return self.alike and not (self.push_seconds or self.update_seconds or self.wired)

    @property
    def alike(self) -> bool:
        """Whether all workers are, and nothing goes wrong or is short."""
        return not (self.factors or self.own or self.spells or self.failures or self.crowded)

    @property
    def crowded(self) -> bool:
        """Whether workers may have to share cores."""
        cores = self.cores
        if cores is None or cores.count >= min(self.per_machine, self.workers):
            return False
        return not (cores.fixed and all(cores.fixed))

    @property
    def wired(self) -> bool:
        """Whether messages take time, or bytes are of interest."""
        links = [self.link, self.server_link or self.link, *(link for _, link in self.links)]
        return self.size > 0 or any(link.latency > 0 for link in links)

    def machine_links(self) -> list[Link]:
        """Of each machine; that of its slowest worker, where they differ."""
        found = [self.link] * self.machines
        if self.per_machine == 1:
            for rank, link in self.links:
                found[rank] = link
            return found
        own = dict(self.links)
        return [
            narrowest(own.get(rank, self.link) for rank in range(first, min(self.workers, first + self.per_machine)))
            for first in range(0, self.workers, self.per_machine)
        ]

    def narrowest(self) -> Link:
        """What the slowest of all links allows."""
        return narrowest(self.machine_links())


def narrowest(links: Iterable[Link]) -> Link:
    """What the slowest of these allows."""
    every = list(links)
    return Link(max(link.latency for link in every), min(link.bandwidth for link in every))


def compressed_share(spec: str) -> float:
    """What is left of a gradient of float32."""
    form = parse_compression(spec)
    if form.form == "topk":
        return 2 * form.share  # a value and its place each
    return {"none": 1.0, "fp32": 1.0, "bf16": 0.5, "fp16": 0.5, "int8": 0.25}[form.form]
