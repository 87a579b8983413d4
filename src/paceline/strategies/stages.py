"""The pipeline inside a replica of a mesh: it makes gradients; what becomes of them is the mesh's business."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer

from paceline.cluster.membership import Members
from paceline.config import Mesh, Pipeline
from paceline.events import Wait
from paceline.strategies.base import Surroundings
from paceline.strategies.pipeline import PipelineTrainer, _Split
from paceline.strategies.stopwatch import Stopwatch
from paceline.transport import Intent


class _Home:
    """Parameters are the mesh's; buffers are where all workers of the replica can read them."""

    def __init__(self, members: Members, model: torch.nn.Module) -> None:
        self.parameters = list(model.parameters())
        buffers = [buffer for buffer in dict.fromkeys(model.buffers()) if buffer.numel()]
        sizes = [-(-buffer.nbytes // 64) * 64 for buffer in buffers]
        memory = members.share(max(1, sum(sizes)))
        views, offset = [], 0
        for buffer, size in zip(buffers, sizes, strict=True):
            views.append(memory.tensor(offset, buffer.numel(), buffer.dtype).view(buffer.shape))
            offset += size
        if members.rank == 0:
            for buffer, view in zip(buffers, views, strict=True):
                view.copy_(buffer)
        members.meeting.meet(Intent.ALLOCATE)
        for buffer, view in zip(buffers, views, strict=True):
            buffer.data = view

    def keep(self, own: Iterable[torch.nn.Parameter]) -> None:
        """Who updates which is the mesh's to say."""


class _Events:
    """A recorder to which workers are known by their places in the replica."""

    def __init__(self, around: Surroundings, first: int) -> None:
        self._add, self._first = around.recorder.add, first

    def add(self, event: Any) -> None:
        on = {"on": event.on + self._first} if isinstance(event, Wait) else {}
        self._add(msgspec.structs.replace(event, rank=event.rank + self._first, **on))


class StageWatch:
    """As a stopwatch, where passes tell what a worker computes."""

    turned = True
    """A gradient that lies in `.grad` counts for what is under way."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._samples = 0
        for name in ("ask", "away", "restart", "free", "slow_link", "slow_pass", "turn", "turn_back"):
            setattr(self, name, getattr(stopwatch, name))

    def start(self, samples: int) -> None:
        self._stopwatch.start(samples)
        self._stopwatch.drop()
        self._samples += samples

    def pass_over(self, samples: int, _minibatches: int) -> None:
        self._samples -= samples

    def stop(self, version: int, *, again: bool = False) -> tuple[float, int]:
        samples, self._samples = self._samples, 0
        return 0.0, samples


class Stages(PipelineTrainer):
    """One worker's stages, in one of several replicas."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        around: Surroundings,
        replica: Members,
        first: int,
        version: Callable[[], int],
    ) -> None:
        """replica: its workers by their places, the first of whom has this rank."""
        mesh = around.strategy
        assert isinstance(mesh, Mesh)
        self._spec = spec = Pipeline(
            stages=mesh.pipeline,
            microbatches=mesh.microbatches,
            schedule=mesh.schedule,
            chunks=mesh.chunks,
            norm=mesh.norm,
        )
        events: Any = _Events(around, first)
        slow = {rank - first: value for rank, value in around.launch.slow.items() if rank >= first}
        launch = msgspec.structs.replace(around.launch, slow=slow)
        self._around = dataclasses.replace(around, members=replica, recorder=events, launch=launch)
        self._members, self._rank, self._size = replica, replica.rank, replica.size
        self._recorder, self._stopwatch = events, around.stopwatch
        self._model, self._optimizer = model, optimizer
        self._parts = spec.stages * (spec.chunks if spec.schedule == "interleaved" else 1)
        self._version = version
        self._steps = self._calls = self._samples = self._seed = 0
        self._line = None
        self._said = set()
        self._plain_forward = model.forward
        self._had_forward = "forward" in vars(model)
        self._split = _Split(self._forward)
        model.forward = self._split

    @property
    def version(self) -> int:
        return self._version()

    @version.setter
    def version(self, _value: int) -> None:
        raise AssertionError("versions are the mesh's")

    def _home(self) -> Any:
        return _Home(self._members, self._model)

    def close(self) -> None:
        if self._line is not None:
            self._line.group.close()
            self._line = None
        vars(self._model).pop("forward", None)
        if self._had_forward:
            self._model.forward = self._plain_forward
        for buffer in self._model.buffers():
            buffer.data = buffer.data.clone()
