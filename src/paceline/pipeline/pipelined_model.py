"""A model whose calls run through a pipeline: it replaces the `forward` of the script's model.

`model(x)` returns deferred tensors; `loss.backward()` runs the schedule. The model is traced and cut at its first
training call, which is the first that shows its inputs.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from paceline.cluster.compiler import IgnoredCompiler, keep_out_of_graphs
from paceline.errors import UsageError
from paceline.graph.batch_dim import batch_size
from paceline.graph.key_value_caches import returns_cache
from paceline.graph.trace import ModelTrace
from paceline.parameters.transforms import refuse_transforms
from paceline.pipeline.batch_run import BatchRun
from paceline.pipeline.build import build_runtime, share_random_state, why_undivided
from paceline.pipeline.context import PipelineContext
from paceline.pipeline.deferred import Deferred
from paceline.pipeline.microbatch_loss import microbatch_sizes
from paceline.pipeline.microbatches import ModelCall
from paceline.pipeline.runtime import PipelineRuntime

NO_VALUES = (
    "a model that was made on the meta device gets its values when it is cut, at the first training call; do this "
    "after it, and to begin from a checkpoint give setup init=path"
)


class _PipelinedForward:
    """The model's `forward` while it is split; that of a copy of the model refuses to be called."""

    def __init__(self, forward: Callable[..., Any], signature: inspect.Signature) -> None:
        self._forward = forward
        self.__signature__ = signature  # frameworks look there for the names of its arguments

    @keep_out_of_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, _: dict[int, Any]) -> _PipelinedForward:
        def refuse(*_args: Any, **_kwargs: Any) -> Any:
            raise UsageError(
                "this is a copy of a model that is split over workers, which cannot be called; make a plain model and "
                "load its state_dict"
            )

        return _PipelinedForward(refuse, self.__signature__)


class PipelinedModel:
    """One worker's side of a split model."""

    def __init__(
        self,
        model: torch.nn.Module,
        context: PipelineContext,
        share: Callable[[], object],
        built: Callable[[PipelineRuntime], object] = lambda _: None,
    ) -> None:
        """share: moves the model's tensors into shared memory, before it is traced; built: called with the runtime."""
        self._model, self._context = model, context
        self._share, self._built = share, built
        self.runtime: PipelineRuntime | None = None
        """Exists from the first training call on."""
        self.samples = 0
        """Samples of the batch that the script was given; 0 if that is not known."""
        self.without_values = False
        """True if the model gets its values at the first training call only."""
        self._calls = self._seed = 0
        self._notices: set[str] = set()
        self._compiler = IgnoredCompiler(model, context.say)
        self._plain_forward: Any = vars(model).get("forward")
        self._forward = _PipelinedForward(self._call, inspect.signature(model.forward))
        model.forward = self._forward

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self._compiler.renew()
        training = torch.is_grad_enabled()
        if self.runtime is None and not training:
            if self.without_values:
                raise UsageError(NO_VALUES)
            with self._plain():
                return self._model(*args, **kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        refuse_transforms(self._model, leaves)
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            raise UsageError("an input of the model requires a gradient, which a pipeline does not compute; detach it")
        if training:
            self._check_rows(leaves)
        self._context.calls.begin(leaves, evaluates=not (training and self._model.training))
        self._context.before_call(args, kwargs)
        runtime = self.runtime = self.runtime or self._build(args, kwargs)
        kind = runtime.key(args, kwargs)
        trace = runtime.trace(kind, args, kwargs)
        inputs = trace.flat_inputs(args, kwargs)
        batch = batch_size(inputs)
        sizes = self._microbatch_sizes(trace, batch, first=not self._calls and training)
        call = ModelCall(inputs, batch, sizes, kind, self._calls, self._seed, self._context.version())
        self._calls += 1
        run = BatchRun(runtime, call, training)
        if not training:
            return trace.returned(run.outputs(), inputs)
        shapes = runtime.output_shapes(kind, args, kwargs, batch)
        return trace.returned([Deferred.result(run, meta, index) for index, meta in enumerate(shapes)], inputs)

    def _check_rows(self, inputs: list[Any]) -> None:
        """Refuses to divide inputs whose samples are not in the first dimension."""
        shapes = (one.shape for one in inputs if isinstance(one, torch.Tensor) and one.dim())
        shape, samples = next(shapes, None), self.samples
        if self._context.spec.microbatches > 1 and shape and samples and shape[0] % samples and samples in shape[1:]:
            raise UsageError(
                f"the model is called with a tensor of {shape[0]} rows, but the batch has {samples} samples, and "
                "microbatches are rows; let samples be the first dimension, or write microbatches=1"
            )

    def _microbatch_sizes(self, trace: ModelTrace, batch: int, first: bool) -> tuple[int, ...]:
        """Samples of each microbatch."""
        count = self._context.spec.microbatches
        why = why_undivided(self._model, trace, self._context) if batch > 1 else ""
        if why:
            if why not in self._notices:
                self._notices.add(why)
                self._context.say(why)
            count = 1
        if first and batch < count:
            raise UsageError(
                f"a batch of {batch} samples cannot be cut into {count} microbatches; give the loader a larger "
                f"batch_size, or write microbatches={batch}"
            )
        return microbatch_sizes(batch, count)

    def _build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PipelineRuntime:
        self._seed = share_random_state(self._context.members)
        with self._plain():
            if returns_cache(self._model) and not kwargs.get("use_cache"):
                self._context.say(
                    "the split model returns no key-value cache (use_cache=False): only generation needs one"
                )
        self._share()
        runtime = build_runtime(self._model, self._context, self._traceable, self._plain, args, kwargs)
        self._built(runtime)
        return runtime

    @contextlib.contextmanager
    def _plain(self) -> Iterator[None]:
        """Gives the model its own `forward` until the context exits."""
        self._restore_forward()
        try:
            yield
        finally:
            self._model.forward = self._forward

    @contextlib.contextmanager
    def _traceable(self) -> Iterator[None]:
        with self._plain(), self._context.traceable():
            yield

    def _restore_forward(self) -> None:
        vars(self._model).pop("forward", None)
        if self._plain_forward is not None:
            self._model.forward = self._plain_forward

    def close(self) -> None:
        """Gives the model its own `forward` back, and leaves the pipeline's group."""
        if self.runtime is not None:
            self.runtime.group.close()
            self.runtime = None
        self._compiler.undo()
        self._restore_forward()
