"""Replicas that are split themselves, with a parameter server between them, under any policy.

To the server a replica is one worker: it has one gradient buffer, holds one version, and makes one push. Each of its
workers writes its parts of the gradient into that buffer; when all have, the first one pushes; the server's answer is
passed on, and all of them point their parameters at the same version. So an update is made of whole gradients, each of
one replica, and a version is one over all parts. A replica that is too late learns it when it pushes: its gradient is
dropped and its samples go to others.

Over several machines each replica is inside one of them, and what is between machines is as it is for whole models: the
machine's relay is the server to its replicas, sends their gradients to the machines that have servers, and fetches
versions, each once for all replicas of the machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import struct
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.cluster.run_state import RunState
from paceline.config import Mesh, replicas_by_machine
from paceline.errors import TeamError, UsageError
from paceline.events import Brought
from paceline.parameters.gradients import GRAD
from paceline.policies import Policy, parse_policy
from paceline.server.client import ServerClient
from paceline.server.flags import SharedFlags
from paceline.server.messages import Freeze, SessionOpened
from paceline.strategies.context import Options, TrainerContext
from paceline.strategies.local_servers import LocalServers
from paceline.strategies.mesh_coord import MeshCoord
from paceline.strategies.optimizer_patch import own_parameters
from paceline.strategies.optimizer_state import OptimizerState
from paceline.strategies.replica_client import ReplicaClient
from paceline.strategies.server_trainer import ServerTrainer, check_server
from paceline.strategies.split_checks import check_split
from paceline.strategies.split_model import SplitModel
from paceline.strategies.spread_replica import SpreadReplica
from paceline.strategies.step_table import any_used
from paceline.strategies.worker_memory import WorkerMemory, describe_run
from paceline.transport import BarrierKind
from paceline.transport.call_log import UPDATES

_NORM = struct.Struct("=d")


class MeshServerTrainer(ServerTrainer):
    """Trains one worker's part of a split model with a parameter server."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext) -> None:
        assert isinstance(context.strategy, Mesh)
        check_server(optimizer, options)
        check_split(optimizer, options, str(context.strategy))
        sync = parse_policy(context.strategy.sync)
        if (context.launch.compress or sync.compress) not in ("none", "fp32"):
            raise UsageError("a replica of several workers writes its gradient in parts, which cannot be compressed")
        members = context.members
        self._coord = coord = MeshCoord.of(context.strategy, members)
        self._split = split = self._split_model(model, optimizer, options, context)
        policy = sync.for_workers(range(coord.shape.data))
        servers = LocalServers(context, sync, everywhere=not coord.here)
        memory = self._lay_out(options, context, optimizer, servers, sync)
        state = OptimizerState(optimizer, lambda: memory.shards, split.parts)
        if members.local.rank == 0:
            split.parts.fill(memory.versions.views(0))
        if members.rank == 0:
            state.import_all()
        memory.mirror_state(members)
        optimizer.state.clear()
        client = self._connect(context, optimizer, servers, memory, spare=policy.spare)
        super().__init__(
            model,
            optimizer,
            dataclasses.replace(context, stopwatch=split.stopwatch),
            policy,
            memory,
            servers,
            client,
            state,
            SessionOpened(0, 0),
            server_rank=coord.replica,
            workers=coord.shape.data,
            counts=not coord.place,
        )
        if client.client is not None:
            client.client.reduce, client.client.say = self._reduce_share, context.say
        self._pushes = 0
        self.replica = (coord.replica, coord.shape.data)
        self._gradients.attach()
        self._patch_optimizer()
        self._watch_gradients()
        split.ready()

    # -- setting up --------------------------------------------------------------------------------------------------

    def _split_model(
        self, model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext
    ) -> SplitModel | SpreadReplica:
        return SplitModel(model, optimizer, options, context, self._coord, self)

    def _places(self, context: TrainerContext) -> dict[str, Any]:
        """Fields of the run's spec about where its replicas are."""
        return {"machines": replicas_by_machine(context.strategy, context.members.machines) or []}

    def _lay_out(
        self, options: Options, context: TrainerContext, optimizer: Optimizer, servers: LocalServers, sync: Policy
    ) -> WorkerMemory:
        coord, parts = self._coord, self._split.parts
        spec = describe_run(
            context,
            options,
            optimizer,
            (parts.named, parts.shadow),
            servers=servers.where,
            policy=sync,
            capacity=coord.shape.data,
            replica=coord.shape.replica,
            **self._places(context),
        )
        share = functools.partial(context.members.share, keep=True)
        return WorkerMemory(
            spec,
            coord.replica,
            parts.named,
            parts.shadow,
            share,
            parts.own,
            hyperparameters=optimizer,
            publishes=not coord.place,
        )

    def _connect(
        self, context: TrainerContext, optimizer: Optimizer, servers: LocalServers, memory: WorkerMemory, *, spare: bool
    ) -> ReplicaClient:
        members, coord, spec = context.members, self._coord, memory.spec
        address = servers.open(memory, None if coord.place else coord.replica, optimizer, spare=spare)
        first = None
        if not coord.place:
            first = ServerClient(address, coord.replica, spec.timeouts)
            words = SharedFlags(memory.run.flags, spec.capacity), RunState(memory.run.record)
            first.attach(*words, len(spec.machines))
            first.open(spec, memory.run, [])
        client = ReplicaClient(first, self._split.barrier)
        client.wait_until_ready()
        members.barrier.wait(BarrierKind.ALLOCATE)
        memory.run.close_descriptors()
        return client

    # -- the user's loop ---------------------------------------------------------------------------------------------

    def epoch_drawn(self) -> None:
        self._split.draw_alike()

    def _collect(self, found_inf: bool) -> tuple[bytes, bool]:
        used, _ = super()._collect(found_inf)
        self._send_part(used)
        self._pushes += 1
        now, count = time.perf_counter(), len(self._layout.slots)
        self._recorder.add(
            Brought(self._rank, now, self._server_rank, self._pushes, self._server_version, sum(used), count)
        )
        if self._split.barrier is None:
            return used, found_inf
        self._split.calls.begin_turn(UPDATES)
        notes = self._split.barrier.gather(bytes([found_inf]) + used, BarrierKind.UPDATE)
        self._split.calls.check_turn(UPDATES)
        return any_used([note[1:] for note in notes]), any(note[0] for note in notes)

    def _send_part(self, used: bytes) -> None:
        """Sends this worker's part of the gradient, if no other worker's push does; used: as `_collect` returns."""

    def _write_used(self, used: bytes) -> None:
        if not self._coord.place:
            super()._write_used(used)

    def clip(self, limit: float, norm: float) -> torch.Tensor:
        """The server clips the mean gradient; returns the norm of this replica's own."""
        note = _NORM.pack(float(super().clip(limit, norm)))
        notes = [note] if self._split.barrier is None else self._split.barrier.gather(note, BarrierKind.CLIP)
        values = [_NORM.unpack(note)[0] for note in notes]
        if math.isinf(norm):
            return torch.tensor(max(values))
        return torch.tensor(sum(value**norm for value in values) ** (1 / norm))

    def _own_gradients(self) -> list[torch.Tensor]:
        slots = zip(self._layout.slots, self._split.parts.own, strict=True)
        found = (GRAD.__get__(slot.parameter) for slot, own in slots if own)
        return [gradient for gradient in found if gradient is not None]

    # -- state as plain torch knows it -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def frozen(self, reload: bool = False) -> Iterator[None]:
        """While entered, the server changes nothing, and the first worker of a replica has its newest version.

        The other workers of its replica need not take part, so it goes on with the version that it had.
        """
        first = self._client.client
        if self._frozen or first is None:
            yield
            return
        with self._until_thaw(first.call(Freeze(pull=False)), reload) as answer:
            self._memory.versions.pull(answer.buffer)
            try:
                yield
            finally:
                self._memory.versions.pull(self._buffer)

    def _state_dict(self) -> dict[str, Any]:
        if self._client.client is None:
            raise UsageError(
                f"rank {self._rank} is not the first worker of its replica, so it does not speak with the server; "
                f"ask rank {self._coord.lead} for the optimizer's state, or use team.save, which all may call"
            )
        return super()._state_dict()

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        super()._load_state_dict(state)
        if self._rank == 0:
            with self.frozen(reload=True):
                self._state.import_all()
        self._optimizer.state.clear()

    @contextlib.contextmanager
    def _replica_frozen(self) -> Iterator[None]:
        """While entered by all workers of the replica, the server changes nothing, and they have its newest version."""
        with self._newest_frozen():
            yield
            self._replica_wait()

    def _replica_wait(self) -> None:
        if self._split.barrier is not None:
            self._split.barrier.gather(b"", BarrierKind.BARRIER)

    def load(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        self._barrier.wait(BarrierKind.BARRIER)
        # One after the other: the lead's replica writes the shared values; the others load them again.
        for replica in range(self._coord.shape.data):
            if replica == self._server_rank:
                with self._replica_frozen():
                    self._load_model(model)
                self._optimizer.load_state_dict(optimizer)
            self._barrier.wait(BarrierKind.BARRIER)

    def close(self) -> None:
        with contextlib.suppress(TeamError):
            self._replica_wait()  # a replica that has lost a worker cannot thaw the server again
            with self._replica_frozen():
                self._state.export(copy=True)
                self._split.undo()
                own_parameters(self._layout)
        super().close()
