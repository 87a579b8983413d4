"""Contestants of `paceline bench train`, each with a function that makes one step."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.bench.workloads import Workload
from paceline.team import Team

Step = Callable[[], None]

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def plain_step(
    work: Workload,
    model: nn.Module,
    optimizer: Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
    precision: str,
) -> Step:
    """The body of a plain training loop."""
    dtype = PRECISIONS[precision]
    x, y = batch

    def step() -> None:
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

    def __init__(self, work: Workload, batch: int, optimizer: str, precision: str, team: Team) -> None:
        torch.manual_seed(0)
        model = work.build()
        tuned = OPTIMIZERS[optimizer](model.parameters())
        self.step = plain_step(work, model, tuned, work.batch_of(batch, team.rank), precision)


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

    def __init__(self, work: Workload, batch: int, optimizer: str, precision: str, team: Team) -> None:
        if not torch.distributed.is_initialized():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            torch.distributed.init_process_group("gloo")
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(work.build())
        tuned = OPTIMIZERS[optimizer](model.parameters())
        self.step = plain_step(work, model, tuned, work.batch_of(batch, team.rank), precision)


def end_process_group() -> None:
    """Ends DDP's process group, whose threads must not outlive the interpreter; the contestant is not used again."""
    if torch.distributed.is_initialized():
        gc.collect()  # DDP's model refers to itself, and holds the group
        torch.distributed.destroy_process_group()


class Paceline(Contestant):
    """The team, under the strategy that it was started with."""

    name = "paceline"

    def __init__(self, work: Workload, batch: int, optimizer: str, precision: str, team: Team) -> None:
        torch.manual_seed(0)
        model = work.build()
        model, tuned = team.setup(model, OPTIMIZERS[optimizer](model.parameters()))
        body = plain_step(work, model, tuned, work.batch_of(batch, team.rank), precision)

        def step() -> None:
            with team.step():
                body()

        self.step = step


CONTESTANTS: dict[str, Any] = {kind.name: kind for kind in (Paceline, Ddp, Alone, AloneKeeping, Single)}
