"""Replicas that are split themselves, with a parameter server between them, under any policy.

To the server a replica is one worker: it has one gradient buffer, holds one version, and makes one push. Each of its
workers writes its parts of the gradient into that buffer; when all have, the first one pushes; what the server answers
is passed on, and all of them change their pointers to the same version. So an update is made of whole gradients, each
of one replica, and a version is one over all parts. A replica that is too late finds out when it pushes: its gradient
is dropped and its samples go to others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import struct
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.config import Mesh, RunSpec, parse_servers, parse_strategy, place_servers
from paceline.data.ledger import Lease
from paceline.errors import TeamError, UsageError
from paceline.events import Brought, Pull, Wait
from paceline.parameters.hyperparameters import Hyperparameters, RateScaling
from paceline.parameters.sharding import ShardedOptimizer
from paceline.parameters.versions import Versions
from paceline.parameters.worker_table import SLOT, WorkerTable
from paceline.policies import make_policy
from paceline.server.client import ServerClient
from paceline.server.flags import SharedFlags
from paceline.server.memory import RunMemory
from paceline.server.messages import Freeze, Proceed, PushGradient, Thaw
from paceline.server.shard import describe_optimizer, describe_parameters, make_layout, memory_sizes
from paceline.strategies.base import Options, Trainer, TrainerContext
from paceline.strategies.leasing import Leases
from paceline.strategies.mesh_coord import MeshCoord, MeshShape
from paceline.strategies.optimizer_patch import OneCycleClamp, own_parameters, own_state
from paceline.strategies.parameter_server import ParameterServerTrainer, _refuse
from paceline.strategies.partitioned_parameters import PartGradients
from paceline.strategies.replica_client import ReplicaClient
from paceline.strategies.split_checks import check_split
from paceline.strategies.split_model import SplitModel
from paceline.strategies.step_table import any_used
from paceline.transport import BarrierKind
from paceline.transport.unix_connection import new_address


class _ReplicaLeases(Leases):
    """The first worker of a replica counts its samples."""

    counts = True

    def begin(self, lease: Lease) -> None:
        if self.counts:
            super().begin(lease)
        elif torch.is_grad_enabled():
            self._open[lease.number] = (lease.loader, 0)
            self._stopwatch.start(0)


class MeshServerTrainer(ParameterServerTrainer):
    """One worker's part in training a split model with a parameter server."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext) -> None:
        assert isinstance(context.strategy, Mesh)
        _refuse(optimizer, options)
        check_split(optimizer, options, str(context.strategy))
        if (context.launch.compress or options.compress) not in ("none", "fp32"):
            raise UsageError("a replica of several workers writes its gradient in parts, which cannot be compressed")
        self._coord = coord = MeshCoord(MeshShape.of(context.strategy), context.members.rank)
        self._split = SplitModel(model, optimizer, options, context, coord, lambda: self.version)
        sync = parse_strategy(context.strategy.sync)
        context = dataclasses.replace(context, stopwatch=self._split.stopwatch)
        Trainer.__init__(self, model, optimizer, context, replicas=coord.shape.data)
        self._rank, self.size = coord.replica, coord.shape.data
        """As the server knows it: of replicas."""
        self._worker = context.members.rank
        self._launch = context.launch
        self._timeouts = context.members.barrier.timeouts
        self._relay, self._joins = None, None
        RateScaling(options.scale_lr, 1, options.warmup)
        policy = make_policy(sync, range(self.size))
        self.cancels = False
        self._at = self._buffer = self._before = self._pushes = 0
        self.replica = (coord.replica, coord.shape.data)
        self._together = self._split.barrier
        self._prepare(options, context, policy.spare)
        if policy.spare:
            context.members.barrier.spare = True
        self._leases = _ReplicaLeases(self._client, self._stopwatch, self._gradients, self.size, self._follow)
        self._leases.counts = not coord.place
        self._pushed = False
        self._loss: float | None = None
        self._clip: tuple[float, float] | None = None
        self._frozen = self._gone_back = False
        self._exchanged = 0.0
        self._snapshot = self._boundaries = None
        self._gradients.attach()
        self._clamp = None if policy.lockstep else OneCycleClamp(optimizer)
        self._patch_optimizer()
        self._split.ready()

    # -- setting up --------------------------------------------------------------------------------------------------

    def _prepare(self, options: Options, context: TrainerContext, spare: bool) -> None:
        members, parts = self._members, self._split.parts
        self._servers = parse_servers(self._launch.servers or options.servers)
        self._spec = spec = self._describe_run(parts.named, options, context)
        self._layout, _ = make_layout(spec, parts.named, parts.shadow)
        layout = self._layout
        gradients, versions, table, flags, buffers = (
            members.share(size, keep=True) for size in memory_sizes(spec, layout)
        )
        self._versions = Versions(layout, versions, spec.versions)
        self._gradients = PartGradients.of(layout, gradients, self._rank, spec.gradients, parts.own)
        self._feedback, self._bytes = None, layout.size
        workers = WorkerTable(table.bytes(0, table.size), spec.capacity, len(layout.slots))
        slots = workers.slots
        if self._coord.place:
            slots = [memoryview(bytearray(SLOT))] * self.size  # the first worker's values count
        self._hyperparameters = Hyperparameters(self._optimizer, slots, self._rank)
        self._used = workers.used[self._rank]
        self._shards = [
            ShardedOptimizer(parts.shadow, layout, self._versions, self._gradients, index, len(spec.servers))
            for index in range(len(spec.servers))
        ]
        state = members.share(self._shards[0].memory_size(), keep=True)
        for shard in self._shards:
            shard.place(state)
        if self._worker == 0:
            parts.fill(self._versions.views(0))
            parts.import_state(self._import)
        self._optimizer.state.clear()
        self._open(RunMemory(gradients, versions, table, flags, buffers, state), spare, context)

    def _describe_run(
        self, named: list[tuple[str, torch.nn.Parameter]], options: Options, context: TrainerContext
    ) -> RunSpec:
        assert isinstance(context.strategy, Mesh)
        replicas = tuple(range(self.size))
        return RunSpec(
            machines=(replicas,),
            capacity=self.size,
            servers=tuple(place_servers(str(self._servers), [list(replicas)])),
            strategy=str(parse_strategy(context.strategy.sync)),
            timeouts=self._timeouts,
            folder=str(context.folder) if context.recorder.on else None,
            optimizer=describe_optimizer(self._optimizer),
            parameters=describe_parameters(named, self._split.parts.shadow),
            corrections=tuple(self._launch.corrections or options.corrections),
            scale_lr=options.scale_lr,
            warmup=options.warmup,
            replica=self._coord.shape.replica,
        )

    def _import(self, shadow: Optimizer) -> None:
        state = dict(shadow.state)
        for shard in self._shards:
            shadow.state.update(state)
            shard.import_state(shadow)

    def _open(self, memory: RunMemory, spare: bool, context: TrainerContext) -> None:
        members = self._members
        address = members.gather(new_address().encode(), BarrierKind.ALLOCATE)[0].decode()
        self._thread, self._processes = None, []
        client = None
        if not self._coord.place:
            self._start(address, spare, context.say)
            client = ServerClient(address, self._rank, self._timeouts)
            client.attach(SharedFlags(memory.flags, self.size))
            client.reduce = self._sum_part
        self._client: Any = ReplicaClient(client, self._together, self._timeouts)
        if client is not None:
            client.open(self._spec, memory, [])
        self._client.wait_until_ready()
        members.barrier.wait(BarrierKind.ALLOCATE)
        memory.close_descriptors()
        self._versions.pull(0)

    # -- the user's loop ---------------------------------------------------------------------------------------------

    @property
    def present(self) -> None:
        """Replicas do not come and go."""

    def gather(self, payload: bytes, kind: BarrierKind) -> None:
        """All workers take part, not only those that speak with the server."""

    def epoch_drawn(self) -> None:
        self._split.draw_alike()

    def _push(self, samples: int, factor: float, skip: bool) -> None:
        start = time.perf_counter()
        used = self._gradients.collect()
        self._pushes += 1
        of = len(self._layout.slots)
        self._recorder.add(Brought(self._worker, start, self._rank, self._pushes, self._at, sum(used), of))
        found, skip = self._exchange(used, skip)
        complete = 0 not in found
        if not complete and not self._coord.place:
            self._used[:] = found
        message = PushGradient(
            self._at,
            samples,
            self._leases.take(),
            self._hyperparameters.publish(),
            complete,
            factor,
            self._bytes,
            self._loss,
            self._clip,
            skip,
            self._leases.wanted(),
        )
        self._loss = self._clip = None
        self._stopwatch.slow_link(self._exchanged)
        sent = time.perf_counter()
        answer: Proceed = self._client.call(message)
        self._follow(answer)
        end = time.perf_counter()
        self._exchanged = end - sent if answer.waited_for < 0 else self._exchanged
        if answer.waited_for >= 0:
            self._recorder.add(Wait(self._worker, start, end - start, answer.waited_for * self._coord.shape.replica))
        else:
            self._recorder.add(Pull(self._worker, start, end - start, self._at))
        self._stopwatch.restart(end)
        self.on_update()

    def _exchange(self, used: bytes, skip: bool) -> tuple[bytes, bool]:
        """All workers of the replica are here: of which parts they have gradients, and whether one is not finite."""
        if self._together is None:
            return used, skip
        notes = self._together.gather(bytes([skip]) + used, BarrierKind.UPDATE)
        return any_used([note[1:] for note in notes]), any(note[0] for note in notes)

    def clip(self, limit: float, norm: float) -> torch.Tensor:
        """The mean is clipped where it is made, on the server; what is known here is this replica's own norm."""
        self._clip = (limit, norm)
        slots = zip(self._layout.slots, self._split.parts.own, strict=True)
        gradients = [slot.parameter.grad for slot, own in slots if own and slot.parameter.grad is not None]
        note = struct.pack("=d", float(torch.nn.utils.get_total_norm(gradients, norm)))
        notes = [note] if self._together is None else self._together.gather(note, BarrierKind.CLIP)
        values = [struct.unpack("=d", note)[0] for note in notes]
        if math.isinf(norm):
            return torch.tensor(max(values))
        return torch.tensor(sum(value**norm for value in values) ** (1 / norm))

    # -- state as plain torch knows it -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def frozen(self, reload: bool = False) -> Iterator[None]:
        """While here, the server changes nothing, and the first worker of a replica sees its newest version.

        The others of its replica need not be here, so it goes on with the version that it had.
        """
        if self._frozen or self._client.client is None:
            yield
            return
        frozen = self._client.client.call(Freeze(pull=False))
        self._frozen = True
        before = self._buffer
        self._versions.pull(frozen.buffer)
        try:
            yield
        finally:
            self._versions.pull(before)
            self._frozen = False
            self._client.send(Thaw(reload))

    @contextlib.contextmanager
    def _all_frozen(self, reload: bool = False) -> Iterator[None]:
        """The same, with all workers of the replica, who go on with the newest version."""
        self._follow(self._client.call(Freeze()))
        self._frozen = True
        try:
            yield
            if self._together is not None:
                self._together.gather(b"", BarrierKind.BARRIER)
        finally:
            self._frozen = False
            self._client.send(Thaw(reload))

    def _state_dict(self) -> dict[str, Any]:
        if self._client.client is None:
            raise UsageError(
                f"rank {self._worker} is not the first worker of its replica, so it does not speak with the server; "
                f"ask rank {self._coord.lead} for the optimizer's state, or use team.save, which all may call"
            )
        return super()._state_dict()

    def _export_state(self) -> None:
        self._split.parts.export_state(self._shards[0])
        own_state(self._optimizer)

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        type(self._optimizer).load_state_dict(self._optimizer, state)
        if self._worker == 0:
            with self.frozen(reload=True):
                self._split.parts.import_state(self._import)
        self._optimizer.state.clear()

    def load(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        self._members.barrier.wait(BarrierKind.BARRIER)
        # One after the other: the lead's replica writes what all share, the others then find it, and their own buffers.
        for replica in range(self.size):
            if replica == self._rank:
                with self._all_frozen():
                    self._model.load_state_dict(model)
                self._optimizer.load_state_dict(optimizer)
            self._members.barrier.wait(BarrierKind.BARRIER)

    def close(self) -> None:
        with contextlib.suppress(TeamError), self._all_frozen():
            self._export_state()
            self._split.undo()
            own_parameters(self._layout)
        self._gradients.detach()
        Trainer.close(self)
        if self._clamp is not None:
            self._clamp.undo()
