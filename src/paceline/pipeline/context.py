"""Configuration of one worker of a pipeline."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.cluster.membership import Members
from paceline.collectives.links import LinkMatrix
from paceline.collectives.machines_group import MachinesGroup
from paceline.config import Pipeline
from paceline.events.recorder import Recorder
from paceline.graph.trace import ModelTrace
from paceline.transport.call_log import CallLog

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
    calls: CallLog
    """The calls of the model by the workers of the replica."""
    before_call: Callable[[tuple[Any, ...], dict[str, Any]], object] = lambda _args, _kwargs: None
    """Called with the arguments of each call of the model, before it is run by the pipeline."""
    enter_backward: Callable[[Callable[[], torch.Tensor]], object] = lambda _: None
    """Called before a backward pass, with a function that computes the loss on random outputs of the model."""
    leave_backward: Callable[[], object] = lambda: None
    """Called after a backward pass."""
    traceable: Traceable = contextlib.nullcontext
    measurable: Callable[[ModelTrace], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext()
    """Lets the operations of a trace be run, to measure them."""
    in_step: bool = False
    """True if other workers run the same passes on shards of the same layers, so that no pass may be run early."""
    machines: MachinesGroup | None = None
    """All members on their machines, if the trainer has made this group already."""
    links: LinkMatrix | None = None
    """The links between the machines, if there are several."""
    firsts: Callable[[bytes], list[bytes]] | None = None
    """Gathers the payloads of the first workers of all replicas, if these must be cut alike; all workers call it."""
    counts_samples: bool = True
    """True on the one worker of each stage whose passes count the stage's samples."""

    @property
    def rank(self) -> int:
        """This worker's pipeline rank."""
        return self.ranks.index(self.members.rank)

    @property
    def decides(self) -> bool:
        """True on the worker that measures the model and chooses the cut."""
        return self.rank == 0 and (self.firsts is None or self.team_ranks[0] < self.members.size)

    def gather_firsts(self, payload: bytes) -> list[bytes]:
        """The payload of the replica's first worker, and of those of all replicas that are cut alike."""
        return [self.members.gather(payload)[0]] if self.firsts is None else self.firsts(payload)
