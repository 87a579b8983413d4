"""A parameter server on torch.distributed.rpc: asynchronous workers; writes down how many minibatches they get through.

A program that needs only torch: its argument is a JSON object with `model`, `workers`, `seconds`, `rounds`
and `output`. It is the server, and starts the workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from roles import die_with_parent, start
from torch import nn
from torch.distributed import TCPStore, rpc  # type: ignore[attr-defined]

LEARNING_RATE = 0.01
WARM_UP_SECONDS = 1.0
START_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Workload:
    widths: tuple[int, ...]
    batch: int
    flat: bool
    """Whether all tensors travel as one: saves calls where they are small, costs copies where they are large."""

    def build(self) -> nn.Module:
        layers: list[nn.Module] = []
        for first, second in itertools.pairwise(self.widths):
            layers += [nn.Linear(first, second), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def pack(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat([tensor.reshape(-1) for tensor in tensors])] if self.flat else list(tensors)


WORKLOADS = {
    "small": Workload((64, 256, 10), 64, flat=True),
    "mlp25m": Workload((1024, 4096, 4096, 1024), 8, flat=False),
}


class Server:
    def __init__(self, workload: Workload) -> None:
        model = workload.build()
        self.values = workload.pack([parameter.detach() for parameter in model.parameters()])
        self.parameters = [nn.Parameter(value) for value in self.values]
        self.optimizer = torch.optim.SGD(self.parameters, lr=LEARNING_RATE)
        self.lock = threading.Lock()

    def apply(self, gradients: list[torch.Tensor]) -> None:
        with self.lock:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
            self.optimizer.step()


_server: Server | None = None  # A call finds it here: handing a reference to it along would cost messages of its own.


def push(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Called by the workers. The values are sent from where they are: copying them first would only be slower."""
    assert _server
    if gradients:
        _server.apply(gradients)
    return _server.values


class Worker:
    def __init__(self, model: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.workload = WORKLOADS[model]
        self.x = torch.randn(self.workload.batch, self.workload.widths[0])
        self.model = self.workload.build()
        self.parameters = list(self.model.parameters())
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.exchange([])

    def exchange(self, gradients: list[torch.Tensor]) -> None:
        values = rpc.rpc_sync("server", push, args=(gradients,))
        if self.workload.flat:
            values = values[0].split(self.sizes)
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value.view_as(parameter)

    def train(self, seconds: float) -> float:
        """Minibatches per second."""
        start = now = time.perf_counter()
        count = 0
        while now - start < seconds:
            loss = self.model(self.x).square().mean()
            self.exchange(self.workload.pack(torch.autograd.grad(loss, self.parameters)))
            count += 1
            now = time.perf_counter()
        return count / (now - start)


def join(rank: int, task: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{task['port']}", rpc_timeout=START_SECONDS)
    name = f"worker{rank}" if rank else "server"
    rpc.init_rpc(name, rank=rank, world_size=task["workers"] + 1, rpc_backend_options=options)


def work(task: dict[str, Any]) -> None:
    if die_with_parent(task):
        join(task["rank"], task)
        rpc.shutdown(timeout=0)


def measure(task: dict[str, Any]) -> list[float]:
    ranks = range(1, task["workers"] + 1)
    workers = [rpc.remote(f"worker{rank}", Worker, args=(task["model"], rank)) for rank in ranks]
    rates = []
    for seconds in [WARM_UP_SECONDS] + [task["seconds"]] * task["rounds"]:
        limit = START_SECONDS + 2 * seconds
        turns = [worker.rpc_async(timeout=limit).train(seconds) for worker in workers]
        rates.append(sum(turn.wait() for turn in turns))
        print(f"{task['model']}: {rates[-1]:.1f} minibatches/s", file=sys.stderr)
    return rates[1:]


def main() -> None:
    global _server
    # Read by the message layer: without it, it would listen at the host's outer address.
    os.environ.update(OMP_NUM_THREADS="1", TP_SOCKET_IFNAME="lo")
    task = json.loads(sys.argv[1])
    if "rank" in task:
        work(task)
        return
    _server = Server(WORKLOADS[task["model"]])
    # The rendezvous below finds this store at its port, and shares it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    task["port"] = store.port
    with contextlib.ExitStack() as stack:
        for rank in range(1, task["workers"] + 1):
            start(task | {"rank": rank}, stack)
        join(0, task)
        rates = measure(task)
        rpc.shutdown(timeout=START_SECONDS)
        Path(task["output"]).write_text(json.dumps({"minibatches_per_second": rates}), encoding="utf-8")


if __name__ == "__main__":
    main()
