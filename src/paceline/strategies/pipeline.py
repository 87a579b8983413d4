"""A pipeline: the model is cut between its layers, and microbatches of every batch follow each other through the parts.

The script's own loop drives it. `model(x)` gives a value that is not there yet, `loss.backward()` runs the schedule,
and `optimizer.step()` updates this worker's part. The model is traced and cut when it is first called to be trained:
that is when it is known what it is called with.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from paceline.collectives.group import Group
from paceline.config import Pipeline, one_of
from paceline.errors import UsageError
from paceline.events import Update
from paceline.graph.batch_dim import batch_of
from paceline.graph.model_profile import model_profile, undivided
from paceline.graph.partition import Device, partition
from paceline.graph.trace import ModelTrace, trace
from paceline.parameters.hyperparameters import RateScaling
from paceline.pipeline.batch_run import BatchRun, ModelCall
from paceline.pipeline.deferred import Deferred
from paceline.pipeline.runtime import PipelineRuntime, RuntimeContext
from paceline.pipeline.shared_state import SharedState
from paceline.pipeline.stage_assignment import StageAssignment
from paceline.strategies.base import Options, Trainer, TrainerContext
from paceline.strategies.optimizer_patch import OptimizerPatch
from paceline.transport import BarrierKind

_SLACK = 0.02
"""How much slower the slowest stage may be for fewer bytes over the cuts: about what measuring is good for."""


class _Split:
    """What a split model does when it is called. A copy of the model is not split, and has no part in the pipeline."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, _: dict[int, Any]) -> _Split:
        def refuse(*_args: Any, **_kwargs: Any) -> Any:
            raise UsageError(
                "this is a copy of a model that is split over workers, which cannot be called; make a plain model and "
                "load its state_dict"
            )

        return _Split(refuse)


class PipelineTrainer(Trainer):
    """One worker's stages of a model."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext) -> None:
        one_of("gradients", options.gradients, ("local", "visible"))
        assert isinstance(context.strategy, Pipeline)
        self._spec = spec = context.strategy
        self._around, self._members = context, context.members
        self._rank, self._size = context.members.rank, context.members.size
        self._recorder, self._stopwatch = context.recorder, context.stopwatch
        self._model, self._optimizer = model, optimizer
        _refuse(model, optimizer)
        # Only to refuse what a larger team would: a pipeline is one replica, and scales its rate by 1.
        RateScaling(options.scale_lr, 1, options.warmup)
        self._assignment = _assignment(spec)
        self.version = 0
        self.paces = [(0.0, 0)]
        self.replica = (0, 1)
        self._steps = self._calls = 0
        self._accumulating = False
        self._samples = 0
        self._seed = 0
        self._line: PipelineRuntime | None = None
        self._said: set[str] = set()
        self._plain_forward: Callable[..., Any] = model.forward
        self._had_forward = "forward" in vars(model)
        self._split = _Split(self._forward)
        model.forward = self._split
        self._patch = OptimizerPatch(optimizer)
        self._patch.replace("step", self.step)
        self._patch.replace("zero_grad", self._zero_grad)
        self._patch.replace("state_dict", self._state_dict)
        self._patch.replace("load_state_dict", self._load_state_dict)
        # So that a GradScaler leaves it to `step` to say that it cannot be used.
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        self._hook = model.register_state_dict_pre_hook(lambda *_: self._settle())

    # -- the user's loop ---------------------------------------------------------------------------------------------

    def take_batch(self, samples: int, weight: float) -> None:
        self._stopwatch.start(samples)
        self._stopwatch.drop()  # what a stage computes is told by its passes
        self._samples = samples

    def finish_epoch(self) -> None:
        pass

    def accumulate(self, on: bool) -> None:
        self._accumulating = on

    def _zero_grad(self, set_to_none: bool = True) -> None:
        if not self._accumulating:
            type(self._optimizer).zero_grad(self._optimizer, set_to_none)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """What `model(x)` does now."""
        training = torch.is_grad_enabled()
        if self._line is None and not training:
            with self._plain():
                return self._model(*args, **kwargs)
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves((args, kwargs))):
            raise UsageError("an input of the model requires a gradient, which a pipeline does not make; detach it")
        self._check_rows(pytree.tree_leaves((args, kwargs)))
        if self._line is None:
            self._line = self._build(args, kwargs)
        line = self._line
        kind = line.key(args, kwargs)
        known = line.trace(kind, args, kwargs)
        inputs = known.flat_inputs(args, kwargs)
        batch = batch_of(inputs)
        sizes = self._sizes(known, batch, first=not self._calls and training)
        call = ModelCall(inputs, batch, sizes, kind, self._calls, self._seed, self.version)
        self._calls += 1
        batch_run = BatchRun(line, call, training)
        if not training:
            return known.returned(batch_run.outputs(), inputs)
        outlines = line.outlines(kind, args, kwargs, batch)
        return known.returned([Deferred.made(batch_run, one, number) for number, one in enumerate(outlines)], inputs)

    def _check_rows(self, inputs: list[Any]) -> None:
        """Refuse to cut what has its samples elsewhere than in its rows."""
        shapes = (one.shape for one in inputs if isinstance(one, torch.Tensor) and one.dim())
        shape, samples = next(shapes, None), self._samples
        if self._spec.microbatches > 1 and shape and samples and shape[0] % samples and samples in shape[1:]:
            raise UsageError(
                f"the model is called with a tensor of {shape[0]} rows, but the batch has {samples} samples, and "
                "microbatches are rows; let samples be the first dimension, or write microbatches=1"
            )

    def _sizes(self, traced: ModelTrace, batch: int, first: bool) -> tuple[int, ...]:
        """Samples of each microbatch."""
        wanted = self._spec.microbatches
        why = self._undivided(traced) if batch > 1 else ""
        if why:
            self._say_once(why)
            wanted = 1
        if first and batch < wanted:
            raise UsageError(
                f"a batch of {batch} samples cannot be cut into {wanted} microbatches; give the loader a larger "
                f"batch_size, or write microbatches={batch}"
            )
        wanted = min(wanted, batch)
        each, more = divmod(batch, wanted)
        return (each + 1,) * more + (each,) * (wanted - more)

    def _undivided(self, traced: ModelTrace) -> str:
        """Why batches are not cut; empty if they are."""
        why = undivided(self._model, traced, self._spec.norm) if self._spec.microbatches > 1 else ""
        if why and self._assignment.shared:
            raise UsageError(f"the workers of a stage share its microbatches, but {why}")
        return why

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._accumulating:
            return None
        if getattr(self._optimizer, "grad_scale", None) is not None:
            raise UsageError(
                "a GradScaler has one scale per worker, and the stages of a pipeline would not agree on it; use "
                "autocast with bfloat16, which needs no scaling"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        start = time.perf_counter()
        with self._patch.values(_in_one_pass(self._optimizer)):
            self._patch.plain_step()
        if self._line is not None:
            self._line.home.settle()
            self._line.updated()
        self._steps += 1
        self.version += 1
        if self._line is not None:
            self._line.home.done(self._steps)
        end = time.perf_counter()
        self._recorder.add(Update(self._rank, start, end - start, self.version))
        self.updated()
        return loss

    def clip(self, limit: float, norm: float) -> torch.Tensor:
        parameters = [parameter for parameter in self._model.parameters() if parameter.grad is not None]
        own = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters], norm)  # type: ignore[misc]
        # JSON has no word for what is infinite or not a number.
        told = self._members.gather(msgspec.msgpack.encode(float(own)), BarrierKind.CLIP)
        parts = [msgspec.msgpack.decode(part, type=float) for part in told]
        total: torch.Tensor = torch.linalg.vector_norm(torch.tensor(parts, dtype=torch.float64), norm).to(own.dtype)
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, total)
        return total

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Until every part of the model is at this worker's version."""
        if self._line is not None:
            self._line.home.wait(self._steps)

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        self._settle()
        yield

    def _state_dict(self) -> dict[str, Any]:
        plain = type(self._optimizer).state_dict
        if self._line is None:
            return plain(self._optimizer)
        self._settle()
        own = self._optimizer.state
        self._optimizer.state = _like(own, self._line.home.all_state())
        try:
            return plain(self._optimizer)
        finally:
            self._optimizer.state = own

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        type(self._optimizer).load_state_dict(self._optimizer, state)
        if self._line is not None:
            self._line.home.keep(self._line.own)

    def load(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        if self._line is not None:
            self._members.barrier.wait(BarrierKind.BARRIER)
        self._model.load_state_dict(model)
        self._optimizer.load_state_dict(optimizer)
        if self._line is not None:
            self._members.barrier.wait(BarrierKind.BARRIER)

    def close(self) -> None:
        if self._line is not None:
            self._settle()
            state = self._line.home.all_state()
            self._line.home.release()
            copies = {
                parameter: {
                    name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in own.items()
                }
                for parameter, own in state.items()
            }
            self._optimizer.state = _like(self._optimizer.state, copies)
            self._line.group.close()
            self._line = None
        self._patch.undo()
        self._hook.remove()
        vars(self._model).pop("forward", None)
        if self._had_forward:
            self._model.forward = self._plain_forward

    # -- cutting the model -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _plain(self) -> Iterator[None]:
        """Let the model be the script's own for a while."""
        vars(self._model).pop("forward")
        if self._had_forward:
            self._model.forward = self._plain_forward
        try:
            yield
        finally:
            self._model.forward = self._split

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            self._around.say(message)

    def _build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PipelineRuntime:
        members = self._members
        # The script's random numbers must be the same everywhere: they may decide what is in a batch.
        state = members.gather(bytes(torch.get_rng_state().numpy()), BarrierKind.ALLOCATE)[0]
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        self._seed = torch.initial_seed() if members.size == 1 else int.from_bytes(state[:8], "little")
        home = self._home()
        error, traced = None, None
        with self._traceable():
            try:
                traced = trace(self._model, args, kwargs, len(self._assignment.workers))
            except UsageError as caught:
                error = str(caught)
        answer = {"error": error, "operations": _fingerprint(traced) if traced else ""}
        self._agree(answer)
        assert traced is not None
        self._undivided(traced)
        with self._plain():
            bounds = self._cut(traced, args, kwargs)
        ranks = self._line_ranks()

        def exchange(payload: bytes) -> list[bytes]:
            everybody = members.gather(payload)
            return [everybody[rank] for rank in ranks]

        group = Group(self._rank, self._size, exchange, members.barrier.timeouts, self._around.say)
        group.board.ranks = [members.barrier.ranks[rank] for rank in ranks]
        place = RuntimeContext(
            ranks=ranks,
            assignment=self._assignment,
            schedule=self._spec.schedule,
            recorder=self._recorder,
            slow=self._stopwatch.slow_pass,
            traceable=self._traceable,
            in_step=self._in_step,
            meet=lambda: members.barrier.wait(BarrierKind.BARRIER),
        )
        return PipelineRuntime(self._model, home, group, place, traced, bounds, (args, kwargs))

    @property
    def _in_step(self) -> bool:
        """Whether other workers do the same with their parts of the same layers."""
        return False

    def _home(self) -> SharedState:
        return SharedState(self._members, self._model, self._optimizer)

    def _line_ranks(self) -> list[int]:
        """Among the members, those that this worker's microbatches go through, in the order of their stages."""
        return list(range(self._members.size))

    def _traceable(self) -> contextlib.AbstractContextManager[None]:
        """Let the model be such as can be traced for a while."""
        return self._plain()

    def _agree(self, own: dict[str, Any]) -> None:
        """Raise what went wrong with any worker, on all of them."""
        answers = [msgspec.json.decode(part) for part in self._members.gather(msgspec.json.encode(own))]
        for answer in answers:
            if answer.get("error"):
                raise UsageError(answer["error"])
        if any(answer != answers[0] for answer in answers):
            raise UsageError("the workers have traced different models; all must make the same one")

    def _pace(self, rank: int) -> float:
        """How quick a stage's worker is known to be: those that are made slow on purpose are slow devices."""
        slow = self._around.launch.slow.get(rank)
        return 1.0 if slow is None else 1.0 / slow.factor

    def _cut(self, traced: ModelTrace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """Where each part ends; the lead finds it out."""
        answer: dict[str, Any] = {}
        if self._rank == 0:
            try:
                spec, parts = self._spec, self._assignment.workers
                known = model_profile(traced, self._model, args, kwargs, spec.microbatches, spec.norm)
                found = partition(
                    known.problem(len(parts)),
                    [Device(pace=min(map(self._pace, workers)), count=len(workers)) for workers in parts],
                    schedule=spec.schedule,
                    microbatches=spec.microbatches,
                    slack=_SLACK,
                )
                answer["bounds"], answer["mixes"] = found.bounds, known.mixes
            except UsageError as caught:
                answer["error"] = str(caught)
        payload = msgspec.json.encode(answer)
        told: dict[str, Any] = msgspec.json.decode(self._members.gather(payload)[0])
        if "error" in told:
            raise UsageError(told["error"])
        traced.mixes = told["mixes"]
        self._undivided(traced)
        return list(told["bounds"])


def _fingerprint(traced: ModelTrace) -> str:
    """Equal for traces of the same operations."""
    return hashlib.sha256(repr(traced.operations).encode()).hexdigest()


def _assignment(spec: Pipeline) -> StageAssignment:
    return StageAssignment.of(spec.by_stage, spec.chunks if spec.schedule == "interleaved" else 1)


def _in_one_pass(optimizer: Optimizer) -> list[dict[str, Any]]:
    """For each group, what lets torch do all of Adam in one pass over memory, if the script has not chosen a way."""
    return [{"fused": True} if _fusable(optimizer, group) else {} for group in optimizer.param_groups]


def _fusable(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or group["differentiable"] or group["capturable"]:
        return False
    return group["fused"] is None and group["foreach"] is None and all(map(_is_flat, group["params"]))


def _is_flat(parameter: torch.nn.Parameter) -> bool:
    """Whether its elements and its gradient's lie in memory in the same order: one pass looks at nothing else."""
    plain = parameter.is_floating_point() and parameter.is_contiguous()
    return plain and (parameter.grad is None or parameter.grad.is_contiguous())


def _like(old: Any, values: dict[Any, Any]) -> Any:
    new = type(old)(old.default_factory)
    new.update(values)
    return new


def _refuse(model: torch.nn.Module, optimizer: Optimizer) -> None:
    elsewhere = {parameter.device.type for parameter in model.parameters()} - {"cpu"}
    if elsewhere:
        raise UsageError(
            f"the model is on '{elsewhere.pop()}'; the parts of a pipeline share the host's memory, so it must be on "
            "'cpu'"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("LBFGS looks at all parameters at once, which no stage of a pipeline has; use Adam or SGD")
