"""A worker with a whole model under a parameter server: it may be cancelled, join late, and leave early."""

from __future__ import annotations

import contextlib
import functools
import struct
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.utils.clip_grad import clip_grad_norm_
from torch.optim import Optimizer

from paceline.cluster.preemption import leave_if_told
from paceline.cluster.run_state import RunState
from paceline.config import JOINING_MACHINES, RunSpec, capacity
from paceline.errors import TeamError
from paceline.parameters.joint import split_parameters
from paceline.parameters.layout import Slot
from paceline.parameters.model_buffers import ModelBuffers
from paceline.parameters.step_snapshot import StepSnapshot
from paceline.policies import Policy, parse_policy
from paceline.server.client import ServerClient
from paceline.server.flags import SharedFlags
from paceline.server.messages import GatherKept, GradientReady, MarkVersion, Proceed, SessionOpened, SnapshotNote
from paceline.server.messages import StepCancelled as CancelledStep
from paceline.strategies.cancellation import (
    CancelHooks,
    StepCancelledError,
    explain_missing_names,
    release_scaler,
)
from paceline.strategies.context import Options, TrainerContext
from paceline.strategies.local_servers import LocalServers, check_lead, check_model
from paceline.strategies.optimizer_patch import load_optimizers, own_parameters
from paceline.strategies.optimizer_state import OptimizerState
from paceline.strategies.server_trainer import ServerTrainer, check_server
from paceline.strategies.snapshot_board import Kept
from paceline.strategies.step_table import changed_unlike, weigh
from paceline.strategies.worker_memory import Named, WorkerMemory, describe_run
from paceline.transport import BarrierKind, Memory

_WEIGHT = struct.Struct("=dqd")  # samples, and kind and items of the loss


class ParameterServerTrainer(ServerTrainer):
    """Trains a whole model with a parameter server."""

    spans = True

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext) -> None:
        check_server(optimizer, options)
        members, policy = context.members, parse_policy(context.strategy)
        servers = LocalServers(context, policy)
        self._joins = context.launch.joins
        """The address of the server of a run that has begun, which this worker joins."""
        trained, rest = split_parameters(model, optimizer)
        if self._joins is None:
            members.mirror([*rest, *model.buffers()])
        buffers = ModelBuffers([*rest, *model.buffers()])
        spec = _describe(context, options, optimizer, trained, buffers, servers, policy)
        if self._joins is None:
            run = _open_run(context, spec, optimizer, trained, buffers, servers)
        else:
            run = _join_run(context, spec, optimizer, trained, buffers, servers, self._joins)
        self.size = run.memory.spec.workers
        policy = policy.for_workers(range(self.size))
        super().__init__(
            model,
            optimizer,
            context,
            policy,
            run.memory,
            servers,
            run.client,
            run.state,
            run.session,
            server_rank=members.rank,
            workers=self.size,
        )
        run.client.reduce, run.client.say = self._reduce_share, context.say
        self._pushed = False
        """True if this worker has pushed a gradient."""
        self.keeps = True
        self._gathering = 0
        """The number of the snapshot whose copy was last requested from other machines."""
        self._leases.on_ask = self._leave_if_dismissed
        more = _with_more(policy)
        self.cancels = policy.cancels or more.cancels
        self._depth = 0
        """Nested `team.step()` blocks that the script is in."""
        self._changes_by_hand = False
        self._epochs = 0
        """Epochs of training that this worker has begun."""
        """True if scripts change parameters themselves."""
        self._returned = False
        """True if the leases of a step that is being cancelled are returned to the server already."""
        self._snapshot: StepSnapshot | None = None
        self._hooks: CancelHooks | None = None
        if self.cancels:
            self._snapshot = StepSnapshot(model)
            self._hooks = CancelHooks(model, self._check_cancelled)
            self._stopwatch.sleep = self._sleep
        remote = len(members.machines) > 1 and set(run.memory.spec.servers) != {members.machine}
        early = remote and run.memory.feedback is None
        self._gradients.attach(on_index=self._gradient_made if early else None)
        self._patch_optimizer()
        self._exposes = policy.lockstep and more.lockstep and len(members.machines) == 1 and run.memory.feedback is None
        """True if all workers compute every update together, and can read each other's gradients."""
        self._leases.on_enter = self._begin_epoch
        if self._exposes or policy.k > 1:  # else a gradient is an update by itself
            self._watch_gradients()

    @property
    def _late(self) -> bool:
        return self._joins is not None and not self._pushed

    # -- a step ------------------------------------------------------------------------------------------------------

    def _gradient_made(self, parameter: int) -> None:
        """During the backward pass, let the relay send a gradient that is complete."""
        if not self._accumulating:
            self._client.send(GradientReady([parameter]))

    def _update(self, unscale: float, found_inf: bool) -> None:
        self._check_cancelled()
        if self.board is not None and self._members.machine:
            number, data = self.board.unsent(self._rank)
            if number:
                self._client.send(SnapshotNote(number, data))
        super()._update(unscale, found_inf)

    def _after_push(self, answer: Proceed) -> None:
        self._pushed = True
        self._leave_if_dismissed()
        if answer.outcome == "dropped" and self.cancels and self._depth:
            self._returned = not self._leases.several  # else the server does not know them
            raise StepCancelledError

    def _expose_gradients(self) -> None:
        if not self._exposes:
            super()._expose_gradients()
            return
        state = self._making
        own = state.gradients.collect()
        self._write_used(own)
        weight = state.weight.loss
        note = _WEIGHT.pack(float(max(1, self._leases.minibatch.samples)), weight.kind, weight.items)
        payloads = self._client.exchange(BarrierKind.REDUCE, note)
        found = {rank: _WEIGHT.unpack(payload) for rank, payload in sorted(payloads.items())}
        samples = sum(count for count, _, _ in found.values())
        weights, _ = weigh([(rank, count / samples, kind, items, 1.0) for rank, (count, kind, items) in found.items()])
        used = {rank: bytes(self._memory.used_of[rank]) for rank, _ in weights}
        sums, views = [], self._layout.buffers(self._gradients.own)
        slots = self._slots[self._current]
        for slot in slots:
            sums.append(torch.zeros_like(views[slot.index]))
            for rank, share in weights:
                if used[rank][slot.index]:
                    sums[-1].add_(self._layout.buffers(self._gradients.flats[rank])[slot.index], alpha=share)
        self._client.exchange(BarrierKind.REDUCE, b"")  # until all have read
        for slot, total in zip(slots, sums, strict=True):
            views[slot.index].copy_(total)
        state.gradients.show(bytes(any(flags) for flags in zip(*used.values(), strict=True)))
        self._gradients_shown(len(weights))

    def _refuses(self, found_inf: bool) -> bool:
        found = super()._refuses(found_inf)
        if not (self._exposes and self.on_nan == "skip"):
            return found
        payloads = self._client.exchange(BarrierKind.REDUCE, bytes([found]))  # an update needs all workers
        return any(payload != b"\0" for payload in payloads.values())

    def _accept_changes(self, changed: list[Slot]) -> None:
        if not self._exposes:
            super()._accept_changes(changed)
        self._commit_changes(changed, BarrierKind.REDUCE)

    def _begin_epoch(self) -> None:
        changed = self._memory.versions.changed()
        if changed and not self._exposes:
            self._accept_changes(changed)  # which refuses them
        # Scripts may have used their own gradients; a worker without samples has not done what the others did.
        if self._exposes and (self._changes_by_hand or (changed and self._epochs and not self._server_version)):
            self._commit_changes(changed, BarrierKind.EPOCH)
        self._epochs += 1

    def _commit_changes(self, changed: list[Slot], kind: BarrierKind) -> None:
        """What all scripts did alike to these parameters counts once."""
        versions = self._memory.versions
        self._changes_by_hand = True
        digest = versions.digest(changed) if changed else 0
        found = self._client.exchange(kind, digest.to_bytes(8, "little"))
        digests = {rank: int.from_bytes(one, "little") for rank, one in found.items()}
        if not any(digests.values()):
            return
        first = min(rank for rank, one in digests.items() if one)
        others = [
            rank for rank, one in digests.items() if one != digests[first] and (one or kind is BarrierKind.REDUCE)
        ]
        if others and (self._server_version or self._epochs):
            raise changed_unlike(changed, others, first)
        if self._rank == first:
            with self.frozen():
                versions.commit(changed)
        self._client.exchange(kind, b"")
        versions.discard()

    def clip(self, limit: float, norm: float) -> torch.Tensor:
        if not self._exposes:
            return super().clip(limit, norm)
        self._look_away()
        if not self._making.exposed:
            self._expose_gradients()
        return clip_grad_norm_([slot.parameter for slot in self._slots[self._current]], limit, norm_type=norm)

    def enter_step(self) -> None:
        self._depth += 1
        if self._depth == 1 and self._snapshot is not None and self._leases.open <= 1:
            # Minibatches that make one gradient are cancelled together: back to before the first of them.
            self._snapshot.take()

    def leave_step(self, error: BaseException | None) -> bool:
        self._depth -= 1
        if self._depth or not isinstance(error, StepCancelledError):
            return False  # a step is cancelled as a whole
        if not self._returned:
            leases = self._leases.cancel()
            self._stopwatch.cancel(self._server_version, leases, self._client.cancelled_at())
            self._adopt(self._client.call(CancelledStep(leases, self._leases.wanted())), free=False)
        self._returned = False
        self._discard_clip()
        for patch in self._patches:
            release_scaler(error, patch.optimizer)
        for slot in self._layout.slots:
            slot.parameter.grad = None
        if self._snapshot is not None:
            self._snapshot.restore()
        self._stopwatch.restart(time.perf_counter())
        explain_missing_names()
        return True

    def _check_cancelled(self) -> None:
        if self._depth and self._client.cancelled(self._server_version):
            raise StepCancelledError

    def _sleep(self, seconds: float) -> None:
        if self._client.sleep(seconds, self._server_version if self._depth else None):
            raise StepCancelledError

    def _leave_if_dismissed(self) -> None:
        """End this script between two gradients, if the launcher wants it to leave."""
        leave_if_told()
        if self._client.dismissed:
            raise SystemExit(0)

    # -- the other workers -------------------------------------------------------------------------------------------

    @property
    def present(self) -> int | None:
        return int(self._client.present)

    def gather(self, payload: bytes, kind: BarrierKind) -> list[bytes] | None:
        """Over the server, since the number of workers may change."""
        payloads = self._client.exchange(kind, payload)
        return [payloads.get(rank, b"") for rank in range(max(self.size, *(rank + 1 for rank in payloads)))]

    # -- state as plain torch knows it -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def frozen(self, reload: bool = False) -> Iterator[None]:
        if self._frozen:
            yield
            return
        with self._newest_frozen(reload):
            yield

    def mark_next(self) -> None:
        self._client.send(MarkVersion())

    @property
    def marked(self) -> int:
        return int(self._client.marked)

    def version_of(self, number: int) -> int:
        return self._initial_version + number - 1

    def kept(self, number: int) -> Kept | None:
        copy = self._memory.kept
        if copy.complete != number or not self._is_gathered(number):
            return None
        left, notes, policy = self._client.left()
        assert self.board is not None
        for rank, note in notes.items():
            self.board.write(rank, *note)
        return Kept(copy.by_parameter(self._layout), self._state.kept(copy), left, policy)

    def _is_gathered(self, number: int) -> bool:
        """True if the copies of all machines' servers are on this one; requests them once."""
        if len(self._members.machines) == 1:
            return True
        if self._gathering != number:
            self._gathering = number
            self._client.send(GatherKept(number))
        return bool(self._client.gathered == number)

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        """The lead's state is the run's; the others load the hyperparameters only."""
        if self._rank == 0 and not self._late:
            with self.frozen(reload=True):
                self._state.load_state_dict(self._patch.optimizer, state)
        else:
            super()._load_state_dict(state)
        self._optimizer.state.clear()

    def load(self, model: Any, optimizer: Any) -> None:
        if self._late:
            return  # the run has trained on from this checkpoint
        here = [rank for rank, payload in enumerate(self.gather(b"here", BarrierKind.BARRIER) or []) if payload]
        # One after the other: the lead writes the shared values; the others load them again, and their own buffers.
        for rank in here:
            if rank == self._rank:
                with self.frozen():
                    self._load_model(model)
                load_optimizers(self._patches, optimizer)
            self.gather(b"", BarrierKind.BARRIER)

    def close(self) -> None:
        with contextlib.suppress(TeamError), self.frozen():
            self._state.export(copy=True)
        if self._hooks is not None:
            self._hooks.remove()
        super().close()
        own_parameters(self._layout)


# -- setting up ------------------------------------------------------------------------------------------------------


def _with_more(policy: Policy) -> Policy:
    """The policy once more workers have joined."""
    return parse_policy(str(policy)).for_workers(range(2 * len(policy.workers)))


class _Run(NamedTuple):
    """This worker's part of a run with a parameter server."""

    memory: WorkerMemory
    client: ServerClient
    state: OptimizerState
    session: SessionOpened
    """The version to begin with."""


def _describe(
    context: TrainerContext,
    options: Options,
    optimizer: Optimizer,
    trained: Named,
    buffers: ModelBuffers,
    servers: LocalServers,
    policy: Policy,
) -> RunSpec:
    launch, machines = context.launch, list(context.members.machines)
    if launch.open is not None:
        machines += [[]] * JOINING_MACHINES
    return describe_run(
        context,
        options,
        optimizer,
        (trained, optimizer),
        machines,
        servers.where if launch.joins is None else "1",
        policy,
        capacity=capacity(context.members.size),
        elastic=launch.elastic,
        buffers=buffers.size,
        compress=launch.compress or policy.compress,
    )


def _open_run(
    context: TrainerContext,
    spec: RunSpec,
    optimizer: Optimizer,
    trained: Named,
    buffers: ModelBuffers,
    servers: LocalServers,
) -> _Run:
    """Lay out shared memory, start the servers, and connect to them; all workers call it."""
    members = context.members
    if len(members.machines) > 1:
        members.mirror([parameter.data for _, parameter in trained])
    share = functools.partial(members.share, keep=True)
    memory = WorkerMemory(spec, members.rank, trained, optimizer, share, hyperparameters=optimizer)
    state = OptimizerState(optimizer, lambda: memory.shards)
    if members.local.rank == 0:
        memory.versions.fill(0)
        buffers.write(memory.run.buffers)
    if members.rank == 0:
        state.import_all()
    memory.mirror_state(members)
    optimizer.state.clear()
    spare = spec.elastic or parse_policy(context.strategy).for_workers(range(members.size)).spare
    address = servers.open(memory, members.rank, optimizer, spare=spare)
    client = ServerClient(address, members.rank, spec.timeouts)
    _attach(client, memory, buffers)
    pids = [0] * members.size
    for place, rank in enumerate(members.machines[members.machine]):
        pids[rank] = members.local.barrier.pid(place)
    client.open(spec, memory.run, pids)
    client.wait_until_ready(functools.partial(check_lead, members))
    memory.run.close_descriptors()
    return _Run(memory, client, state, SessionOpened(0, 0))


def _join_run(
    context: TrainerContext,
    own: RunSpec,
    optimizer: Optimizer,
    trained: Named,
    buffers: ModelBuffers,
    servers: LocalServers,
    address: str,
) -> _Run:
    """Join a run that has begun: its spec counts, and its memory comes from the server."""
    rank = context.members.rank
    new = functools.partial(WorkerMemory, share=Memory.create, hyperparameters=optimizer)
    servers.join_with_machine(own, lambda spec: new(spec, rank, trained, optimizer))
    client = ServerClient(address, rank, own.timeouts, late=True)
    session, spec, run = client.join()
    check_model(rank, own, spec)
    memories = iter(run)
    memory = WorkerMemory(spec, rank, trained, optimizer, lambda _size: next(memories), hyperparameters=optimizer)
    optimizer.state.clear()
    buffers.read(run.buffers)
    _attach(client, memory, buffers)
    run.close_descriptors()
    return _Run(memory, client, OptimizerState(optimizer, lambda: memory.shards), session)


def _attach(client: ServerClient, memory: WorkerMemory, buffers: ModelBuffers) -> None:
    spec = memory.spec
    client.attach(SharedFlags(memory.run.flags, spec.capacity), RunState(memory.run.record), len(spec.machines))
    client.copy = functools.partial(buffers.write, memory.run.buffers)
