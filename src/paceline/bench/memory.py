"""The script of a worker of `paceline bench memory`: trains a few steps, then measures the memory."""

from __future__ import annotations

import gc
import itertools
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

import paceline
from paceline.bench.contestants import OPTIMIZERS, Ddp, Paceline, end_process_group, one_batch, plain_step
from paceline.bench.tasks import MemoryTask, MemoryUse, TrainTask
from paceline.bench.workloads import WORKLOADS
from paceline.cluster.process import proportional_memory, release_freed_memory, return_freed_memory


def main() -> None:
    task = msgspec.json.decode(sys.argv[1], type=MemoryTask)
    team = paceline.join()
    work = WORKLOADS[task.model]
    return_freed_memory()
    training = TrainTask(model=work.name, contestants=[], batch=work.batch, optimizer=task.optimizer)
    _warm_up(task.optimizer)
    before = _settled()
    if task.contestant == "paceline":
        contestant = Paceline(work, training, team)
        return_freed_memory()
        for _ in range(3):
            contestant.step()
        after = _settled()
        trainer: Any = team._trainer
        parameters = proportional_memory(*trainer.addresses())
    else:
        # First without DDP, whose own buffers are neither parameters nor the optimizer's state.
        model = work.build()
        optimizer = OPTIMIZERS[task.optimizer](model.parameters())
        step = plain_step(work, model, optimizer, one_batch(work, training, team.rank), "fp32")
        for _ in range(2):
            step()
        parameters = _settled() - before
        del model, optimizer, step
        before = _settled()
        ddp = Ddp(work, training, team)
        for _ in range(3):
            ddp.step()
        after = _settled()
        del ddp
    sums = team.per_replica([parameters, after - before]).values
    if team.is_lead:
        result = MemoryUse(sum(one for one, _ in sums), sum(two for _, two in sums))
        Path(task.output).write_bytes(msgspec.json.encode(result))
    team.barrier()
    end_process_group()


def _warm_up(optimizer: str) -> None:
    """Let torch load its lazy parts, so that they are not counted as the model's memory."""
    work = WORKLOADS["mlp25m"]
    model = torch.nn.Linear(1024, 1024)
    batches = itertools.repeat((torch.randn(work.batch, 1024), torch.zeros(work.batch)))
    step = plain_step(work, model, OPTIMIZERS[optimizer](model.parameters()), batches, "fp32")
    for _ in range(3):
        step()


def _settled() -> int:
    gc.collect()
    release_freed_memory()
    return proportional_memory()


if __name__ == "__main__":
    main()
