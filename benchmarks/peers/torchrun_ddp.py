"""Plain DDP over gloo for torchrun: writes a checkpoint every few seconds, and goes on from the newest one.

Arguments: folder, seconds between two checkpoints.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from soak_task import BATCH, DECAY, RATE, SAMPLES, WORKERS, Log, data, loss_of, model
from torch import distributed
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    folder, every = Path(sys.argv[1]), float(sys.argv[2])
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=RATE, weight_decay=DECAY)
    newest, step = folder / "checkpoint.pt", 0
    if newest.exists():
        state = torch.load(newest)
        step = state["step"]
        trained.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    parallel = DistributedDataParallel(trained)
    inputs, classes = data()
    log, saved = Log(folder, rank), time.monotonic()
    batches = SAMPLES // BATCH // WORKERS
    while True:
        epoch, batch = divmod(step, batches)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))[rank::WORKERS]
        mine = order[batch * BATCH : (batch + 1) * BATCH]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(parallel(inputs[mine]), classes[mine]).backward()
        optimizer.step()
        step += 1
        log.add(step, 1)
        if step % 20 == 0:  # all stop at the same step
            over = torch.tensor([float(log.over)])
            distributed.all_reduce(over)
            if over.item():
                break
        if rank == 0 and time.monotonic() > saved + every:
            state = {"step": step, "model": trained.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, newest.with_suffix(".part"))
            newest.with_suffix(".part").replace(newest)
            saved = time.monotonic()
    if rank == 0:
        (folder / "loss-0").write_text(str(loss_of(trained)))
    distributed.destroy_process_group()


main()
