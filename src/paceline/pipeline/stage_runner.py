"""Runs one worker's stages of a pipeline, operation by operation, in the order of its schedule.

The order is the one that the simulator evaluates, but that the first stage does not wait for a gradient that is late as
long as it can begin its next microbatch. What a stage gives goes straight to every stage that takes it, be it
the next one or, for a skip connection, a later one; its gradient comes back from each of them. Where workers share a
stage, what is sent goes to the one whose turn the microbatch is. Dtypes and shapes are told once for every kind of
microbatch, ahead of the first one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec
import torch

from paceline.events import Pass, Recorder, Wait
from paceline.graph.trace import ModelPart
from paceline.pipeline.split_backward import backward_of_inputs, separable
from paceline.pipeline.stage_assignment import StageAssignment
from paceline.schedules import StageOperation
from paceline.tensor_parallel.partial_tensor import whole
from paceline.transport.mailbox import Mailbox, ReceiveTransfer, SendTransfer

_backward = torch.autograd.backward
"""As torch has it; a team may put a watch around it."""
_NOTABLE = 5e-6
_LABEL = 512
_HEAD, _DATA, _GRADIENT = range(3)
_MICROBATCHES = 1 << 16


class TensorLabel(msgspec.Struct, array_like=True, frozen=True):
    """What a value is like."""

    dtype: str
    shape: list[int]
    differentiable: bool
    number: int | float | bool | None = None
    """The value itself, if it is no tensor."""
    order: list[int] = []
    """Its dimensions as they lie in memory, the outermost first."""


class RunnerBatch(Protocol):
    """What is on the runner."""

    training: bool
    """Whether there will be a backward pass."""
    version: int
    sizes: tuple[int, ...]
    """Samples of each microbatch."""

    def kind(self, microbatch: int) -> Any:
        """Equal for microbatches whose values are alike in all but the numbers."""

    def given(self, number: int, microbatch: int) -> Any:
        """An input of the model."""

    def seed(self, microbatch: int) -> int:
        """For what is drawn; each operation makes its own of it."""

    def surroundings(self) -> contextlib.AbstractContextManager[Any]:
        """What the forward pass of a microbatch is to be run in."""

    def arrived(self, results: list[torch.Tensor], microbatch: int) -> None:
        """The last stage has the model's results."""

    def loss(self, results: list[torch.Tensor], microbatch: int) -> torch.Tensor:
        """What the microbatch gives to the loss."""


@dataclasses.dataclass
class _Kept:
    """What is between the forward and the backward pass of a microbatch on a stage."""

    taken: dict[int, Any]
    given: dict[int, Any]
    late: Callable[[], None] | None = None
    """What is left to do for the gradients of weights."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One of the stages, as this worker knows it."""

    index: int
    part: ModelPart
    takes: tuple[int, ...]
    """Also those of the model's results that are made by other stages, where it is the last one."""


class StageRunner:
    """One worker's end of a pipeline."""

    def __init__(
        self,
        stages: dict[int, Stage],
        makers: dict[int, int],
        takers: dict[int, list[int]],
        results: Sequence[int],
        assignment: StageAssignment,
        mailbox: Mailbox,
        recorder: Recorder,
        ranks: Sequence[int],
        slow: Callable[[float], None],
        in_step: bool,
    ) -> None:
        """stages: this worker's own; makers, takers: by value; ranks: in the team, by place in the mailbox.

        in_step: whether the order must be kept, as others do the same at the same time.
        """
        self._in_step = in_step
        self._chunks = [stage for _, stage in sorted(stages.items())]
        self._makers, self._takers, self._results = makers, takers, results
        self._last = len(assignment.workers) - 1
        self._at = assignment.at
        self._mailbox, self._recorder, self._ranks, self._slow = mailbox, recorder, ranks, slow
        self._rank = ranks[mailbox.rank]
        self._labels: dict[Any, TensorLabel] = {}
        self._here: dict[tuple[int, int, int, int], Any] = {}
        """Values and gradients between two stages of this worker."""
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._separable: dict[Any, bool] = {}
        """By stage and kind of microbatch, whether gradients of weights can be made after those of inputs."""
        self._sending: list[SendTransfer] = []
        self._expected: dict[tuple[int, int, int], list[ReceiveTransfer]] = {}
        """Gradients that are to come, by stage, value and microbatch."""

    def run(self, order: Sequence[StageOperation], batch: RunnerBatch) -> None:
        """Do these operations, one after the other."""
        apart = any(operation.kind == "W" for operation in order)
        left = deque(order)
        while left:
            operation = left.popleft()
            if left and not self._in_step and self._goes_first(left[0], operation):
                operation, left[0] = left[0], operation
            work = {"F": self._forward, "B": self._backward, "W": self._weights}[operation.kind]
            work(self._chunks[operation.chunk], operation.microbatch, batch, apart)
            if self._mailbox.unsent:
                # The next operation may wait for others than those to whom this is sent.
                self._mailbox.attend()
        self._reap()

    def _goes_first(self, following: StageOperation, operation: StageOperation) -> bool:
        """Whether the next forward pass is better done before a backward pass whose gradient has not come yet.

        So a stage that is late now and then keeps nobody waiting. Only the first stage has by itself what a forward
        pass needs; and it is never more than one ahead, which bounds what has to be kept.
        """
        if (operation.kind, following.kind) != ("B", "F") or self._chunks[following.chunk].index:
            return False
        stage = self._chunks[operation.chunk]
        for number, value in self._kept[stage.index, operation.microbatch].given.items():
            if isinstance(value, torch.Tensor) and value.requires_grad:
                for expected in self._expect(stage, number, value, operation.microbatch):
                    expected.look()
                    if not expected.done:
                        return True
        return False

    def forget(self) -> None:
        """Leave what was begun: the batch will have no backward pass."""
        self._kept.clear()
        self._here.clear()

    # -- the operations ----------------------------------------------------------------------------------------------

    def _forward(self, stage: Stage, microbatch: int, batch: RunnerBatch, _: bool) -> None:
        taken = {number: self._take(stage, number, microbatch, batch) for number in stage.takes}
        start = time.perf_counter()
        with contextlib.ExitStack() as around:
            around.enter_context(batch.surroundings())
            around.enter_context(torch.set_grad_enabled(batch.training))
            if stage.part.random:
                around.enter_context(_seeded(batch.seed(microbatch)))
            made = [whole(value) for value in stage.part.run([taken[number] for number in stage.part.takes])]
        given = dict(zip(stage.part.gives, made, strict=True))
        if stage.index == self._last:
            values = {**taken, **given}
            batch.arrived([values[number] for number in self._results], microbatch)
        self._note("F", stage, microbatch, batch, start)
        if batch.training:
            self._kept[stage.index, microbatch] = _Kept(taken, given)
        for number, value in given.items():
            for taker in self._takers.get(number, ()):
                self._give(taker, number, value, microbatch, batch)

    def _backward(self, stage: Stage, microbatch: int, batch: RunnerBatch, apart: bool) -> None:
        kept = self._kept[stage.index, microbatch]
        outputs, gradients = [], []
        for number, value in kept.given.items():
            if not (isinstance(value, torch.Tensor) and value.requires_grad):
                continue
            gradient = self._gradient(stage, number, value, microbatch, batch)
            if gradient is not None:
                outputs.append(value)
                gradients.append(gradient)
        start = time.perf_counter()
        if stage.index == self._last:
            values = {**kept.taken, **kept.given}
            loss = batch.loss([values[number] for number in self._results], microbatch)
            if loss.requires_grad:
                outputs, gradients = [loss], [torch.ones_like(loss)]
        inputs = {
            number: value
            for number, value in kept.taken.items()
            if number >= 0 and isinstance(value, torch.Tensor) and value.requires_grad
        }
        weights = [parameter for parameter in stage.part.parameters if parameter.requires_grad]
        if not apart:
            if outputs:
                _backward(outputs, gradients)
            del self._kept[stage.index, microbatch]
        elif not inputs:
            # There is nobody to send a gradient to, so all of it can wait.
            kept.late = (lambda: _backward(outputs, gradients)) if outputs else None
        elif outputs:
            kept.late = self._in_parts(
                (stage.index, batch.kind(microbatch)), outputs, gradients, [*inputs.values()], weights
            )
        kept.given = {}
        self._note("B", stage, microbatch, batch, start)
        for number, value in inputs.items():
            gradient = value.grad if value.grad is not None else torch.zeros_like(value)
            self._send(self._makers[number], stage.index, number, microbatch, _GRADIENT, gradient)

    def _in_parts(
        self,
        kind: Any,
        outputs: list[torch.Tensor],
        gradients: list[torch.Tensor],
        inputs: list[torch.Tensor],
        weights: list[torch.nn.Parameter],
    ) -> Callable[[], None] | None:
        """Make what others wait for; returns what makes the rest."""
        if kind not in self._separable:
            self._separable[kind] = separable(outputs, inputs)
        if self._separable[kind]:
            return backward_of_inputs(outputs, gradients, inputs, weights)
        _backward(outputs, gradients)
        return None

    def _weights(self, stage: Stage, microbatch: int, batch: RunnerBatch, _: bool) -> None:
        start = time.perf_counter()
        kept = self._kept.pop((stage.index, microbatch))
        if kept.late is not None:
            kept.late()
        self._note("W", stage, microbatch, batch, start)

    def _note(self, kind: str, stage: Stage, microbatch: int, batch: RunnerBatch, start: float) -> None:
        self._slow(time.perf_counter() - start)
        seconds = time.perf_counter() - start
        size = batch.sizes[microbatch]
        chunk = self._chunks.index(stage)
        self._recorder.add(Pass(self._rank, start, seconds, kind, stage.index, chunk, microbatch, size, batch.version))

    # -- values from stage to stage ----------------------------------------------------------------------------------

    def _take(self, stage: Stage, number: int, microbatch: int, batch: RunnerBatch) -> Any:
        if number < 0:
            return batch.given(-1 - number, microbatch)
        maker = self._makers[number]
        peer = self._at(maker, microbatch)
        if peer == self._mailbox.rank:
            value = self._here.pop((number, stage.index, microbatch, _DATA))
            if isinstance(value, torch.Tensor):
                differentiable = value.requires_grad and batch.training
                value = value.detach().requires_grad_(differentiable)
            return value
        label = self._label(peer, stage.index, number, microbatch, batch)
        if label.number is not None:
            return label.number
        laid = torch.empty([label.shape[dim] for dim in label.order], dtype=getattr(torch, label.dtype))
        self._receive(peer, laid, _tag(number, stage.index, microbatch, _DATA))
        return lifted(laid, label.order).requires_grad_(label.differentiable and batch.training)

    def _give(self, taker: int, number: int, value: Any, microbatch: int, batch: RunnerBatch) -> None:
        peer = self._at(taker, microbatch)
        if peer == self._mailbox.rank:
            self._here[number, taker, microbatch, _DATA] = value
            return
        key = (number, taker, peer, batch.kind(microbatch))
        if key not in self._labels:
            label = self._labels[key] = _label(value)
            text = torch.zeros(_LABEL, dtype=torch.uint8)
            payload = msgspec.json.encode(label)
            text[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            self._sending.append(self._mailbox.send(peer, text, _tag(number, taker, microbatch, _HEAD)))
        if isinstance(value, torch.Tensor):
            order = self._labels[key].order
            self._send(taker, taker, number, microbatch, _DATA, value.detach().permute(order))

    def _label(self, peer: int, taker: int, number: int, microbatch: int, batch: RunnerBatch) -> TensorLabel:
        key = (number, taker, peer, batch.kind(microbatch))
        if key not in self._labels:
            text = torch.empty(_LABEL, dtype=torch.uint8)
            self._receive(peer, text, _tag(number, taker, microbatch, _HEAD))
            payload = bytes(text.numpy()).rstrip(b"\0")
            self._labels[key] = msgspec.json.decode(payload, type=TensorLabel)
        return self._labels[key]

    def _gradient(
        self, stage: Stage, number: int, value: torch.Tensor, microbatch: int, batch: RunnerBatch
    ) -> torch.Tensor | None:
        """The sum of what came back for a value, from all who took it."""
        total: torch.Tensor | None = None
        for taker in self._takers.get(number, ()):
            if self._at(taker, microbatch) == self._mailbox.rank:
                gradient = self._here.pop((number, taker, microbatch, _GRADIENT))
                total = gradient if total is None else total + gradient
        for expected in self._expect(stage, number, value, microbatch):
            self._await(expected)
            total = expected.tensor if total is None else total + expected.tensor
        self._expected.pop((stage.index, number, microbatch), None)
        return total

    def _expect(self, stage: Stage, number: int, value: torch.Tensor, microbatch: int) -> list[ReceiveTransfer]:
        """What is to come back for a value from other workers."""
        key = (stage.index, number, microbatch)
        if key not in self._expected:
            self._expected[key] = [
                self._mailbox.receive(
                    peer,
                    torch.empty(value.shape, dtype=value.dtype),
                    _tag(number, taker, microbatch, _GRADIENT),
                )
                for taker in self._takers.get(number, ())
                if (peer := self._at(taker, microbatch)) != self._mailbox.rank
            ]
        return self._expected[key]

    def _send(self, to: int, taker: int, number: int, microbatch: int, what: int, value: torch.Tensor) -> None:
        peer = self._at(to, microbatch)
        if peer == self._mailbox.rank:
            self._here[number, taker, microbatch, _GRADIENT] = value
            return
        tag = _tag(number, taker, microbatch, what)
        self._sending.append(self._mailbox.send(peer, value.detach().contiguous(), tag))

    def _receive(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        self._await(self._mailbox.receive(peer, tensor, tag))

    def _await(self, receiving: ReceiveTransfer) -> None:
        start = time.perf_counter()
        receiving.wait()
        waited = time.perf_counter() - start
        if waited > _NOTABLE:
            self._recorder.add(Wait(self._rank, start, waited, self._ranks[receiving.peer]))

    def _reap(self) -> None:
        """Forget what has been received."""
        self._sending = [sending for sending in self._sending if not sending.done]
        for sending in self._sending:
            if sending.error is not None:
                raise sending.error


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Random numbers of its own; torch.manual_seed would take milliseconds, for devices that are not there."""
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def _tag(number: int, taker: int, microbatch: int, what: int) -> int:
    return ((number * 1024 + taker) * _MICROBATCHES + microbatch) * 4 + what


def laid_out(value: torch.Tensor) -> list[int]:
    """A tensor's dimensions as they lie in memory: what can be viewed in another shape must be so elsewhere, too."""
    strides = value.stride()
    return sorted(range(value.dim()), key=lambda dim: -strides[dim])


def lifted(value: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """The tensor whose dimensions, in this order, are those of the value."""
    return value.permute([order.index(dim) for dim in range(value.dim())])


def _label(value: Any) -> TensorLabel:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return TensorLabel(dtype, list(value.shape), value.requires_grad, None, laid_out(value))
    return TensorLabel("", [], False, value)
