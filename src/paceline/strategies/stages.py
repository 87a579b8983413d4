"""The pipeline inside a replica of a mesh: it makes gradients; what becomes of them is the mesh's business."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import torch

from paceline.cluster.membership import Members
from paceline.config import Mesh, Pipeline
from paceline.events import Pass, Wait
from paceline.events.stopwatch import Stopwatch
from paceline.pipeline.pipelined_model import PipelinedModel, PipelineWorkers
from paceline.strategies.base import TrainerContext
from paceline.strategies.mesh_coord import MeshCoord
from paceline.strategies.splitting import Inside
from paceline.transport import BarrierKind


class _Home:
    """Parameters are the mesh's; buffers are where all stages of the replica can read them.

    The workers of one stage change what they have whole alike, so each of them does that in memory of its own.
    """

    def __init__(self, members: Members, model: torch.nn.Module, coord: MeshCoord, elsewhere: Iterable[int]) -> None:
        """elsewhere: ids of buffers that have a place already."""
        self.parameters = list(model.parameters())
        known = set(elsewhere)
        buffers = [buffer for buffer in dict.fromkeys(model.buffers()) if buffer.numel() and id(buffer) not in known]
        sizes = [-(-buffer.nbytes // 64) * 64 for buffer in buffers]
        memory = members.share(max(1, coord.shape.tensor * sum(sizes)))
        views, offset = [], coord.part * sum(sizes)
        for buffer, size in zip(buffers, sizes, strict=True):
            views.append(memory.tensor(offset, buffer.numel(), buffer.dtype).view(buffer.shape))
            offset += size
        if coord.stage == 0:
            for buffer, view in zip(buffers, views, strict=True):
                view.copy_(buffer)
        members.barrier.wait(BarrierKind.ALLOCATE)
        for buffer, view in zip(buffers, views, strict=True):
            buffer.data = view

    def keep(self, own: Iterable[torch.nn.Parameter]) -> None:
        """Who updates which is the mesh's to say."""


class _Events:
    """A recorder to which workers are known by their places in the replica."""

    def __init__(self, context: TrainerContext, coord: MeshCoord) -> None:
        self._add, self._first, self._counts = context.recorder.add, coord.lead, not coord.part

    def add(self, event: Any) -> None:
        more = {"on": event.on + self._first} if isinstance(event, Wait) else {}
        if isinstance(event, Pass) and not self._counts:
            more = {"size": 0}  # they are the samples of all workers of a stage, so one of them counts them
        self._add(msgspec.structs.replace(event, rank=event.rank + self._first, **more))


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


class Stages:
    """One worker's stages, in one of several replicas."""

    def __init__(
        self,
        model: torch.nn.Module,
        context: TrainerContext,
        replica: Members,
        coord: MeshCoord,
        version: Callable[[], int],
        inside: Inside | None,
    ) -> None:
        """replica: its workers by their places; inside: where each stage has several, what they have parts of."""
        mesh = context.strategy
        assert isinstance(mesh, Mesh)
        spec = Pipeline(
            stages=mesh.pipeline,
            microbatches=mesh.microbatches,
            schedule=mesh.schedule,
            chunks=mesh.chunks,
            norm=mesh.norm,
        )
        each, slow = coord.shape.tensor, context.launch.slow
        speeds = [
            min(1.0 / slow[rank].factor if rank in slow else 1.0 for rank in range(first, first + each))
            for first in range(coord.lead, coord.lead + coord.shape.replica, each)
        ]
        recorder: Any = _Events(context, coord)
        cut = () if inside is None else inside.cutting.placements
        shared_state: Any = functools.partial(_Home, replica, model, coord, cut)
        self._model, self._inside = model, inside
        self._pipelined = PipelinedModel(
            model,
            spec,
            PipelineWorkers(
                members=replica,
                rank=coord.stage,
                ranks=range(coord.part, coord.shape.replica, each),
                speeds=speeds,
                recorder=recorder,
                slow_pass=context.stopwatch.slow_pass,
                say=context.say,
                version=version,
                shared_state=shared_state,
                traceable=self._traceable,
                split_stages=inside is not None,
            ),
        )

    @contextlib.contextmanager
    def _traceable(self) -> Iterator[None]:
        with contextlib.ExitStack() as context:
            if self._inside is not None:
                context.enter_context(self._inside.cutting.bare())
                context.enter_context(self._inside.sealed.closed())
            yield

    def close(self) -> None:
        self._pipelined.close()
        for buffer in self._model.buffers():
            buffer.data = buffer.data.clone()
