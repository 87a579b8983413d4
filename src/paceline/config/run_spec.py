"""One run, described once: servers, shards and relays derive what they need from it."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.config.gradients import parse_compression
from paceline.config.launch import Timeouts
from paceline.config.strategy import parse_strategy


class ParameterSpec(msgspec.Struct, frozen=True, array_like=True):
    """Shape and type of one trained parameter."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    group: int
    """Index of its parameter group."""


class OptimizerSpec(msgspec.Struct, frozen=True, array_like=True):
    """An optimizer's class and hyperparameters."""

    module: str
    name: str
    groups: list[dict[str, Any]]
    """Hyperparameters of each parameter group."""
    defaults: dict[str, Any]
    """Arguments that it was created with."""


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that all processes of a run know alike; addresses and descriptors are sent with it, not in it."""

    machines: tuple[tuple[int, ...], ...]
    """Ranks of the first workers, by machine; the coordinator is on machine 0."""
    capacity: int
    """Most workers that the run has memory for."""
    servers: tuple[int, ...]
    """The machine of each server."""
    strategy: str
    timeouts: Timeouts
    folder: str | None = None
    """Where events are recorded; None if they are not."""
    record_limit: int | None = None
    """Bytes of recorded events above which they are thinned; None for no limit."""
    elastic: bool = False
    """True if the run survives the loss of a worker under any policy."""
    restarts: bool = False
    """True if first workers that are lost are started again, so that nobody else gets their ranks."""
    optimizers: tuple[OptimizerSpec, ...]
    parameters: tuple[ParameterSpec, ...]
    buffers: int = 0
    """Bytes of the model's buffers and frozen parameters."""
    corrections: tuple[str, ...] = ()
    compress: str = "none"
    scale_lr: str | None = None
    warmup: int = 0
    """Updates over which a scaled learning rate rises."""
    minibatch: float = 1.0
    """Samples of one worker's minibatch, relative to the script's own batch."""
    version: int = 0
    """Updates that the parameters have had in a run that this one goes on from."""
    policy: dict[str, Any] = {}
    """The policy's values in a run that this one goes on from, if the policy is the same."""
    replica: int = 1
    """Processes of one replica, which is one worker to the server."""
    places: tuple[tuple[int, ...], ...] = ()
    """Where replicas are on several machines each: ranks in the team by machine. `machines` has the replicas' first."""

    @property
    def model(self) -> tuple[object, ...]:
        """The parts of the spec that must equal those of a worker that joins the run."""
        kinds = tuple((optimizer.module, optimizer.name) for optimizer in self.optimizers)
        return self.parameters, kinds, self.buffers

    @property
    def workers(self) -> int:
        """Workers at the start."""
        return sum(map(len, self.machines))

    @property
    def processes(self) -> list[list[int]]:
        """Ranks in the team of the processes of these workers, by machine."""
        if self.places:
            return [list(ranks) for ranks in self.places]
        each = range(self.replica)
        return [[worker * self.replica + place for worker in workers for place in each] for workers in self.machines]

    @property
    def groups(self) -> int:
        """Groups of workers, each with a buffer for its mean gradient."""
        return parse_strategy(self.strategy).group_count(self.workers)

    @property
    def versions(self) -> int:
        """Buffers for versions: one for each worker, one for the newest version, one for the next."""
        return self.capacity + 2

    @property
    def gradients(self) -> int:
        """Buffers for gradients: one for each worker and each group."""
        return self.capacity + self.groups

    @property
    def compressed(self) -> bool:
        """True if gradients are pushed in another form than the parameters'."""
        return parse_compression(self.compress).form not in ("none", "fp32")

    @property
    def striped(self) -> bool:
        """True if every server owns a part of every large parameter."""
        return len(self.machines) > 1 and len(self.servers) > 1 and not self.compressed

    def servers_on(self, machine: int) -> range:
        """Numbers of the servers on a machine."""
        first = self.servers.index(machine) if machine in self.servers else 0
        return range(first, first + self.servers.count(machine))
