"""One replica of fault tolerant DDP by torchft, as in its own example: Manager, DDP over gloo, a sampler per replica.

Arguments: folder, number of the replica, address of the lighthouse. A killed replica is started again by its starter,
and gets model and optimizer from a living one. Its place in its data is written after every step, as torchft advises.

When a peer dies within an all-reduce, the DDP of torchft 0.2.0 asserts that there is a result and ends the survivor,
too, so that all state is lost: `Enduring` passes the bucket on instead, as the manager has noted the error by then.
"""

import itertools
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from soak_task import BATCH, DECAY, RATE, SAMPLES, WORKERS, Log, data, loss_of, model
from torch.distributed import GradBucket, TCPStore  # type: ignore[attr-defined]
from torchft import (  # type: ignore[import-not-found]
    DistributedDataParallel,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)


class Enduring(DistributedDataParallel):
    """Leaves it to the manager whether a step counts in which an all-reduce has failed."""

    @staticmethod
    def _comm_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = state.allreduce(bucket.buffer())
        work.wait()
        result = getattr(work.get_future(), "_fut", None)
        if result is None:
            result = torch.futures.Future()
            result.set_result(bucket.buffer())
        return result


def main() -> None:
    folder, replica, lighthouse = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    trained = model()
    inner = torch.optim.SGD(trained.parameters(), lr=RATE, weight_decay=DECAY)

    def load(state: dict[str, Any]) -> None:
        trained.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": trained.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"soak_{replica}",
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
    )
    parallel, optimizer = Enduring(manager, trained), Optimizer(manager, inner)
    inputs, classes = data()
    log, place = Log(folder, replica), folder / f"place-{replica}"
    first = int(place.read_text()) if place.exists() else 0
    batches = SAMPLES // BATCH // WORKERS
    for number in itertools.count(first):
        if log.over:
            break
        epoch, batch = divmod(number, batches)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))[replica::WORKERS]
        mine = order[batch * BATCH : (batch + 1) * BATCH]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(parallel(inputs[mine]), classes[mine]).backward()
        before, takes_part = manager.current_step(), manager.is_participating()  # one that catches up adds zeros
        optimizer.step()
        log.add(number, int(takes_part and manager.current_step() > before), manager.current_step())
        place.write_text(str(number + 1))
    (folder / f"loss-{replica}").write_text(str(loss_of(trained)))
    manager.shutdown(wait=False)


main()
