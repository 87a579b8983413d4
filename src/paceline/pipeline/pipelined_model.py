"""A model whose calls run through the stages of a pipeline.

The model is traced and cut when it is first called to be trained, because only then are its inputs known. From then on
`model(x)` returns deferred values, and `loss.backward()` runs the schedule.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch.utils import _pytree as pytree

from paceline.cluster.membership import Members
from paceline.collectives.group import Group
from paceline.config import Pipeline
from paceline.errors import UsageError
from paceline.events import Recorder
from paceline.graph.batch_dim import batch_of
from paceline.graph.model_profile import model_profile, undivided
from paceline.graph.partition import Device, partition
from paceline.graph.trace import ModelTrace, trace
from paceline.pipeline.batch_run import BatchRun, ModelCall
from paceline.pipeline.deferred import Deferred
from paceline.pipeline.runtime import PipelineRuntime, RuntimeContext
from paceline.pipeline.shared_state import SharedState
from paceline.pipeline.stage_assignment import StageAssignment
from paceline.schedules import SCHEDULES
from paceline.transport import BarrierKind

_SLACK = 0.02
"""How much slower the slowest stage may be for fewer bytes over the cuts: about the precision of measured costs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineWorkers:
    """The workers of one replica, seen from one of them."""

    members: Members
    """The workers of the replica."""
    rank: int
    """This worker's place among the workers of its pipeline."""
    ranks: Sequence[int]
    """Among the members, the workers that this worker's microbatches pass through, in the order of their stages."""
    speeds: Sequence[float]
    """Relative speed of each of those workers."""
    recorder: Recorder
    slow_pass: Callable[[float], None]
    """Called with the seconds of every pass; sleeps if this worker is slowed down on purpose."""
    say: Callable[[str], None]
    version: Callable[[], int]
    """The parameters' version."""
    shared_state: Callable[[], SharedState]
    """Places the model's tensors where all workers of the replica can read them."""
    traceable: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """While entered, the layers of the model can be traced."""
    split_stages: bool = False
    """True if several workers compute the same stage, each with a part of its layers."""


class _PipelinedForward:
    """The `forward` of a pipelined model. A copy of the model has no part in the pipeline, and cannot be called."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, _: dict[int, Any]) -> _PipelinedForward:
        def refuse(*_args: Any, **_kwargs: Any) -> Any:
            raise UsageError(
                "this is a copy of a model that is split over workers, which cannot be called; make a plain model and "
                "load its state_dict"
            )

        return _PipelinedForward(refuse)


class PipelinedModel:
    """Replaces a model's `forward` by a pipeline's, until `close`."""

    def __init__(self, model: torch.nn.Module, spec: Pipeline, workers: PipelineWorkers) -> None:
        self._model, self._spec, self._workers, self._members = model, spec, workers, workers.members
        self._assignment = StageAssignment.of(spec.by_stage, spec.chunks if SCHEDULES[spec.schedule].has_chunks else 1)
        self.runtime: PipelineRuntime | None = None
        """None until the model is first called to be trained."""
        self.samples = 0
        """Samples of the batch that the loader gave last; 0 if unknown."""
        self._calls = self._seed = 0
        self._messages: set[str] = set()
        self._plain_forward: Callable[..., Any] = model.forward
        self._had_forward = "forward" in vars(model)
        self._pipelined = _PipelinedForward(self._forward)
        model.forward = self._pipelined

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces `model(x)`."""
        training = torch.is_grad_enabled()
        if self.runtime is None and not training:
            with self._plain():
                return self._model(*args, **kwargs)
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves((args, kwargs))):
            raise UsageError("an input of the model requires a gradient, which a pipeline does not make; detach it")
        self._check_rows(pytree.tree_leaves((args, kwargs)))
        if self.runtime is None:
            self.runtime = self._build(args, kwargs)
        runtime = self.runtime
        kind = runtime.key(args, kwargs)
        known = runtime.trace(kind, args, kwargs)
        inputs = known.flat_inputs(args, kwargs)
        batch = batch_of(inputs)
        sizes = self._sizes(known, batch, first=not self._calls and training)
        call = ModelCall(inputs, batch, sizes, kind, self._calls, self._seed, self._workers.version())
        self._calls += 1
        batch_run = BatchRun(runtime, call, training)
        if not training:
            return known.returned(batch_run.outputs(), inputs)
        shapes = runtime.outlines(kind, args, kwargs, batch)
        return known.returned([Deferred.made(batch_run, one, number) for number, one in enumerate(shapes)], inputs)

    def _check_rows(self, inputs: list[Any]) -> None:
        """Refuses inputs whose samples are not in their rows."""
        shapes = (one.shape for one in inputs if isinstance(one, torch.Tensor) and one.dim())
        shape, samples = next(shapes, None), self.samples
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
        """The reason why batches are not cut into microbatches; empty if they are."""
        why = undivided(self._model, traced, self._spec.norm) if self._spec.microbatches > 1 else ""
        if why and self._assignment.shared:
            raise UsageError(f"the workers of a stage share its microbatches, but {why}")
        return why

    def close(self) -> None:
        """Gives the model its own `forward` back."""
        if self.runtime is not None:
            self.runtime.group.close()
            self.runtime = None
        vars(self._model).pop("forward", None)
        if self._had_forward:
            self._model.forward = self._plain_forward

    # -- cutting the model -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _plain(self) -> Iterator[None]:
        """Gives the model its own `forward` back until the context exits."""
        vars(self._model).pop("forward")
        if self._had_forward:
            self._model.forward = self._plain_forward
        try:
            yield
        finally:
            self._model.forward = self._pipelined

    def _say_once(self, message: str) -> None:
        if message not in self._messages:
            self._messages.add(message)
            self._workers.say(message)

    @contextlib.contextmanager
    def _traceable(self) -> Iterator[None]:
        """Puts the model into a traceable state until the context exits."""
        with self._plain(), self._workers.traceable():
            yield

    def _build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PipelineRuntime:
        workers, members = self._workers, self._members
        # The script's random numbers must be the same everywhere: they may decide what is in a batch.
        state = members.gather(bytes(torch.get_rng_state().numpy()), BarrierKind.ALLOCATE)[0]
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        self._seed = torch.initial_seed() if members.size == 1 else int.from_bytes(state[:8], "little")
        shared_state = workers.shared_state()
        error, traced = None, None
        with self._traceable():
            try:
                traced = trace(self._model, args, kwargs, len(self._assignment.workers))
            except UsageError as caught:
                error = str(caught)
        self._agree({"error": error, "operations": _fingerprint(traced) if traced else ""})
        assert traced is not None
        self._undivided(traced)
        with self._plain():
            bounds = self._partition(traced, args, kwargs)
        context = RuntimeContext(
            ranks=workers.ranks,
            assignment=self._assignment,
            schedule=self._spec.schedule,
            recorder=workers.recorder,
            slow=workers.slow_pass,
            traceable=self._traceable,
            in_step=workers.split_stages,
            meet=lambda: members.barrier.wait(BarrierKind.BARRIER),
        )
        return PipelineRuntime(self._model, shared_state, self._group(), context, traced, bounds, (args, kwargs))

    def _group(self) -> Group:
        members, ranks = self._members, self._workers.ranks

        def exchange(payload: bytes) -> list[bytes]:
            payloads = members.gather(payload)
            return [payloads[rank] for rank in ranks]

        group = Group(self._workers.rank, len(ranks), exchange, members.barrier.timeouts, self._workers.say)
        group.board.ranks = [members.barrier.ranks[rank] for rank in ranks]
        return group

    def _agree(self, own: dict[str, Any]) -> None:
        """Raises on all workers the error that any of them has had."""
        answers = [msgspec.json.decode(part) for part in self._members.gather(msgspec.json.encode(own))]
        for answer in answers:
            if answer.get("error"):
                raise UsageError(answer["error"])
        if any(answer != answers[0] for answer in answers):
            raise UsageError("the workers have traced different models; all must make the same one")

    def _partition(self, traced: ModelTrace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """The operation at which each stage ends, as the lead computes it."""
        answer: dict[str, Any] = {}
        if self._workers.rank == 0:
            try:
                spec, parts, speeds = self._spec, self._assignment.workers, self._workers.speeds
                known = model_profile(traced, self._model, args, kwargs, spec.microbatches, spec.norm)
                found = partition(
                    known.problem(len(parts)),
                    [Device(pace=min(map(speeds.__getitem__, one)), count=len(one)) for one in parts],
                    schedule=spec.schedule,
                    microbatches=spec.microbatches,
                    slack=_SLACK,
                )
                answer["bounds"], answer["mixes"] = found.bounds, known.mixes
            except UsageError as caught:
                answer["error"] = str(caught)
        payload = msgspec.json.encode(answer)
        result: dict[str, Any] = msgspec.json.decode(self._members.gather(payload)[0])
        if "error" in result:
            raise UsageError(result["error"])
        traced.mixes = result["mixes"]
        self._undivided(traced)
        return list(result["bounds"])


def _fingerprint(traced: ModelTrace) -> str:
    """Equal for traces of the same operations."""
    return hashlib.sha256(repr(traced.operations).encode()).hexdigest()
