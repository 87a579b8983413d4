"""All-reduce: gradients are summed in shared memory, and each worker updates its shard of the next version.

With `gradients="visible"`, or an optimizer that needs whole parameters, the mean gradient is made at the end of the
backward pass and copied to every worker's `.grad`, as DistributedDataParallel does. On accelerators torch.distributed
makes it.

Over several machines each machine does this in its own shared memory. Between summing a shard and updating it, the
workers that own the same shard on different machines exchange their sums (`MachinesReduction`).
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import Variable
from torch.nn.utils.clip_grad import clip_grad_norm_
from torch.optim import Optimizer

from paceline.config import AllReduce, between_replicas
from paceline.errors import UsageError
from paceline.events import Reduce
from paceline.parameters.gradient_places import GradientPlaces
from paceline.parameters.gradient_state import part_masks
from paceline.parameters.gradients import Gradients
from paceline.parameters.joint import describe, divided, split_parameters
from paceline.parameters.kept_version import KeptVersion
from paceline.parameters.layout import Layout
from paceline.parameters.machines_reduction import MachinesReduction
from paceline.parameters.optimizers import is_elementwise
from paceline.parameters.reduction import CollectiveReduction, Reduction, SharedReduction
from paceline.parameters.sharding import ShardedOptimizer
from paceline.parameters.versions import Versions
from paceline.strategies.announcing import AnnouncingTrainer
from paceline.strategies.context import Options, TrainerContext, check_rate
from paceline.strategies.optimizer_state import OptimizerState
from paceline.strategies.snapshot_board import Kept
from paceline.strategies.step_table import StepAgreement, StepTable
from paceline.transport import BarrierKind

_LOSS = struct.Struct("=d")


def on_host(parameters: Iterable[torch.nn.Parameter]) -> bool:
    """True if parameters lie in memory that the workers of a machine can share."""
    return all(parameter.device.type == "cpu" for parameter in parameters)


def topology_of(context: TrainerContext) -> str:
    """The topology of messages between machines."""
    between, _ = between_replicas(context.strategy, 1)
    return between.topology if isinstance(between, AllReduce) else "auto"


class AllReduceTrainer(AnnouncingTrainer):
    """Trains a model by all-reduce."""

    spans = True

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext) -> None:
        members = context.members
        rate = check_rate(options, members.size)
        trained, rest = split_parameters(model, optimizer)
        elementwise = is_elementwise(optimizer)
        if not elementwise:
            context.say(
                f"{describe(optimizer)} is not known to treat every element by itself, so every worker runs "
                "it on the whole mean gradient, not on a shard"
            )
        # Shards are divided among the workers of each machine.
        self._place, self._neighbours = members.local.rank, members.local.size
        layout = Layout(trained, self._neighbours)
        table = StepTable(members, optimizer, len(layout.slots), masks=part_masks(optimizer, layout))
        shareable = on_host(parameter for _, parameter in trained)
        if shareable:
            self._sources = self._neighbours + (len(members.machines) > 1)  # over machines one more, for their sums
            memory = members.share(Gradients.memory_size(layout, self._sources))
            gradients = Gradients.shared(layout, memory, self._place, self._sources)
        else:
            gradients = Gradients.private(layout, trained[0][1].device)
        sharded = shareable and elementwise
        self._visible = options.gradients == "visible" or not sharded
        if not self._visible:
            gradients.places = GradientPlaces.of(gradients, members.local)
        super().__init__(model, optimizer, context, rate, gradients, table, together=self._visible)
        self._exchanging = False
        """True if gradients will be exchanged at the end of the current backward pass."""
        self._visible_pace: tuple[float, int] | None = None
        """Seconds and samples of the step until its visible gradients were exchanged, if they have been."""
        self._closure: Callable[[], Any] | None = None
        self._loss: Any = None
        """Of an optimizer that runs on whole parameters."""
        self._machines: MachinesReduction | None = None
        self._reduction = self._make_reduction(context, shareable)
        members.mirror([*rest, *model.buffers()])
        self._versions: Versions | None = None
        self._shard: ShardedOptimizer | None = None
        self._copy: KeptVersion | None = None
        """Of the version that was marked for a snapshot."""
        if sharded:
            self._shard = self._share_versions()
            self._share_state(OptimizerState(optimizer, lambda: [self._shard] if self._shard is not None else []))
        else:
            members.mirror([slot.parameter for slot in layout.slots])
        gradients.attach(self._gradient_made if self._visible else None)
        self._announce()
        self._patch_optimizer(state=sharded, amp=not self._visible)
        if not self._visible:
            self._watch_gradients()

    # -- setting up --------------------------------------------------------------------------------------------------

    def _make_reduction(self, context: TrainerContext, shareable: bool) -> Reduction:
        if not shareable:
            return CollectiveReduction(self._layout, self._gradients, self._rank)
        topology = topology_of(context)
        if len(self._members.machines) > 1:
            place = self._neighbours
            self._machines = MachinesReduction(self._layout, self._gradients, self._members, topology, target=place)
            return self._machines
        if topology != "auto":
            context.say(
                f"all workers are on one machine, where gradients meet in shared memory; the topology '{topology}' "
                "is for messages between machines"
            )
        return SharedReduction(self._layout, self._gradients, self._place)

    def _share_versions(self) -> ShardedOptimizer:
        members, layout = self._members, self._layout
        memory = members.share(Versions.memory_size(layout), keep=True)
        self._versions = versions = Versions(layout, memory, private=True)
        memory.close_descriptor()
        if self._machines is not None:
            members.mirror([slot.parameter for slot in layout.slots])
        if self._place == 0:
            versions.fill()
        self._barrier.wait(BarrierKind.ALLOCATE)
        versions.pull()
        shard = ShardedOptimizer(self._optimizer, layout, versions, self._gradients, self._place, self._neighbours)
        shard.place(members.share(shard.memory_size()))
        memory = members.share(KeptVersion.memory_size(layout, shard.memory_size()))
        self._copy, self.keeps = KeptVersion(layout, memory), True
        return shard

    # -- a step ------------------------------------------------------------------------------------------------------

    @property
    def _shared(self) -> Versions | None:
        return self._versions

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if self._shard is not None:
            return super()._step(closure)
        self._closure, self._loss = closure, None
        try:
            self._update(1.0, False)
            return self._loss
        finally:
            self._closure = self._loss = None

    def _update(self, unscale: float, found_inf: bool) -> None:
        # GradScaler itself unscales visible gradients.
        super()._update(1.0 if self._visible else unscale, found_inf)

    def clip(self, limit: float, norm: float) -> torch.Tensor:
        if self._reduced:
            parameters = [slot.parameter for slot in self._slots[self._current]]
            return clip_grad_norm_(parameters, limit, norm_type=norm)
        return super().clip(limit, norm)

    @property
    def _reduced(self) -> bool:
        """True if `.grad` is the team's gradient."""
        return self._visible or self._making.exposed > 0

    def _take_part(self, kind: BarrierKind) -> bool:
        if kind is BarrierKind.REDUCE:
            self._exchange()
            return True
        return super()._take_part(kind)

    def _publish(self) -> None:
        if self._shard is not None:
            super()._publish()

    def _update_parameters(self, agreed: StepAgreement) -> int:
        if self._shard is None:
            groups = self._rate.scaled(agreed.groups, self.version)
            with self._patch.values(divided(self._optimizer, groups)[self._current][1]):
                self._loss = self._run_whole(agreed)
            return 0
        changed = self._scaled_groups(agreed)
        if changed is not None:
            self._shard.set_hyperparameters(changed)
        here = self._members.machine == 0  # every machine has the whole state, and the lead is on the first one
        if here and self.board is not None and self.board.mark == self.version + 1:
            self._shard.keep = self._copy
        read = 0
        if not self._reduced and self._making.clip_factor is None:
            if self._machines is None:
                places = self._gradients.places
                self._shard.mix = None if places is None else places.mix
                return self._shard.update(agreed.weights, agreed.used, agreed.scale)
            read = self._reduce(agreed)
            if self._failure is not None:
                return 0
        self._shard.mix = None  # the mean is in a buffer
        source = self._place if self._machines is None else self._machines.target
        self._update_reduced(self._shard, agreed, self._source(agreed) if self._reduced else source, self._sources)
        return read

    def _pass_over(self, agreed: StepAgreement) -> int:
        read = super()._pass_over(agreed)
        if self._machines is not None:
            self._wait(BarrierKind.PUBLISH)  # until then others may read this worker's gradients
        return read

    def _reduce(self, agreed: StepAgreement) -> int:
        read = super()._reduce(agreed)
        self._record_sent()
        return read

    def kept(self, number: int) -> Kept | None:
        if self._copy is None or self._state is None or self.version < number:
            return None
        return Kept(self._copy.by_parameter(self._layout), self._state.kept(self._copy))

    # -- an optimizer on whole parameters ----------------------------------------------------------------------------

    def _source(self, agreed: StepAgreement) -> int:
        """The worker whose copy of the mean gradient is used: a passive worker's script has not seen its own."""
        if self._machines is not None:
            self._machines.supply(self._barrier.passive)
            return self._machines.source(self._barrier.passive)
        return agreed.weights[0][0] if self._barrier.passive[self._rank] else self._rank

    def _run_whole(self, agreed: StepAgreement) -> Any:
        """Run the user's optimizer on whole parameters, as every worker does."""
        closure = self._closure
        if closure is None:
            source = self._source(agreed) if self._machines is not None else agreed.weights[0][0]
            if self._barrier.passive[self._rank]:
                if source != self._place or self._machines is None:
                    self._reduction.adopt(source)
                self._making.gradients.show(agreed.anywhere())
            return self._patch.plain_step()
        if any(self._barrier.passive):
            raise UsageError(
                f"{type(self._patch.optimizer).__name__} with a closure needs a share of every batch for every worker; "
                "give the loader drop_last=True"
            )
        return self._patch.plain_step(lambda: self._mean_loss(closure))

    def _mean_loss(self, closure: Callable[[], Any]) -> Any:
        """The mean loss of all workers, so that an optimizer that uses it decides the same everywhere."""
        loss = closure()
        _LOSS.pack_into(
            self._barrier.note,
            0,
            float(loss.detach() if isinstance(loss, torch.Tensor) else loss) * self._making.weight.share,
        )
        self._barrier.wait(BarrierKind.GATHER, _LOSS.size)
        mean = sum(_LOSS.unpack_from(note)[0] for note in self._barrier.notes)
        return loss.detach().new_tensor(mean) if isinstance(loss, torch.Tensor) else mean

    # -- visible gradients -------------------------------------------------------------------------------------------

    def _gradient_made(self) -> None:
        """Called for each gradient; asks the autograd engine for one more call at the end of the backward pass."""
        if not self._exchanging and not self._accumulating:
            self._exchanging = True
            Variable._execution_engine.queue_callback(self._backward_done)

    def _backward_done(self) -> None:
        self._exchanging = False
        seconds, samples = self._visible_pace or (0.0, 0)
        pace = self._stopwatch.stop(self.version, again=self._visible_pace is not None)
        self._visible_pace = seconds + pace[0], samples + pace[1]
        self._wait(BarrierKind.REDUCE, self._contribute(1.0, found_inf=False, together=self._visible))
        self._exchange()
        self._stopwatch.restart(time.perf_counter())

    def _pace(self) -> tuple[float, int]:
        pace, self._visible_pace = self._visible_pace, None
        return super()._pace() if pace is None else pace

    def _expose_gradients(self) -> None:
        self._backward_done()

    def _show_clipped(self) -> None:
        self._expose_gradients()

    def _exchange(self) -> None:
        start = time.perf_counter()
        agreed = self._agree()
        state = self._making
        read = self._reduce(agreed) if state.clip_factor is None else 0
        self._recorder.add(Reduce(self._rank, start, time.perf_counter() - start, read))
        self._wait(BarrierKind.PUBLISH)
        start = time.perf_counter()
        read = self._reduction.gather()
        self._recorder.add(Reduce(self._rank, start, time.perf_counter() - start, read))
        state.gradients.show(agreed.anywhere())
        # The others may change their gradients in place as soon as they have them; not before all have copied.
        self._wait(BarrierKind.PUBLISH)
        self._gradients_shown(len(agreed.weights))

    def close(self) -> None:
        super().close()
        self._reduction.close()

    def addresses(self) -> list[int]:
        """Where the shared parameters and the optimizer's state begin."""
        versions, shard = self._versions, self._shard
        tensors = [*(versions.flats if versions else []), *(shard.state() if shard else [])]
        tensors += [slot.parameter for slot in self._layout.slots[:1]]  # in a view of the versions
        return [tensor.data_ptr() for tensor in tensors]
