"""Contestants of `paceline bench train`, each with a function that makes one step."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from paceline.bench.tasks import TrainTask
from paceline.bench.workloads import Workload
from paceline.team import Team

Step = Callable[[], None]
_BATCHES = 64
"""Of every worker in an epoch, with a loader."""

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def one_batch(work: Workload, task: TrainTask, rank: int) -> Iterator[Any]:
    """The same batch for ever."""
    return itertools.repeat(work.batch_of(task.batch, rank))


def epochs(loader: DataLoader[Any], begin: Callable[[int], object] = lambda _number: None) -> Iterator[Any]:
    """The batches of a loader, epoch after epoch; begin: called with the number of each."""
    for number in itertools.count():
        begin(number)
        yield from loader


def plain_batches(work: Workload, task: TrainTask, team: Team) -> Iterator[Any]:
    """The batches of a worker of plain torch."""
    if not task.loader:
        return one_batch(work, task, team.rank)
    dataset = samples(work, task, team)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, team.world_size, team.rank)
    return epochs(DataLoader(dataset, task.batch, sampler=sampler), sampler.set_epoch)


def samples(work: Workload, task: TrainTask, team: Team) -> TensorDataset:
    """A data set of whole batches."""
    return TensorDataset(*work.batch_of(task.batch * team.world_size * _BATCHES, 0))


def plain_step(work: Workload, model: nn.Module, optimizer: Optimizer, batches: Iterator[Any], precision: str) -> Step:
    """The body of a plain training loop."""
    dtype = PRECISIONS[precision]

    def step() -> None:
        x, y = next(batches)
        casting = torch.autocast("cpu", dtype=dtype) if dtype else contextlib.nullcontext()
        with casting:
            loss = work.loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Contestant:
    """One way to train a workload."""

    name = ""
    keeps_memory = True
    """True if freed memory is kept, as by Paceline's workers; plain processes return it."""
    lead_only = False
    """True if only the lead trains, while the others wait."""
    step: Step


class Alone(Contestant):
    """Each worker trains its own model in plain torch, without communication."""

    name = "alone"
    keeps_memory = False

    def __init__(self, work: Workload, task: TrainTask, team: Team) -> None:
        torch.manual_seed(0)
        model = work.build()
        tuned = OPTIMIZERS[task.optimizer](model.parameters())
        self.step = plain_step(work, model, tuned, plain_batches(work, task, team), task.precision)


class AloneKeeping(Alone):
    """As `Alone`, with the same memory allocation as Paceline's workers."""

    name = "alone-keeping"
    keeps_memory = True


class Single(Alone):
    """One process in plain torch, with the machine to itself."""

    name = "single"
    lead_only = True


class Ddp(Contestant):
    """torch's DistributedDataParallel on gloo, with Paceline's way of allocating memory, which makes it faster."""

    name = "ddp"

    def __init__(self, work: Workload, task: TrainTask, team: Team) -> None:
        if not torch.distributed.is_initialized():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            torch.distributed.init_process_group("gloo")
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(work.build())
        tuned = OPTIMIZERS[task.optimizer](model.parameters())
        self.step = plain_step(work, model, tuned, plain_batches(work, task, team), task.precision)


def end_process_group() -> None:
    """Ends DDP's process group, whose threads must not outlive the interpreter; the contestant is not used again."""
    if torch.distributed.is_initialized():
        gc.collect()  # DDP's model refers to itself, and holds the group
        torch.distributed.destroy_process_group()


class Paceline(Contestant):
    """The team, under the strategy that it was started with."""

    name = "paceline"

    def __init__(self, work: Workload, task: TrainTask, team: Team) -> None:
        torch.manual_seed(0)
        model = work.build()
        tuned = OPTIMIZERS[task.optimizer](model.parameters())
        if task.loader:
            dataset = samples(work, task, team)
            loader = DataLoader(dataset, task.batch * team.world_size, shuffle=True)
            model, tuned, loader = team.setup(model, tuned, loader)
            batches = epochs(loader)
        else:
            model, tuned = team.setup(model, tuned)
            batches = one_batch(work, task, team.rank)
        body = plain_step(work, model, tuned, batches, task.precision)

        def step() -> None:
            with team.step():
                body()

        self.step = step


CONTESTANTS: dict[str, Any] = {kind.name: kind for kind in (Paceline, Ddp, Alone, AloneKeeping, Single)}
