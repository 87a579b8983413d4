"""Configuration of one worker of a pipeline."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import torch

from paceline.cluster.membership import Members
from paceline.config import Pipeline
from paceline.events.recorder import Recorder

Traceable = Callable[[], contextlib.AbstractContextManager[None]]
"""Puts the model into a traceable state until the context exits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineContext:
    """The pipeline that a worker is part of, and what its trainer provides."""

    spec: Pipeline
    members: Members
    """All workers of the replica."""
    ranks: Sequence[int]
    """Ranks among the members of this pipeline's workers, by pipeline rank."""
    team_ranks: Sequence[int]
    """Their ranks in the team."""
    recorder: Recorder
    say: Callable[[str], None]
    """Prints a notice for the user."""
    slow_pass: Callable[[float], None]
    """Called with the seconds of every pass; delays it if this worker is made slow on purpose."""
    speeds: Sequence[float]
    """Relative speed of each of the pipeline's workers; 1 unless it is made slow on purpose."""
    version: Callable[[], int]
    """Version of the parameters."""
    before_call: Callable[[], object] = lambda: None
    """Called before each call of the model, once it is split."""
    enter_backward: Callable[[Callable[[], torch.Tensor]], object] = lambda _: None
    """Called before a backward pass, with a function that computes the loss on random outputs of the model."""
    leave_backward: Callable[[], object] = lambda: None
    """Called after a backward pass."""
    traceable: Traceable = contextlib.nullcontext
    in_step: bool = False
    """True if other workers run the same passes on shards of the same layers, so that no pass may be run early."""
    counts_samples: bool = True
    """True on the one worker of each stage whose passes count the stage's samples."""

    @property
    def rank(self) -> int:
        """This worker's pipeline rank."""
        return self.ranks.index(self.members.rank)
