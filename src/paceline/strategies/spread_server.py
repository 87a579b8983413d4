"""Replicas that are on several machines each, with a parameter server between them, under any policy.

As `mesh_server`, but no machine has the whole model: every machine has a server with an equal shard of the parameters
and of the optimizer's state, and each worker has of the versions, and of its replica's gradient, the part that it
computes with. A push:

1. Each worker writes its part of the gradient where the relay of its machine reads it, which sends it to the servers.
2. The workers of the replica wait at a barrier: all parts are with the servers. The first one pushes for all.
3. It passes the server's answer on, and each worker gets its part of the version that the answer names.

So an update is of whole gradients, and all parts of a replica are of one version.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.errors import TeamError
from paceline.parameters.joint import load_model_state
from paceline.server.messages import Freeze
from paceline.strategies.context import Options, TrainerContext
from paceline.strategies.local_servers import LocalServers
from paceline.strategies.mesh_server import MeshServerTrainer
from paceline.strategies.optimizer_patch import load_optimizers
from paceline.strategies.part_client import PartClient
from paceline.strategies.replica_client import ReplicaClient
from paceline.strategies.spread_replica import SpreadReplica
from paceline.strategies.worker_memory import WorkerMemory
from paceline.transport import BarrierKind


class SpreadServerTrainer(MeshServerTrainer):
    """Trains one worker's part of a replica that is on several machines with a parameter server."""

    spans = True
    _split: SpreadReplica
    _abandoned = False
    """True if the script has ended with an error."""

    def _split_model(
        self, model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext
    ) -> SpreadReplica:
        return SpreadReplica(model, optimizer, options, context, self._coord, self)

    def _places(self, context: TrainerContext) -> dict[str, Any]:
        machines, each = context.members.machines, self._coord.shape.replica
        firsts = [[rank // each for rank in ranks if rank % each == 0] for ranks in machines]
        return {"machines": firsts, "places": tuple(map(tuple, machines))}

    def _connect(
        self, context: TrainerContext, optimizer: Optimizer, servers: LocalServers, memory: WorkerMemory, *, spare: bool
    ) -> ReplicaClient:
        client = super()._connect(context, optimizer, servers, memory, spare=spare)
        address = servers.relay_addresses[context.members.machine]
        self._part = PartClient(address, context.members.rank, memory.spec.timeouts)
        self._split.state.serve(memory.versions, self._part, lambda: (self._buffer, self._server_version))
        return client

    # -- a step ------------------------------------------------------------------------------------------------------

    def _send_part(self, used: bytes) -> None:
        self._part.push([number for number, is_used in enumerate(used) if is_used])

    def _adopt(self, answer: Any, *, free: bool = True) -> None:
        if (answer.buffer, answer.version) != (self._buffer, self._server_version):
            self._part.pull(answer.buffer, answer.version)
        super()._adopt(answer, free=free)

    # -- state as plain torch knows it -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def frozen(self, reload: bool = False) -> Iterator[None]:
        """While entered, the server changes nothing, and its newest version is on the first worker's machine."""
        first = self._client.client
        if self._frozen or first is None:
            yield
            return
        with self._until_thaw(first.call(Freeze(pull=False)), reload) as answer, self._split.state.whole(answer.buffer):
            yield

    def load(self, model: Any, optimizer: Any) -> None:
        self._barrier.wait(BarrierKind.BARRIER)
        if self._rank == 0:
            with self.frozen(reload=True):
                load_model_state(self._model, model)
                self._split.state.load_parts(model)
                versions = self._memory.versions
                versions.commit(versions.changed())
                versions.discard()
                load_optimizers(self._patches, optimizer)
        self._barrier.wait(BarrierKind.BARRIER)
        # The servers have the values, and so must the versions that workers go on with.
        for replica in range(self._coord.shape.data):
            if replica == self._server_rank:
                with self._replica_frozen():
                    self._load_model(model)
                if self._rank:
                    load_optimizers(self._patches, optimizer)
            self._barrier.wait(BarrierKind.BARRIER)

    def leave(self) -> None:
        if not self._abandoned:
            self._split.say_bye(getattr(sys, "last_value", None) is None)
        super().leave()

    def abandon(self) -> None:
        self._abandoned = True

    def close(self) -> None:
        with contextlib.suppress(TeamError):
            self._make_whole()
        super(MeshServerTrainer, self).close()
        self._part.close()

    def _make_whole(self) -> None:
        """Gives every worker the whole model, and the optimizer's state; the first one gets them from the servers."""
        self._replica_wait()
        first, state = not self._coord.place, self._split.state
        state.gather_rest()
        values: dict[int, torch.Tensor] = {}
        with self.frozen():
            if first:
                values = state.trained()
                self._state.export(copy=True)
        self._memory.versions.restrict(set())
        self._replica_wait()  # until then others may ask for this worker's values
        self._split.undo()
        for number, value in values.items():
            state.parameters[number].data = value
        self._replica_wait()
        if not first:
            state.gather_trained()
        self._replica_wait()
        self._split.leave()
