"""One batch in the pipeline, from the call of the model to the loss and its gradients."""

from __future__ import annotations

import torch

from paceline.errors import UsageError
from paceline.pipeline.deferred import Deferred, replay
from paceline.pipeline.loss_check import loss_on_random_outputs
from paceline.pipeline.microbatches import Microbatches, ModelCall
from paceline.pipeline.runtime import PipelineRuntime


class BatchRun:
    """Runs a batch's passes when the script asks for outputs, for a value, or for gradients."""

    def __init__(self, runtime: PipelineRuntime, call: ModelCall, training: bool) -> None:
        self._runtime, self._exchange = runtime, runtime.exchange
        self._microbatches = Microbatches(call, training)
        self.finished = False
        """True once the backward pass is done."""
        self._forwarded = False
        self._gathered = False
        """True once the root has the results of all microbatches."""

    def outputs(self) -> list[torch.Tensor]:
        """The model's results for the whole batch, on every worker; for a call without a backward pass."""
        self._runtime.enter(self._microbatches.call)
        self._runtime.forward(self._microbatches)
        self._gather_results()
        root, whole = self._exchange.is_root, self._microbatches.whole_result
        count = torch.tensor([len(self._microbatches.results[0])]) if root else None
        indices = range(int(self._exchange.broadcast(count)[0]))
        return [self._exchange.broadcast(whole(index) if root else None) for index in indices]

    def backward(self, loss: Deferred) -> None:
        """Runs the schedule, and gives `loss` its value; afterwards every parameter's owner has its gradient."""
        microbatches = self._microbatches
        if self.finished:
            raise UsageError(
                "backward was called a second time on the result of one call of a split model; add the losses and call "
                "backward once, or call the model again"
            )
        if loss.meta.numel() != 1:
            raise UsageError(f"backward needs a loss of one element; this one has the shape {tuple(loss.meta.shape)}")
        self._runtime.enter(microbatches.call)
        microbatches.microbatch_loss.check(loss)
        if len(microbatches.sizes) > 1:
            self._runtime.loss_checker.check(loss, microbatches.microbatch_loss)
        self._runtime.context.enter_backward(lambda: loss_on_random_outputs(loss, sum(microbatches.sizes)))
        microbatches.loss = loss
        try:
            self._runtime.backward(microbatches, forwarded=self._forwarded)
        finally:
            microbatches.loss = None  # it refers to this run: the cycle would keep all results until a collection
        self.finished = True
        losses = self._exchange.gather(microbatches.losses)
        total = sum(value for (value,) in losses.values()) if self._exchange.is_root else None
        loss.known = self._exchange.broadcast(total.reshape(()) if isinstance(total, torch.Tensor) else None)
        self._runtime.ownership.reduce_gradients()
        self._runtime.context.leave_backward()

    def value(self, of: Deferred) -> torch.Tensor:
        """A deferred value of the whole batch, on every worker; runs all forward passes if none has run yet."""
        self._runtime.enter(self._microbatches.call)
        if not self.finished and not self._forwarded:
            self._runtime.forward(self._microbatches)
            self._forwarded = True
        self._gather_results()
        return self._exchange.broadcast(self._compute(of, {}) if self._exchange.is_root else None)

    def _gather_results(self) -> None:
        if not self._gathered:
            self._microbatches.results = self._exchange.gather(self._microbatches.results)
            self._gathered = True

    def _compute(self, of: Deferred, computed: dict[int, torch.Tensor]) -> torch.Tensor:
        if of.known is not None:
            return of.known
        if id(of) not in computed:
            if of.function is None:
                computed[id(of)] = self._microbatches.whole_result(of.result_index)
            else:
                with torch.no_grad():
                    computed[id(of)] = replay(of, lambda leaf: self._compute(leaf, computed), lambda tensor: tensor)
        return computed[id(of)]
