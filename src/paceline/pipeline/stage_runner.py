"""Runs one worker's stages of a pipeline, operation by operation, in the order of its schedule.

The order is the one that the simulator evaluates, with one exception: while the first stage would wait for a gradient
that is late, it runs its next forward pass. A stage sends each output directly to every stage that consumes it, the
next one or, for a skip connection, a later one, and receives a gradient from each. If workers share a stage, the
receiver is the worker that runs the microbatch there. A header with dtype and shape precedes the first value of every
kind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch

from paceline.events import Pass
from paceline.pipeline.context import PipelineContext
from paceline.pipeline.microbatches import Microbatches
from paceline.pipeline.split_backward import backward_of_inputs, separable
from paceline.pipeline.stage_links import StageLinks, TensorHeader, from_memory_order
from paceline.pipeline.stages import Stage, StageAssignment, StageGraph
from paceline.schedules import StageOperation
from paceline.tensor_parallel.partial_tensor import full_tensor
from paceline.transport.mailbox import ReceiveTransfer, SendTransfer

_backward = torch.autograd.backward
"""torch's own function; a team may replace the public one to time it."""
_HEADER, _DATA, _GRADIENT = range(3)
"""Kinds of messages."""
_MICROBATCHES = 1 << 16
Tensors = list[torch.Tensor]


@dataclasses.dataclass
class _Activations:
    """Values of one microbatch at one stage that its backward pass needs."""

    inputs: dict[int, Any]
    outputs: dict[int, Any]
    """If the stage is computed again, tensors without values in place of those that it has sent."""
    backward_of_weights: Callable[[], None] | None = None
    """Computes the gradients of the weights, if the schedule does that apart."""


class StageRunner:
    """One worker's passes over its stages."""

    def __init__(
        self,
        graph: StageGraph,
        assignment: StageAssignment,
        links: StageLinks,
        context: PipelineContext,
        recomputed: Container[int] = (),
    ) -> None:
        """recomputed: the stages whose forward passes are computed again before their backward passes."""
        self._graph, self._links, self._mailbox = graph, links, links.mailbox
        self._worker, self._recomputed = assignment.worker, recomputed
        self._slow_pass, self._in_step, self._counts = context.slow_pass, context.in_step, context.counts_samples
        self._headers: dict[Any, TensorHeader] = {}
        """By value, consumer, peer and kind of microbatch."""
        self._local: dict[tuple[int, int, int, int], Any] = {}
        """Values and gradients between two stages of this worker."""
        self._activations: dict[tuple[int, int], _Activations] = {}
        """By stage and microbatch."""
        self._separable: dict[Any, bool] = {}
        """By stage and kind of microbatch, True if its backward pass can be split."""
        self._sending: list[SendTransfer] = []
        self._expected: dict[tuple[int, int, int], list[ReceiveTransfer]] = {}
        """Gradients to be received, by stage, value and microbatch."""

    def run(self, order: Sequence[StageOperation], microbatches: Microbatches) -> None:
        """Runs these operations one after the other."""
        split = any(operation.kind == "W" for operation in order)
        left = deque(order)
        while left:
            operation = left.popleft()
            if left and not self._in_step and self._runs_early(left[0], operation):
                operation, left[0] = left[0], operation
            stage = self._graph.stages[operation.chunk]
            if operation.kind == "F":
                self._forward(stage, operation.microbatch, microbatches)
            elif operation.kind == "B":
                self._backward(stage, operation.microbatch, microbatches, split)
            else:
                self._backward_of_weights(stage, operation.microbatch, microbatches)
            if self._mailbox.unsent:
                # The next operation may wait for a worker other than the receivers.
                self._mailbox.attend()
        self._check_sent()

    def _runs_early(self, following: StageOperation, operation: StageOperation) -> bool:
        """True if the next forward pass should run before a backward pass whose gradient has not arrived.

        So a stage that is late now and then does not delay the others. Only the first stage has the inputs of a forward
        pass at any time. It is never more than one pass ahead, which bounds the activations that it keeps.
        """
        if (operation.kind, following.kind) != ("B", "F") or self._graph.stages[following.chunk].index:
            return False
        stage = self._graph.stages[operation.chunk]
        for number, value in self._activations[stage.index, operation.microbatch].outputs.items():
            if isinstance(value, torch.Tensor) and value.requires_grad:
                for expected in self._expect(stage, number, value, operation.microbatch):
                    expected.look()
                    if not expected.done:
                        return True
        return False

    # -- the operations ----------------------------------------------------------------------------------------------

    def _forward(self, stage: Stage, microbatch: int, microbatches: Microbatches) -> None:
        inputs = {number: self._input(stage, number, microbatch, microbatches) for number in stage.inputs}
        start = time.perf_counter()
        outputs = self._compute(stage, inputs, microbatch, microbatches)
        if stage.index == self._graph.last:
            microbatches.results[microbatch] = [result.detach() for result in self._results(inputs, outputs)]
        self._record("F", stage, microbatch, microbatches, start)
        if microbatches.training:
            kept = outputs
            if stage.index in self._recomputed:
                kept = {number: _without_values(value) for number, value in outputs.items()}
            self._activations[stage.index, microbatch] = _Activations(inputs, kept)
        for number, value in outputs.items():
            for consumer in self._graph.consumers.get(number, ()):
                self._send_output(consumer, number, value, microbatch, microbatches)

    def _compute(
        self, stage: Stage, inputs: dict[int, Any], microbatch: int, microbatches: Microbatches
    ) -> dict[int, Any]:
        """A stage's outputs; its random numbers depend on the microbatch only."""
        seeded = _seeded(microbatches.seed(microbatch)) if stage.part.random else contextlib.nullcontext()
        with microbatches.autocast.enter(), torch.set_grad_enabled(microbatches.training), seeded:
            values = [full_tensor(value) for value in stage.part.run([inputs[number] for number in stage.part.inputs])]
        return dict(zip(stage.part.outputs, values, strict=True))

    def _backward(self, stage: Stage, microbatch: int, microbatches: Microbatches, split: bool) -> None:
        """split: True if the gradients of weights are computed by an operation of their own."""
        activations = self._activations[stage.index, microbatch]
        received: dict[int, torch.Tensor] = {}
        for number, value in activations.outputs.items():
            if not (isinstance(value, torch.Tensor) and value.requires_grad):
                continue
            gradient = self._output_gradient(stage, number, value, microbatch)
            if gradient is not None:
                received[number] = gradient
        start = time.perf_counter()
        if stage.index in self._recomputed:
            activations.outputs = self._compute(stage, activations.inputs, microbatch, microbatches)
        outputs, gradients = [activations.outputs[number] for number in received], list(received.values())
        if stage.index == self._graph.last:
            loss = microbatches.loss_of(self._results(activations.inputs, activations.outputs), microbatch)
            if loss.requires_grad:
                outputs, gradients = [loss], [torch.ones_like(loss)]
        inputs = {
            number: value
            for number, value in activations.inputs.items()
            if number >= 0 and isinstance(value, torch.Tensor) and value.requires_grad
        }
        if not split:
            if outputs:
                _backward(outputs, gradients)
            del self._activations[stage.index, microbatch]
        elif not inputs:
            # No stage waits for a gradient, so all of the pass can run later.
            activations.backward_of_weights = (lambda: _backward(outputs, gradients)) if outputs else None
        elif outputs:
            kind = (stage.index, microbatches.kind(microbatch))
            activations.backward_of_weights = self._split_backward(kind, stage, outputs, gradients, [*inputs.values()])
        activations.outputs = {}
        self._record("B", stage, microbatch, microbatches, start)
        for number, value in inputs.items():
            gradient = value.grad if value.grad is not None else torch.zeros_like(value)
            self._send(self._graph.producers[number], stage.index, number, microbatch, _GRADIENT, gradient)

    def _split_backward(
        self, kind: Any, stage: Stage, outputs: Tensors, gradients: Tensors, inputs: Tensors
    ) -> Callable[[], None] | None:
        """Computes the gradients of the inputs; returns the computation of those of the weights, if it is left."""
        if kind not in self._separable:
            self._separable[kind] = separable(outputs, inputs)
        if self._separable[kind]:
            weights = [parameter for parameter in stage.part.parameters if parameter.requires_grad]
            return backward_of_inputs(outputs, gradients, inputs, weights)
        _backward(outputs, gradients)
        return None

    def _backward_of_weights(self, stage: Stage, microbatch: int, microbatches: Microbatches) -> None:
        start = time.perf_counter()
        activations = self._activations.pop((stage.index, microbatch))
        if activations.backward_of_weights is not None:
            activations.backward_of_weights()
        self._record("W", stage, microbatch, microbatches, start)

    def _results(self, inputs: dict[int, Any], outputs: dict[int, Any]) -> list[torch.Tensor]:
        values = {**inputs, **outputs}
        return [values[number] for number in self._graph.results]

    def _record(self, kind: str, stage: Stage, microbatch: int, microbatches: Microbatches, start: float) -> None:
        self._slow_pass(time.perf_counter() - start)
        seconds = time.perf_counter() - start
        size = microbatches.sizes[microbatch] if self._counts else 0
        chunk = self._graph.stages.index(stage)
        event = Pass(
            self._links.team_rank, start, seconds, kind, stage.index, chunk, microbatch, size, microbatches.version
        )
        self._links.recorder.add(event)

    # -- values from stage to stage ----------------------------------------------------------------------------------

    def _input(self, stage: Stage, number: int, microbatch: int, microbatches: Microbatches) -> Any:
        if number < 0:
            return microbatches.input(-1 - number, microbatch)
        peer = self._worker(self._graph.producers[number], microbatch)
        if peer == self._mailbox.rank:
            value = self._local.pop((number, stage.index, microbatch, _DATA))
            if isinstance(value, torch.Tensor):
                value = value.detach().requires_grad_(value.requires_grad and microbatches.training)
            return value
        key = (number, stage.index, peer, microbatches.kind(microbatch))
        if key not in self._headers:
            self._headers[key] = self._links.receive_header(peer, _tag(number, stage.index, microbatch, _HEADER))
        header = self._headers[key]
        if header.number is not None:
            return header.number
        packed = header.empty()
        self._links.receive(peer, packed, _tag(number, stage.index, microbatch, _DATA))
        value = from_memory_order(packed, header.order)
        return value.requires_grad_(header.requires_grad and microbatches.training)

    def _send_output(self, consumer: int, number: int, value: Any, microbatch: int, microbatches: Microbatches) -> None:
        peer = self._worker(consumer, microbatch)
        if peer == self._mailbox.rank:
            self._local[number, consumer, microbatch, _DATA] = value
            return
        key = (number, consumer, peer, microbatches.kind(microbatch))
        if key not in self._headers:
            self._headers[key] = header = TensorHeader.of(value)
            tag = _tag(number, consumer, microbatch, _HEADER)
            self._sending.append(self._links.send(peer, header.encode(), tag))
        if isinstance(value, torch.Tensor):
            packed = value.detach().permute(self._headers[key].order)
            self._send(consumer, consumer, number, microbatch, _DATA, packed)

    def _output_gradient(self, stage: Stage, number: int, value: torch.Tensor, microbatch: int) -> torch.Tensor | None:
        """The sum of the gradients of an output from all its consumers."""
        total: torch.Tensor | None = None
        for consumer in self._graph.consumers.get(number, ()):
            if self._worker(consumer, microbatch) == self._mailbox.rank:
                gradient = self._local.pop((number, consumer, microbatch, _GRADIENT))
                total = gradient if total is None else total + gradient
        for expected in self._expect(stage, number, value, microbatch):
            self._links.wait(expected)
            total = expected.tensor if total is None else total + expected.tensor
        self._expected.pop((stage.index, number, microbatch), None)
        return total

    def _expect(self, stage: Stage, number: int, value: torch.Tensor, microbatch: int) -> list[ReceiveTransfer]:
        """Posts the receives of an output's gradients from other workers."""
        key = (stage.index, number, microbatch)
        if key not in self._expected:
            self._expected[key] = [
                self._links.expect(
                    peer,
                    torch.empty(value.shape, dtype=value.dtype),
                    _tag(number, consumer, microbatch, _GRADIENT),
                )
                for consumer in self._graph.consumers.get(number, ())
                if (peer := self._worker(consumer, microbatch)) != self._mailbox.rank
            ]
        return self._expected[key]

    def _send(self, to: int, consumer: int, number: int, microbatch: int, what: int, value: torch.Tensor) -> None:
        """Sends a value to stage `consumer`, or its gradient back from there."""
        peer = self._worker(to, microbatch)
        if peer == self._mailbox.rank:
            self._local[number, consumer, microbatch, _GRADIENT] = value
            return
        tag = _tag(number, consumer, microbatch, what)
        self._sending.append(self._links.send(peer, value.detach().contiguous(), tag))

    def _check_sent(self) -> None:
        """Raises the error of a transfer that failed, which is done, too, and drops those that are done."""
        for transfer in self._sending:
            if transfer.error is not None:
                raise transfer.error
        self._sending = [transfer for transfer in self._sending if not transfer.done]


def _without_values(value: Any) -> Any:
    """A tensor of the same kind without memory."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds the default generator only: torch.manual_seed takes milliseconds, for devices that do not exist."""
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def _tag(number: int, consumer: int, microbatch: int, what: int) -> int:
    return ((number * 1024 + consumer) * _MICROBATCHES + microbatch) * 4 + what
