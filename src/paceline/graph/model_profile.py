"""What is known of a model that is to be cut: its operations, what each costs, and where it may be cut."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from paceline.config import Launch, Profiling
from paceline.errors import UsageError
from paceline.graph.batch_dim import batch_of, has_rows
from paceline.graph.costs import Cost, measure
from paceline.graph.partition import Problem
from paceline.graph.sample_dependence import mixes
from paceline.graph.trace import ModelTrace, trace

_PATIENCE = 600.0
"""Seconds within which a script must have called its model."""


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True):
    names: list[str]
    shown: list[str]
    """What each operation is."""
    inputs: list[list[int]]
    costs: list[Cost]
    cuts: list[int]
    """In front of which operations the model may be cut."""
    crossing: list[list[int]]
    """In front of each operation, the values that would go over a cut there."""
    batch: int
    microbatch: int
    """Samples that the costs are of."""
    mixes: bool = False
    """Whether samples have something to do with each other, so that a batch is not cut."""

    def problem(self, stages: int = 1) -> Problem:
        """Not cut where something is in parts, which would be made whole for it, if it can be cut elsewhere."""
        whole = [cut for cut in self.cuts if all(self.costs[value].whole for value in self.crossing[cut])]
        return Problem(self.costs, whole if len(whole) >= stages - 1 else self.cuts, self.crossing)


def undivided(model: nn.Module, traced: ModelTrace, norm: str) -> str:
    """Why the batches of a model are not cut into microbatches; empty if they are."""
    if traced.counts:
        return (
            "the model computes with the number of samples itself, so a batch is not cut into microbatches; let it "
            "take sizes from its input's shape only"
        )
    if traced.summarises:
        return (
            "the model returns something of the whole batch, such as its loss, so it is not cut into microbatches; "
            "let it return a row for every sample, and make the loss of that"
        )
    if norm == "batch" and _has_statistics(model):
        return (
            "batch norm layers take their statistics of the whole batch, so it is not cut into microbatches; "
            "norm=microbatch lets each microbatch have its own"
        )
    if norm == "batch" and traced.remembers:
        return (
            "the model changes its buffers with every call, so a batch is not cut into microbatches; norm=microbatch "
            "lets each microbatch change them"
        )
    if norm == "batch" and traced.mixes:
        return (
            "what the model returns for a sample depends on the others of its batch, so this is not cut into "
            "microbatches; norm=microbatch lets each microbatch be by itself"
        )
    return ""


def _has_statistics(model: nn.Module) -> bool:
    """Whether it has layers that take something of the whole batch."""
    return any(
        module.training
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        or (isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats)
    )


def model_profile(
    traced: ModelTrace, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], microbatches: int, norm: str
) -> ModelProfile:
    """Measure a traced model, with as many samples as a microbatch has."""
    inputs = traced.flat_inputs(args, kwargs)
    batch = batch_of(inputs)
    few = max(1, batch // microbatches)
    some = [one[:few] if has_rows(one, batch) else one for one in inputs]
    if few < batch and norm == "batch" and not undivided(model, traced, norm):
        traced.mixes = mixes(traced, model, inputs, batch, few)
    if undivided(model, traced, norm):
        few, some = batch, inputs
    return ModelProfile(
        names=[operation.name for operation in traced.operations],
        shown=[operation.shown for operation in traced.operations],
        inputs=[list(operation.inputs) for operation in traced.operations],
        costs=measure(traced, model, some),
        cuts=traced.cuts(),
        crossing=traced.crossing(),
        batch=batch,
        microbatch=few,
        mixes=traced.mixes,
    )


def profiled(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], microbatches: int, norm: str, parts: int = 2
) -> ModelProfile:
    return model_profile(trace(model, args, kwargs, parts), model, args, kwargs, microbatches, norm)


def model_profile_of(script: Path, arguments: Sequence[str], microbatches: int, norm: str = "batch") -> ModelProfile:
    """Run a script, in a process of its own, until its model is first called to be trained."""
    if not script.is_file():
        raise UsageError(f"there is no script at {script}")
    with tempfile.TemporaryDirectory(prefix="paceline-partition-") as folder:
        path = Path(folder) / "sheet.json"
        launch = Launch(record=False, profiling=Profiling(path=str(path), microbatches=microbatches, norm=norm))
        try:
            done = subprocess.run(
                [sys.executable, str(script), *arguments],
                # With one thread, as every worker of a run has it.
                env={"OMP_NUM_THREADS": "1", **os.environ, **launch.to_environment()},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_PATIENCE,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UsageError(f"the script did not call its model within {_PATIENCE:g} s") from None
        if not path.exists():
            told = done.stderr.decode(errors="replace").strip().splitlines()
            why = told[-1] if told else "it ended without a word"
            raise UsageError(f"the script did not get as far as to call its model after team.setup: {why}")
        answer = path.read_bytes()
    known = msgspec.json.decode(answer)
    if "error" in known:
        raise UsageError(known["error"])
    return msgspec.json.decode(answer, type=ModelProfile)
