"""One worker's view of the shared memory of a run with a parameter server, and the run's description."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.cluster.membership import Members
from paceline.config import RunSpec, parse_compression, place_servers
from paceline.errors import UsageError
from paceline.parameters.compression import Feedback, codec_class
from paceline.parameters.gradients import Gradients
from paceline.parameters.hyperparameters import Hyperparameters
from paceline.parameters.kept_version import KeptVersion
from paceline.parameters.sharding import ShardedOptimizer
from paceline.parameters.versions import Versions
from paceline.parameters.whole import WholeOptimizer
from paceline.parameters.worker_table import SLOT, WorkerTable
from paceline.policies import Policy
from paceline.server.memory import RunMemory
from paceline.server.record import ServerRecord
from paceline.server.shard import describe_optimizers, describe_parameters, make_layout, memory_sizes
from paceline.strategies.context import Options, TrainerContext
from paceline.transport import BarrierKind, Memory

Named = list[tuple[str, torch.nn.Parameter]]


def describe_run(
    context: TrainerContext,
    options: Options,
    optimizer: Optimizer,
    parameters: tuple[Named, Optimizer],
    machines: Sequence[Sequence[int]],
    servers: str,
    policy: Policy,
    **fields: Any,
) -> RunSpec:
    """The spec of a run whose workers, or replicas, are on these machines.

    parameters: as the servers update them, with an optimizer on them; fields: further fields of the spec.
    """
    # Where replicas are on several machines each, there are machines without a first worker of one.
    known = machines if servers == "all" else fields.get("places") or [ranks for ranks in machines if ranks]
    return RunSpec(
        machines=tuple(map(tuple, machines)),
        servers=tuple(place_servers(servers, [list(ranks) for ranks in known])),
        timeouts=context.members.barrier.timeouts,
        folder=str(context.folder) if context.recorder.on else None,
        record_limit=context.launch.record_limit,
        restarts=context.launch.restarts,
        optimizers=describe_optimizers(optimizer),
        parameters=describe_parameters(*parameters),
        strategy=str(policy),
        corrections=tuple(context.launch.corrections or policy.corrections),
        scale_lr=options.scale_lr,
        warmup=options.warmup,
        version=context.version,
        policy=context.policy,
        minibatch=1.0 if options.batch is None else options.batch / sum(map(len, machines)),
        **fields,
    )


class WorkerMemory:
    """Gradients, versions, hyperparameters and optimizer state in a run's shared memory, for one worker or replica."""

    def __init__(
        self,
        spec: RunSpec,
        rank: int,
        named: Named,
        optimizer: Optimizer,
        share: Callable[[int], Memory],
        own: list[bool] | None = None,
        *,
        hyperparameters: Optimizer,
        publishes: bool = True,
    ) -> None:
        """share: returns memory of a size in bytes; it is called in the same order everywhere.

        own: of a split model, for each part True if this worker writes its gradient; hyperparameters: the optimizer
        that has them; publishes: True if this worker's hyperparameters are the replica's.
        """
        self.spec, self._rank = spec, rank
        self.layout, kind = make_layout(spec, named, optimizer)
        parts = [share(size) for size in memory_sizes(spec, self.layout)]
        self.versions = Versions(self.layout, parts[1], spec.versions, private=True)
        self.feedback: Feedback | None = None
        """The encoder of gradients that are compressed."""
        self.gradient_size = self.layout.size
        """Bytes of a pushed gradient."""
        self.gradients = self._make_gradients(parts[0], own)
        table = WorkerTable(parts[2].bytes(0, parts[2].size), spec.capacity, len(self.layout.slots))
        slots = table.slots if publishes else [memoryview(bytearray(SLOT))] * spec.capacity
        self.hyperparameters = Hyperparameters(hyperparameters, slots, rank)
        self.used_of = table.used
        """By rank, a byte per parameter: 1 if the pushed gradient covers it."""
        self.used = table.used[rank]
        # The servers update the optimizer's state, and any worker can read it.
        self.shards: list[ShardedOptimizer | WholeOptimizer] = [
            kind(optimizer, self.layout, self.versions, self.gradients, index, len(spec.servers))
            for index in range(len(spec.servers))
        ]
        state = share(self.shards[0].memory_size())
        for shard in self.shards:
            shard.place(state)
        kept = share(KeptVersion.memory_size(self.layout, self.shards[0].memory_size()))
        self.kept = KeptVersion(self.layout, kept)
        undo = self.shards[0].undo_size()
        record = share(ServerRecord.memory_size(self.layout, len(spec.servers), undo))
        ServerRecord.lay_out(record, self.layout, undo)
        gradient_memory, version_memory, table_memory, flags, buffers = parts
        self.run = RunMemory(gradient_memory, version_memory, table_memory, flags, buffers, state, kept, record)

    def _make_gradients(self, memory: Memory, own: list[bool] | None) -> Gradients:
        """In shared memory, where the servers read them, or in private memory, to be compressed."""
        layout, spec = self.layout, self.spec
        kind = codec_class(parse_compression(spec.compress))
        if kind is None:
            return Gradients.shared(layout, memory, self._rank, spec.gradients, own)
        for flat in layout.flats:
            if flat.dtype not in (torch.float32, torch.float64):
                raise UsageError(
                    f"compress is '{spec.compress}', which needs parameters of float32; some are {flat.dtype}"
                )
        codec = kind(layout, memory, spec.capacity)
        gradients = Gradients.private(layout, torch.device("cpu"))
        self.feedback = Feedback(codec, self._rank, gradients.own)
        self.gradient_size = codec.bytes
        return gradients

    def mirror_state(self, members: Members) -> None:
        """Copy the lead's optimizer state, if it has one, to every machine; all workers call it."""
        if len(members.machines) == 1:
            return
        state = self.run.state
        marks = bytes([any(state.bytes(start, stop - start)) for s in self.shards for start, stop in s.owned()[:1]])
        if any(members.gather(marks, BarrierKind.ALLOCATE)[0]):
            whole = state.tensor(0, state.size, torch.uint8)
            members.mirror([whole] if members.local.rank == 0 else [torch.empty_like(whole)])
