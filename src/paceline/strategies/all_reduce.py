"""All-reduce: gradients meet in shared memory, each worker updates its shard of the next version.

The way of a step: every worker's gradients lie in its own shared buffer; the workers meet, so nobody computes on the
old version any more; each sums its shard from all buffers and writes its shard of the next version; they meet again,
and all of them see it.

With `gradients="visible"`, or an optimizer that needs whole parameters, the sum is made at the end of the backward
pass and copied to everybody's `.grad`, as DistributedDataParallel does. On accelerators torch.distributed makes it.

On several machines each does all of this in its own shared memory, and between summing a shard and updating it, those
who own the same on different machines exchange their sums (`spread`).
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import Variable
from torch.optim import Optimizer

from paceline.config import AllReduce, one_of
from paceline.errors import TeamError, UsageError
from paceline.events import Reduce, Update, Wait
from paceline.parameters.gradients import Gradients
from paceline.parameters.hyperparameters import RateScaling
from paceline.parameters.layout import Layout
from paceline.parameters.machines_reduction import MachinesReduction
from paceline.parameters.reduction import CollectiveReduction, Reduction, SharedReduction, together
from paceline.parameters.sharding import ELEMENTWISE, ShardedOptimizer
from paceline.parameters.versions import Versions
from paceline.strategies.base import Options, Trainer, TrainerContext
from paceline.strategies.optimizer_patch import OptimizerPatch, own_parameters, own_state, zero_grad
from paceline.strategies.step_table import StepAgreement, StepTable
from paceline.transport import BarrierKind, MachinesBarrier

_VALUE = struct.Struct("=dd")
_NOTABLE = 5e-6
"""Seconds below which nobody can be said to have waited."""


def on_host(parameters: Iterable[torch.nn.Parameter]) -> bool:
    """Whether parameters lie where the workers of a machine can share them."""
    return all(parameter.device.type == "cpu" for parameter in parameters)


class AllReduceTrainer(Trainer):
    """One worker's part in training a model by all-reduce."""

    _sums = 0
    """How many places there are for sums, beside the workers' own gradients."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext) -> None:
        one_of("gradients", options.gradients, ("local", "visible"))
        self._members = members = context.members
        self._rank, self._size = members.rank, members.size
        self._barrier, self._recorder, self._stopwatch = members.barrier, context.recorder, context.stopwatch
        self._model, self._optimizer = model, optimizer
        self._rate = RateScaling(options.scale_lr, self._size, options.warmup)
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        named = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) in held]
        rest = [parameter for parameter in model.parameters() if id(parameter) not in held]
        shareable = on_host(parameter for _, parameter in named)
        sharded = shareable and type(optimizer) in ELEMENTWISE
        if type(optimizer) not in ELEMENTWISE:
            context.say(
                f"{type(optimizer).__name__} is not known to treat every element by itself, so every worker runs "
                "it on the whole mean gradient, not on a shard"
            )
        self._visible = options.gradients == "visible" or not sharded

        self.version = 0
        self.paces = [(0.0, 0)] * self._size
        self._weight = 1.0 / self._size
        self._groups: list[dict[str, Any]] = []
        """The hyperparameters that the shard was last updated with."""
        self._trouble: TeamError | None = None
        """What went wrong on the way to another machine: told at the next barrier, so that all know."""
        self._accumulating = self._exchanging = False
        """The latter: whether the end of the running backward pass will exchange gradients."""
        self._paced: tuple[float, int] | None = None
        """What the step has taken until its gradients were exchanged, if they have been."""
        self._clipped: float | None = None
        """What to multiply the mean gradient with, once it has been made and clipped."""

        # Shards are divided among the workers of each machine.
        self._place, self._neighbours = members.local.rank, members.local.size
        self._layout = layout = Layout(named, self._shard_count())
        self._table = StepTable(members, optimizer, len(layout.slots))
        self._reduction: Reduction
        self._spread: MachinesReduction | None = None
        if shareable:
            memory = members.share(Gradients.memory_size(layout, self._neighbours + self._sums))
            self._gradients = Gradients.shared(layout, memory, self._place, self._neighbours + self._sums)
            self._reduction = self._shards = SharedReduction(layout, self._gradients, self._place)
            self._reach_out(context)
        else:
            self._gradients = Gradients.private(layout, named[0][1].device)
            self._reduction = CollectiveReduction(layout, self._gradients, self._rank)
        members.mirror([*rest, *model.buffers()])
        self._versions: Versions | None = None
        self._shard: ShardedOptimizer | None = None
        if sharded:
            self._share_versions()
        else:
            members.mirror([slot.parameter for slot in layout.slots])
        self._gradients.attach(self._gradient_made if self._visible else None)
        self._patch = OptimizerPatch(optimizer)
        self._take_over()

    # -- setting up --------------------------------------------------------------------------------------------------

    def _shard_count(self) -> int:
        """Into how many the parameters are cut."""
        return self._neighbours

    def _reach_out(self, context: TrainerContext) -> None:
        """To the other machines, if there are any."""
        strategy = context.strategy
        topology = strategy.topology if isinstance(strategy, AllReduce) else "auto"
        if len(self._members.machines) > 1:
            self._spread = MachinesReduction(self._layout, self._gradients, self._members, topology)
            self._reduction = self._spread
        elif topology != "auto":
            context.say(
                f"all workers are on one machine, where gradients meet in shared memory; the topology '{topology}' "
                "is for messages between machines"
            )

    def _share_versions(self) -> None:
        members, layout = self._members, self._layout
        self._versions = versions = Versions(layout, members.share(Versions.memory_size(layout)))
        if self._spread is not None:
            members.mirror([slot.parameter for slot in layout.slots])
        if self._place == 0:
            versions.fill()
        self._barrier.wait(BarrierKind.ALLOCATE)
        versions.pull()
        self._shard = ShardedOptimizer(
            self._optimizer, layout, versions, self._gradients, self._place, self._neighbours
        )
        self._shard.place(members.share(self._shard.memory_size()))
        self._shard.import_state(self._optimizer)

    def _take_over(self) -> None:
        self._patch.replace("step", self.step)
        self._patch.replace("zero_grad", self._zero_grad)
        if self._shard is None:
            return
        self._patch.replace("state_dict", self._state_dict)
        self._patch.replace("load_state_dict", self._load_state_dict)
        if not self._visible:
            # GradScaler then leaves unscaling and skipping to `step`, where the workers agree on it.
            self._optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    # -- the user's loop ---------------------------------------------------------------------------------------------

    def take_batch(self, samples: int, weight: float) -> None:
        if weight != self._weight:
            if self._gradients.any:
                # Summed over minibatches of unlike weight: bring what is there to the scale of what will come.
                self._gradients.scale(self._weight / weight)
            self._weight = weight
        self._stopwatch.start(samples)

    def accumulate(self, on: bool) -> None:
        self._accumulating = on

    def _zero_grad(self, set_to_none: bool = True) -> None:
        if not self._accumulating:
            zero_grad(self._optimizer, self._layout, set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._accumulating:
            return None
        if self._shard is not None:
            self._patch.run_hooks("pre")
        loss = None
        if closure is not None and self._shard is not None:
            with torch.enable_grad():
                loss = closure()
            closure = None
        unscale, skip = 1.0, False
        if not self._visible:
            # Set by GradScaler for the time of this call; see `_take_over`.
            scale = getattr(self._optimizer, "grad_scale", None)
            unscale = 1.0 if scale is None else 1.0 / float(scale)
            skip = bool(getattr(self._optimizer, "found_inf", False))
        self._meet(BarrierKind.UPDATE, self._bring(unscale, skip))
        loss = self._update(closure) if closure is not None else self._update() or loss
        if self._shard is not None:
            self._patch.run_hooks("post")
        return loss

    def clip(self, limit: float, norm: float) -> torch.Tensor:
        if self._visible:
            parameters = [slot.parameter for slot in self._layout.slots]
            return torch.nn.utils.clip_grad_norm_(parameters, limit, norm_type=norm)
        self._meet(BarrierKind.CLIP, self._bring(1.0, skip=False, final=False))
        return self._clip(limit, norm)

    def finish_epoch(self) -> None:
        helped = False
        while (topic := self._meet(BarrierKind.PASSIVE)) is not BarrierKind.PASSIVE:
            if topic is BarrierKind.UPDATE:
                self._update()
            elif topic is BarrierKind.REDUCE:
                self._exchange()
            elif topic is BarrierKind.CLIP:
                self._clip()
            elif topic is not BarrierKind.STATISTICS:
                self._barrier.carry(topic)
                break
            helped = True
        if helped:
            self._zero_grad()

    # -- what the workers do together; a passive one joins in here ---------------------------------------------------

    def _meet(self, intent: BarrierKind, length: int = 0) -> BarrierKind:
        """Come to a barrier, and record how long it took for the last one to come."""
        start = time.perf_counter()
        if self._trouble is not None:
            trouble, self._trouble = self._trouble, None
            assert isinstance(self._barrier, MachinesBarrier)
            topic = self._barrier.wait(intent, 0, trouble)
        else:
            topic = self._barrier.wait(intent, length)
        if self._barrier.last != self._rank:
            waited = time.perf_counter() - start
            if waited > _NOTABLE:
                self._recorder.add(Wait(self._rank, start, waited, self._barrier.last))
        return topic

    def _reduce(self, agreed: StepAgreement) -> int:
        """Make the mean gradient of this worker's shard."""
        if self._spread is None:
            return self._reduction.shard(agreed.weights, agreed.used)
        try:
            return self._spread.shard(agreed.weights, agreed.used)
        except TeamError as error:
            self._trouble = error
            return 0

    def _bring(self, unscale: float, skip: bool, final: bool = True) -> int:
        """Write what the others need to know into this worker's note; returns its length."""
        pace = self._pace() if final else (0.0, 0)
        # Once the mean is made it lies in the shared buffer, where this worker's own gradient must not go again.
        used = self._gradients.settle() if self._clipped is None else self._gradients.used()
        return self._table.bring(self._weight, unscale, skip, used, pace)

    def _pace(self) -> tuple[float, int]:
        """Seconds and samples of this worker's step, the exchange of visible gradients taken out."""
        paced, self._paced = self._paced, None
        return self._stopwatch.stop(self.version) if paced is None else paced

    def _update(self, closure: Callable[[], Any] | None = None) -> Any:
        start = time.perf_counter()
        agreed = self._table.read()
        self.paces = agreed.paces
        loss = None
        read = 0
        if not agreed.skip:
            if self._shard is not None:
                read = self._update_shard(agreed)
            else:
                with self._patch.values(self._rate.scaled(agreed.groups, self.version)):
                    loss = self._run_whole(agreed, closure)
        self._clipped = None
        self._stopwatch.slow_link(time.perf_counter() - start)
        end = time.perf_counter()
        self._recorder.add(
            Update(
                self._rank,
                start,
                end - start,
                self.version + (not agreed.skip),
                read,
                len(agreed.weights),
                agreed.skip,
            )
        )
        if not agreed.skip:
            if self._versions is not None:
                self._meet(BarrierKind.PUBLISH)
            self.version += 1
        self.updated()
        self._stopwatch.restart(time.perf_counter())
        return loss

    def _update_shard(self, agreed: StepAgreement) -> int:
        assert self._shard is not None
        groups = self._rate.scaled(agreed.groups, self.version)
        if groups is not self._groups:
            self._groups = groups
            self._shard.set_hyperparameters(groups)
        read = 0
        if not self._visible and self._clipped is None:
            if self._spread is None:
                return self._shard.update(agreed.weights, agreed.used)
            read = self._reduce(agreed)
            if self._trouble is not None:
                return 0
        # The mean is made already and lies in this worker's own buffer.
        anywhere = agreed.anywhere()
        used = None if anywhere is None else [anywhere] * self._neighbours
        source = self._source(agreed) if self._visible else self._place
        return read + self._shard.update([(source, 1.0)], used, 1.0 if self._clipped is None else self._clipped)

    def _source(self, agreed: StepAgreement) -> int:
        """Whose copy of the mean gradient counts here: the script of a passive worker has not seen its own."""
        if self._spread is not None:
            self._spread.supply(self._barrier.passive)
            return self._spread.source(self._barrier.passive)
        return agreed.weights[0][0] if self._barrier.passive[self._rank] else self._rank

    def _run_whole(self, agreed: StepAgreement, closure: Callable[[], Any] | None) -> Any:
        """Run the user's optimizer on whole parameters, as every worker does."""
        if closure is None:
            source = self._source(agreed) if self._spread is not None else agreed.weights[0][0]
            if self._barrier.passive[self._rank]:
                if source != self._place or self._spread is None:
                    self._reduction.adopt(source)
                self._gradients.show(agreed.anywhere())
            return self._patch.plain_step()
        if any(self._barrier.passive):
            raise UsageError(
                f"{type(self._optimizer).__name__} with a closure needs a share of every batch for every worker; "
                "give the loader drop_last=True"
            )
        return self._patch.plain_step(lambda: self._mean_loss(closure))

    def _mean_loss(self, closure: Callable[[], Any]) -> Any:
        """The same loss everywhere, so that an optimizer that looks at it decides the same everywhere."""
        loss = closure()
        _VALUE.pack_into(self._barrier.note, 0, float(loss) * self._weight, 0.0)
        self._barrier.wait(BarrierKind.GATHER, _VALUE.size)
        mean = sum(_VALUE.unpack_from(note)[0] for note in self._barrier.notes)
        return loss.detach().new_tensor(mean) if isinstance(loss, torch.Tensor) else mean

    def _clip(self, limit: float = float("nan"), norm: float = 2.0) -> torch.Tensor:
        """Make the mean gradient of this worker's shard and find the norm of the whole."""
        start = time.perf_counter()
        agreed = self._table.read()
        read = self._reduce(agreed)
        self._recorder.add(Reduce(self._rank, start, time.perf_counter() - start, read))
        # Only those who called it know which norm, and what limit; the lowest of them says it.
        _VALUE.pack_into(self._barrier.note, 0, limit, norm)
        self._meet(BarrierKind.CLIP, _VALUE.size)
        limit, norm = _VALUE.unpack_from(self._barrier.notes[agreed.weights[0][0]])
        part = self._shards.norm(norm, agreed.anywhere())
        _VALUE.pack_into(self._barrier.note, 0, part, 0.0)
        self._meet(BarrierKind.CLIP, _VALUE.size)
        # Every machine has all parts. Cut elsewhere, they round differently: all take those of the first.
        parts = [_VALUE.unpack_from(self._barrier.notes[rank])[0] for rank in self._members.machines[0]]
        total = together(parts, norm) ** (1.0 if norm == float("inf") else 1.0 / norm)
        self._clipped = min(1.0, limit / (total + 1e-6))  # as torch.nn.utils.clip_grad_norm_ has it
        return torch.tensor(total, dtype=self._layout.flats[0].dtype)

    # -- gradients that the user can see -----------------------------------------------------------------------------

    def _gradient_made(self) -> None:
        """Called for each gradient; asks the autograd engine to call us once more when it is done with all."""
        if not self._exchanging and not self._accumulating:
            self._exchanging = True
            Variable._execution_engine.queue_callback(self._backward_done)

    def _backward_done(self) -> None:
        self._exchanging = False
        seconds, samples = self._paced or (0.0, 0)
        pace = self._stopwatch.stop(self.version, again=self._paced is not None)
        self._paced = seconds + pace[0], samples + pace[1]
        length = self._table.bring(self._weight, 1.0, False, self._gradients.settle(), (0.0, 0))
        self._meet(BarrierKind.REDUCE, length)
        self._exchange()
        self._stopwatch.restart(time.perf_counter())

    def _exchange(self) -> None:
        """Put the mean gradient into everybody's `.grad`."""
        start = time.perf_counter()
        agreed = self._table.read()
        read = self._reduce(agreed)
        middle = time.perf_counter()
        self._recorder.add(Reduce(self._rank, start, middle - start, read))
        self._meet(BarrierKind.PUBLISH)
        start = time.perf_counter()
        read = self._reduction.gather()
        self._recorder.add(Reduce(self._rank, start, time.perf_counter() - start, read))
        self._gradients.show(agreed.anywhere())
        # The others may change their gradients in place as soon as they have them; not before all have copied.
        self._meet(BarrierKind.PUBLISH)

    def addresses(self) -> list[int]:
        """Where the shared parameters and the optimizer's state begin."""
        tensors = [*(self._versions.flats if self._versions else []), *(self._shard.state() if self._shard else [])]
        return [tensor.data_ptr() for tensor in tensors]

    # -- state as plain torch knows it -------------------------------------------------------------------------------

    def _state_dict(self) -> dict[str, Any]:
        assert self._shard is not None
        self._shard.export_state(self._optimizer)
        try:
            return type(self._optimizer).state_dict(self._optimizer)
        finally:
            self._optimizer.state.clear()

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        assert self._shard is not None
        type(self._optimizer).load_state_dict(self._optimizer, state)
        self._shard.import_state(self._optimizer)

    def load(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        # Nobody may still compute on these values, and nobody may go on before all of them are there.
        self._meet(BarrierKind.BARRIER)
        self._model.load_state_dict(model)
        self._optimizer.load_state_dict(optimizer)
        self._meet(BarrierKind.BARRIER)

    def close(self) -> None:
        self._gradients.detach()
        self._patch.undo()
        if self._shard is None or self._versions is None:
            return
        vars(self._optimizer).pop("_step_supports_amp_scaling", None)
        self._shard.export_state(self._optimizer)
        own_state(self._optimizer)
        own_parameters(self._layout)
