"""Trainers that push gradients to a parameter server and pull versions from it.

A step:

1. The worker's gradient is in its shared buffer; a short message tells the server.
2. The policy decides; the server writes the next version into a free buffer.
3. The server answers when this worker may go on, and with which version; the worker points its parameters at it.

Samples are leased from the server, too.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline import failpoints
from paceline.errors import UsageError
from paceline.events import Pull, Reduce, Wait
from paceline.parameters.gradient_state import add_loss, clear_gradients, gradient_states, part_slots
from paceline.parameters.gradients import GRAD
from paceline.parameters.hyperparameters import RateScaling
from paceline.parameters.joint import load_model_state, parts_of
from paceline.parameters.layout import Slot
from paceline.parameters.loss_reader import LossReader
from paceline.parameters.loss_weight import Kind, LossWeight
from paceline.parameters.reduction import CHUNK, weighted_sum
from paceline.policies import Policy
from paceline.server.lease_client import LeaseClient
from paceline.server.messages import Freeze, LeaseGranted, Proceed, PushGradient, ReduceShare, SessionOpened, Thaw
from paceline.strategies.base import Trainer
from paceline.strategies.context import Options, TrainerContext
from paceline.strategies.local_servers import LocalServers
from paceline.strategies.optimizer_patch import OneCycleClamp
from paceline.strategies.optimizer_state import OptimizerState
from paceline.strategies.worker_memory import WorkerMemory


class ServerTrainer(Trainer):
    """A trainer whose parameters a server updates."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        context: TrainerContext,
        policy: Policy,
        memory: WorkerMemory,
        servers: LocalServers,
        client: Any,
        state: OptimizerState,
        session: SessionOpened,
        *,
        server_rank: int,
        workers: int,
        counts: bool = True,
    ) -> None:
        """session: the version to begin with.

        server_rank: this worker's, or its replica's, as the server knows it; workers: how many of them there are.
        counts: True if this worker counts the samples of its leases.
        """
        super().__init__(model, optimizer, context, replicas=workers)
        self._memory, self._servers, self._client, self._state = memory, servers, client, state
        self.holds_server = servers.holds
        self._layout, self._gradients = memory.layout, memory.gradients
        self._server_rank = server_rank
        self._server_version, self._buffer = session.version, session.buffer
        """The version of the server that this worker has, and the buffer that holds it."""
        memory.versions.pull(session.buffer)
        self._initial_version = 0
        """Updates that the parameters had had before this run."""
        self._leases = LeaseClient(
            client,
            self._stopwatch,
            self._gradients,
            workers,
            self._adopt,
            evaluates=lambda: self.evaluates,
            in_turns=policy.lockstep,
            counts=counts,
        )
        self._leases.several = len(self._patches) > 1
        self._leases.on_ask_batch, self._leases.on_batch = self._batch_asked, self._batch_given
        self._slots = part_slots(optimizer, self._layout)
        """The parameters of each optimizer."""
        self._reader = LossReader(context.say, divided=workers > 1)
        self._states = gradient_states(optimizer, self._gradients, 1.0 / workers, self._reader)
        self._lockstep = self.together = policy.lockstep
        self._loss: float | None = None
        self._frozen = False
        self._exchange_seconds = 0.0
        """Duration of the last push and pull that did not have to wait for another worker."""
        self._clamp = None if policy.lockstep else OneCycleClamp(optimizer)
        if policy.spare or context.launch.elastic:
            self._barrier.spare = True

    @property
    def version(self) -> int:
        return self._initial_version + self._server_version

    @version.setter
    def version(self, value: int) -> None:
        self._initial_version = value - (0 if self._late else self._server_version)

    @property
    def _late(self) -> bool:
        """True if this worker has joined a run and its script still repeats what the others' did before training."""
        return False

    # -- the user's loop ---------------------------------------------------------------------------------------------

    def report_loss(self, loss: float) -> None:
        self._loss = loss

    def enter_backward(self, loss: Any) -> bool:
        super().enter_backward(loss)
        share = self._leases.minibatch.share if self._lockstep else None
        self._reader.samples = self._leases.minibatch.samples
        for state in self._states:
            state.weight.take_batch(state.weight.share if share is None else share)
        found = self._reader.read(loss, self.weight)
        add_loss(self._states, found)
        return self._runs(not found.is_empty)

    @property
    def part(self) -> float | None:
        return self._leases.minibatch.share

    @property
    def no_snapshots(self) -> str:
        if len(self._patches) > 1:  # a lease is done when its last gradient was pushed, which the server does not know
            return "with a parameter server and several optimizers"
        return "" if self.keeps else f"under '{self._strategy}'"

    def _batch_asked(self) -> None:
        self.on_ask()

    def _batch_given(self) -> None:
        self.on_batch()

    def share_loader(self, loader: DataLoader[Any], **options: Any) -> Any:
        return self._leases.share_loader(loader, **options)

    def _clear_gradients(self, set_to_none: bool) -> None:
        self._making.pending, self._making.clip = False, None
        clear_gradients(self._patch.optimizer, self._slots[self._current], set_to_none)

    def _update(self, unscale: float, found_inf: bool) -> None:
        if changed := self._memory.versions.changed():
            self._accept_changes(changed)
        _, samples = self._stopwatch.stop(self._server_version)
        start = time.perf_counter()
        self._stopwatch.slow_link(
            self._exchange_seconds
        )  # here, since a step that is cancelled meanwhile has its leases
        used, found_inf = self._collect(found_inf)
        state = self._making
        weight = LossWeight() if state.exposed else state.weight.loss  # which is the same on all workers
        if state.exposed:
            pass
        elif (weight.kind is Kind.UNKNOWN or weight.guessed) and self._lockstep and self._leases.open > 1:
            weight = LossWeight(Kind.MEAN, state.weight.weight)  # of a sum over batches
        elif weight.kind is Kind.UNKNOWN and not samples and self._leases.minibatch.samples:
            weight = LossWeight(Kind.MEAN, self._leases.minibatch.samples)  # it was pushed for another optimizer
        state.exposed, state.pending = 0, False
        complete, memory = 0 not in used, self._memory
        if not complete:
            self._write_used(used)
        if memory.feedback is not None and not found_inf:
            memory.feedback.encode(None if complete else used, unscale)
        position = self._leases.position
        message = PushGradient(
            self._server_version,
            samples,
            self._leases.take(),
            memory.hyperparameters.publish(),
            complete,
            unscale,
            memory.gradient_size,
            self._loss,
            state.clip,
            found_inf,
            self._leases.wanted(),
            weight.kind,
            weight.items,
            *position,
            self._current,
            self._reader.digest.value,
            self._reader.averaged,
            state.weight.undecided,
        )
        self._reader.digest.value = 0
        self._loss = state.clip = None
        failpoints.hit("push.made")
        sent = time.perf_counter()
        answer: Proceed = self._client.call(message)
        failpoints.hit("pull.begin")
        self._adopt(answer)
        failpoints.hit("pull.done")
        end = time.perf_counter()
        if answer.waited_for < 0:
            self._exchange_seconds = end - sent
            self._recorder.add(Pull(self._rank, start, end - start, self._server_version))
        else:
            self._recorder.add(Wait(self._rank, start, end - start, answer.waited_for * memory.spec.replica))
        self._stopwatch.restart(end)
        self.on_update()
        self._after_push(answer)

    def _accept_changes(self, changed: list[Slot]) -> None:
        """The script has changed these parameters itself, outside of the optimizer."""
        named = ", ".join([*(slot.name for slot in changed[:3]), "…"][: len(changed) + (len(changed) > 3)])
        raise UsageError(
            f"the script has changed parameters outside of the optimizer ({named}); under '{self._strategy}' workers "
            "compute on different versions, which only the server changes; do it before team.setup, with team.load, or "
            "use all-reduce or sync"
        )

    def _load_model(self, model: Any) -> None:
        """Load values into the newest version, while nothing else changes it."""
        load_model_state(self._model, model)
        versions = self._memory.versions
        changed = versions.changed()
        self._replica_wait()  # only then may others write: a page holds parts of several workers
        versions.commit(changed)
        self._replica_wait()
        versions.discard()

    def _replica_wait(self) -> None:
        """Wait for the other workers of the replica."""

    def _gradients_shown(self, workers: int) -> None:
        """The gradient of so many workers is in `.grad` now."""
        self._making.exposed = workers

    def _collect(self, found_inf: bool) -> tuple[bytes, bool]:
        """Complete the gradient in the shared buffer.

        Returns a byte per parameter, 1 if it has a gradient, and True if the gradient is not finite.
        """
        return self._making.gradients.collect(), found_inf

    def _write_used(self, used: bytes) -> None:
        """Tell the server which parameters have a gradient."""
        self._memory.used[:] = used

    def _after_push(self, answer: Proceed) -> None:
        """The server has answered a push."""

    def _adopt(self, answer: Any, *, free: bool = True) -> None:
        """Take the version of a server's answer, and its lease if it has one.

        free: True if this worker may begin its next step.
        """
        if answer.buffer != self._buffer:
            self._memory.versions.pull(answer.buffer)
            self._buffer = answer.buffer
        self._server_version = answer.version
        if free and not self._leases.open:
            self._stopwatch.free()
        if isinstance(answer, Proceed | LeaseGranted):
            self._leases.recalled.update(answer.recalled)
        if isinstance(answer, Proceed) and answer.lease is not None:
            self._leases.granted = answer.lease

    def clip(self, limit: float, norm: float) -> torch.Tensor:
        """The server clips the mean gradient; returns the norm of this worker's own."""
        self._making.clip = (limit, norm)
        return torch.nn.utils.get_total_norm(self._own_gradients(), norm)

    def _own_gradients(self) -> list[torch.Tensor]:
        found = (GRAD.__get__(slot.parameter) for slot in self._slots[self._current])
        return [gradient for gradient in found if gradient is not None]

    def _discard_clip(self) -> None:
        """The gradient that was to be clipped is not pushed."""
        for state in self._states:
            state.clip = None

    def _reduce_share(self, order: ReduceShare) -> None:
        """Sum this worker's share of its group's gradients into the group's buffer."""
        start = time.perf_counter()
        place, members = order.ranks.index(self._server_rank), len(order.ranks)
        weights = list(zip(order.ranks, order.weights, strict=True))
        read = 0
        for number, flat in enumerate(self._layout.flats):
            target = self._gradients.flats[self._memory.spec.capacity + order.group][number]
            first, last = flat.count * place // members, flat.count * (place + 1) // members
            step = max(1, CHUNK // flat.dtype.itemsize)
            for begin in range(first, last, step):
                end = min(begin + step, last)
                parts = tuple(tensors[number][begin:end] for tensors in self._gradients.flats)
                weighted_sum(target[begin:end], parts, weights)
            read += (members - 1) * (last - first) * flat.dtype.itemsize
        self._recorder.add(Reduce(self._rank, start, time.perf_counter() - start, read))

    # -- state as plain torch knows it -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _until_thaw(self, answer: Any, reload: bool) -> Iterator[Any]:
        """Thaws the server, which has answered to `Freeze`, when the context exits.

        reload: the servers read the optimizer's state again then.
        """
        self._frozen = True
        try:
            yield answer
        finally:
            self._frozen = False
            self._client.send(Thaw(reload))

    @contextlib.contextmanager
    def _newest_frozen(self, reload: bool = False) -> Iterator[None]:
        """While entered, the server changes nothing, and this worker has its newest version."""
        answer = self._client.call(Freeze())
        self._adopt(answer)
        with self._until_thaw(answer, reload):
            yield

    def _state_dict(self) -> dict[str, Any]:
        with self.frozen():
            return self._state.state_dict(self._patch.optimizer, copy=True)

    def leave(self) -> None:
        self._client.close()
        if getattr(sys, "last_value", None) is None:  # a script that has failed ends at once, so that others know
            self._servers.wait()

    def detach(self) -> None:
        super().detach()
        self._client.detach()

    def wait_until_forwarded(self) -> None:
        self._servers.wait_for_relay()

    def close(self) -> None:
        self._gradients.detach()
        self._reader.close()
        super().close()
        if self._clamp is not None:
            self._clamp.undo()


def check_server(optimizer: Optimizer, options: Options) -> None:
    """Refuses options and optimizers that a parameter server cannot use."""
    if any(isinstance(part, torch.optim.LBFGS) for part in parts_of(optimizer)):
        raise UsageError(
            "LBFGS evaluates the loss several times per step, which a parameter server cannot do; use all-reduce, "
            "or another optimizer"
        )
    if options.gradients != "local":
        raise UsageError(
            f"gradients is {options.gradients!r}; with a parameter server the mean gradient is on the server only, "
            "so it must be 'local'"
        )
    RateScaling(options.scale_lr, 1, options.warmup)  # checks its arguments
