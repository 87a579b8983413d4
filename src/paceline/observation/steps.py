"""The steps of a script that knows nothing of Paceline: its batches, passes and updates, by hooks of torch."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer as optimizers
from torch.utils.data import dataloader as loaders

from paceline.events import Load, Pass, Update
from paceline.events.kernel import KernelMeter
from paceline.events.recorder import Recorder
from paceline.events.spans import Span, computing
from paceline.observation.patches import Patches

_NOTABLE = 2e-5
"""Seconds that are worth an event."""
_STAGE = "torch.distributed.pipelining.stage"


class ScriptSteps:
    """Records a script's steps. A step ends with the outermost `optimizer.step()` of the thread that made this.

    Between the batch and the update a worker computes, except while it loads, or waits for an operation.
    """

    def __init__(self, recorder: Recorder, rank: int, size: int) -> None:
        self._recorder, self._rank, self._size = recorder, rank, size
        self.after_backward: Callable[[float], None] = lambda since: None
        """Called after a backward pass, with its start."""
        self._thread = threading.get_ident()
        self._version = 0
        self._patches = Patches()
        self._pipelines = False
        """True if torch's pipelines are watched."""
        self._sizes: dict[tuple[int, int], int] = {}
        """Samples by stage and microbatch."""
        self._batch = 0
        """Samples of the last batch, as far as they are not counted."""
        self._inside = 0
        """How deep we are in backward passes and stages."""
        self._optimizers: list[Any] = []
        """Those whose step is under way, the outermost first."""
        self._updating = 0.0
        self._core = 0.0
        self._kernel = KernelMeter()
        self._computed: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        """Of steps that are not recorded so far: the arguments of `computing`."""
        self._updates: list[tuple[float, float, float, int]] = []
        """Of these: start and end of the update, seconds in it that were not the update's, and its version."""
        self._reset(time.perf_counter())
        self._install()

    def _reset(self, now: float) -> None:
        """A step begins."""
        self._begin: float = now
        self._loaded = False
        self._out: list[Span] = []
        """Spans in which the worker did not compute."""
        self._backward: list[Span] = []
        self._samples = self._minibatches = self._passes = 0
        self._core = time.process_time()
        self._kernel.begin()

    def _install(self) -> None:
        self._patches.put(loaders._BaseDataLoaderIter, "__next__", self._next)
        self._patches.put(torch.autograd, "backward", self._run_backward)
        for register, hook in (
            (optimizers.register_optimizer_step_pre_hook, self._before_update),
            (optimizers.register_optimizer_step_post_hook, self._after_update),
        ):
            self._patches.add(register(hook).remove)

    def stop(self) -> None:
        """Removes all hooks."""
        self._patches.undo()

    @property
    def _ours(self) -> bool:
        return threading.get_ident() == self._thread

    # -- while a step goes on ----------------------------------------------------------------------------------------

    def left_out(self, begin: float, end: float) -> None:
        """The worker did not compute in this time, but waited for an operation."""
        if self._ours and end - begin > _NOTABLE / 4:
            self._out.append((begin, end))

    def _next(self, original: Callable[..., Any], loader: Any) -> Any:
        if not self._ours:
            return original(loader)
        begin = time.perf_counter()
        try:
            batch = original(loader)
        finally:
            end = time.perf_counter()
            if end - begin > _NOTABLE:
                self._recorder.add(Load(self._rank, begin, end - begin))
            if self._loaded:
                self._out.append((begin, end))
            self._begin, self._loaded = self._begin if self._loaded else end, True
        self._batch = _samples(batch)
        return batch

    def _run_backward(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if not self._ours or self._inside:
            return original(*arguments, **options)
        begin = time.perf_counter()
        self._inside += 1
        try:
            return original(*arguments, **options)
        finally:
            self._inside -= 1
            self.after_backward(begin)
            self._backward.append((begin, time.perf_counter()))
            self._minibatches += 1
            self._samples += self._batch
            self._batch = 0

    # -- its end -----------------------------------------------------------------------------------------------------

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        if not self._ours:
            return
        if any(optimizer is one for one in self._optimizers):
            self._optimizers.clear()  # an earlier step of it has failed
        self._optimizers.append(optimizer)
        if len(self._optimizers) > 1:
            return
        self._updating = time.perf_counter()
        if self._minibatches or self._passes:
            self._version += 1
        if not self._passes:
            self._keep_computing(self._updating)
        self._out = []

    def _after_update(self, *_: Any) -> None:
        if not self._ours or not self._optimizers:
            return
        self._optimizers.pop()
        if self._optimizers:
            return
        now = time.perf_counter()
        self._updates.append((self._updating, now, sum(end - begin for begin, end in self._out), self._version))
        self._reset(now)
        self._recorder.poll(now)

    def _keep_computing(self, end: float) -> None:
        """The time since the batch came, in pieces between waits."""
        core, kernel = time.process_time() - self._core, self._kernel.counts()
        told = {"version": max(0, self._version - 1), "core": core, "kernel": kernel}
        told |= {"minibatches": self._minibatches, "samples": self._samples}
        self._computed.append(((self._rank, (self._begin, end), self._out, self._backward), told))

    def record(self) -> None:
        """Records the steps so far. Events are made many at a time, which costs a third of making each in its step."""
        computed, self._computed = self._computed, []
        for arguments, told in computed:
            for piece in computing(*arguments, **told):
                self._recorder.add(piece)
        updates, self._updates = self._updates, []
        for begin, end, out, version in updates:
            seconds = max(0.0, end - begin - out)
            self._recorder.add(Update(self._rank, begin, seconds, version, workers=self._size, skipped=False))

    # -- torch's pipelines -------------------------------------------------------------------------------------------

    def watch_pipelines(self) -> None:
        """Records the passes of torch's pipeline stages, once the script has imported them."""
        stages = sys.modules.get(_STAGE)
        if stages is None or self._pipelines:
            return
        self._pipelines = True
        for name, kind in (
            ("forward_one_chunk", "F"),
            ("backward_one_chunk", "B"),
            ("backward_weight_one_chunk", "W"),
        ):
            self._patches.put(stages._PipelineStageBase, name, self._passing(kind))

    def _passing(self, kind: str) -> Callable[..., Any]:
        def run(original: Callable[..., Any], stage: Any, microbatch: int, *arguments: Any, **options: Any) -> Any:
            if not self._ours:
                return original(stage, microbatch, *arguments, **options)
            waits = len(self._out)
            begin = time.perf_counter()
            self._inside += 1
            try:
                result = original(stage, microbatch, *arguments, **options)
            finally:
                self._inside -= 1
            seconds = time.perf_counter() - begin - sum(b - a for a, b in self._out[waits:])
            index, chunk = stage.stage_index, stage.stage_index // max(1, stage.group_size)
            if kind == "F":
                self._sizes[index, microbatch] = _samples(result)
            size = self._sizes.get((index, microbatch), 0)
            self._recorder.add(Pass(self._rank, begin, seconds, kind, index, chunk, microbatch, size, self._version))
            self._passes += 1
            return result

        return run


def _samples(batch: Any) -> int:
    """Samples of a batch: the length of its first tensor."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 1
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return next((count for value in values if (count := _samples(value))), 0)
