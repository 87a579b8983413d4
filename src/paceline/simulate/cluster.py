"""A simulated cluster: workers, their steps, links, servers, slow spells and failures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np

from paceline.config import parse_compression, parse_servers
from paceline.config.distributions import Distribution, Exponential
from paceline.errors import UsageError
from paceline.topologies import Link

_MOST = 1_000_000
"""The most workers that can be simulated."""


@dataclasses.dataclass(frozen=True)
class Spells:
    """Transient slowness: each worker is slow at random intervals."""

    factor: float
    """Factor on the length of steps during a spell."""
    every: float
    """Mean seconds from one spell to the next."""
    lasting: float
    """Mean seconds of a spell."""

    def __post_init__(self) -> None:
        if not (1 <= self.factor < math.inf and 0 < self.every < math.inf and 0 < self.lasting < math.inf):
            raise UsageError(
                f"spells of slowness are {self.factor:g},{self.every:g},{self.lasting:g}; they must be a factor of at "
                "least 1, mean seconds between spells, and mean seconds that they last, both above 0"
            )


@dataclasses.dataclass(frozen=True)
class Failures:
    """Workers die and restart."""

    every: float
    """Mean seconds until a worker dies."""
    restart: float
    """Seconds from its death until it is back."""

    def __post_init__(self) -> None:
        if not (0 < self.every < math.inf and 0 <= self.restart < math.inf):
            raise UsageError(
                f"failures are {self.every:g},{self.restart:g}; they must be mean seconds until a worker dies, above "
                "0, and seconds until it is back, 0 or more"
            )


@dataclasses.dataclass(frozen=True)
class Cores:
    """The cores of a machine, shared by its workers: if more workers compute than there are cores, all slow down."""

    count: int
    active: tuple[float, ...] = ()
    """The share of each worker's step in which it occupies a core; 1 if empty."""
    slept: tuple[float, ...] = ()
    """The share at the end of each step that is slept on purpose (`--slow`), in proportion to the rest; 0 if empty."""
    fixed: tuple[bool, ...] = ()
    """True for workers whose steps last as long as drawn, regardless of contention."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"a machine has {self.count} cores; there must be at least 1")
        if any(not 0 <= share <= 1 for share in (*self.active, *self.slept)):
            raise UsageError("a share of a step must be from 0 to 1")

    def of(self, ranks: Iterable[int | None]) -> Cores:
        """The cores for workers that are copies of these ranks; None is a typical worker."""
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
    """The cluster that a run is simulated on. Times are in seconds, sizes in bytes."""

    workers: int = 4
    compute: Distribution = dataclasses.field(default_factory=lambda: Exponential(1.0, 1.0))
    """Seconds of computing per minibatch."""
    factors: tuple[float, ...] = ()
    """Persistent slowness: a factor on each worker's steps; 1 if empty."""
    own: tuple[Distribution | None, ...] = ()
    """Distributions of workers whose steps differ in kind; their factors are ignored."""
    cores: Cores | None = None
    """The cores of each machine; None if there are always enough."""
    spells: Spells | None = None
    failures: Failures | None = None
    batch: int = 1
    """Samples in a minibatch."""
    size: float = 0.0
    """Bytes of a gradient, and of the parameters."""
    compress: str = "none"
    """The compression of pushed gradients."""
    link: Link = dataclasses.field(default_factory=Link)
    """The link of every worker's machine."""
    links: tuple[tuple[int, Link], ...] = ()
    """Workers whose machine has a different link, by rank."""
    per_machine: int = 1
    """Workers that share a machine and its link."""
    servers: str = "1"
    """The placement of the parameters: a number of separate machines, `lead` or `all`."""
    server_link: Link | None = None
    """The link of a server's machine; None: as a worker's."""
    push_seconds: float = 0.0
    """Seconds in which a server receives and adds a gradient."""
    update_seconds: float = 0.0
    """Seconds of an update on a server."""
    overlap: float = 0.0
    """The share at the end of a step during which its gradient is already sent."""
    interruptible: bool = True
    """False if a cancelled worker begins its next step only when the cancelled one would have ended, as where it sleeps
    or waits in one operation. (Where workers share cores, True is assumed.)"""

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
                raise UsageError(f"there are {len(each)} {name} for {self.workers} workers; there must be one each")
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
        """The distribution of a worker's steps, and the factor on its draws."""
        if self.own and (one := self.own[rank]) is not None:
            return one, 1.0
        return self.compute, self.factors[rank] if self.factors else 1.0

    @property
    def machines(self) -> int:
        """Machines with workers."""
        return -(-self.workers // self.per_machine)

    @property
    def pushed(self) -> float:
        """Bytes of a pushed gradient, after compression."""
        return self.size * compressed_share(self.compress)

    @property
    def plain(self) -> bool:
        """True if nothing takes time but the steps, which are all alike and never end early."""
        timed = self.push_seconds or self.update_seconds or self.has_messages
        return self.alike and self.interruptible and not timed

    @property
    def alike(self) -> bool:
        """True if all workers are alike, without spells, failures and shared cores."""
        return not (self.factors or self.own or self.spells or self.failures or self.shares_cores)

    @property
    def shares_cores(self) -> bool:
        """True if workers may have to share cores."""
        cores = self.cores
        if cores is None or cores.count >= min(self.per_machine, self.workers):
            return False
        return not (cores.fixed and all(cores.fixed))

    @property
    def has_messages(self) -> bool:
        """True if messages take time, or have a size to count."""
        links = [self.link, self.server_link or self.link, *(link for _, link in self.links)]
        return self.size > 0 or any(link.latency > 0 for link in links)

    def machine_links(self) -> list[Link]:
        """The link of each machine; if its workers' links differ, the worst latency and bandwidth of them."""
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
        """A link with the worst latency and bandwidth of all."""
        return narrowest(self.machine_links())


def narrowest(links: Iterable[Link]) -> Link:
    """A link with the worst latency and the worst bandwidth of these."""
    every = list(links)
    return Link(max(link.latency for link in every), min(link.bandwidth for link in every))


def compressed_share(spec: str) -> float:
    """Size of a compressed gradient, as a share of its float32 size."""
    form = parse_compression(spec)
    if form.form == "topk":
        return 2 * form.share  # a value and an index each
    return {"none": 1.0, "fp32": 1.0, "bf16": 0.5, "fp16": 0.5, "int8": 0.25}[form.form]
