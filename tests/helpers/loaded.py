"""Does what takes time when it is first done: here once, instead of in every worker that is forked."""

import importlib
import pkgutil
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline
from helpers.huge_pages import prepare_to_fork
from helpers.split_models import MODELS, made
from paceline.config import Launch
from paceline.graph.trace.exporting import exported
from paceline.server import client
from paceline.transport import mailbox, step_counter

_ELSEWHERE = ("paceline.__main__", "paceline.bench", "paceline.cli", "paceline.integrations", "paceline.report")
"""Of commands, not of workers."""

for module in pkgutil.walk_packages(paceline.__path__, "paceline."):
    if not module.name.startswith(_ELSEWHERE):
        importlib.import_module(module.name)

importlib.import_module("torch.distributed.pipelining")  # where a stage's backward pass is split

# The first model to be traced waits for another second's imports, and the first call of every operator for its rules.
for kind in ("transformer", "convnet"):
    exported(made(kind), (MODELS[kind][1]()[:16][0],), {})
for (batch,) in DataLoader(TensorDataset(torch.zeros(2, 2)), batch_size=2):
    torch.nn.Linear(2, 1)(batch).sum().backward()
msgspec.json.decode("{}", type=Launch)

# Tests measure no speed: a worker that waits looks a few times, and then sleeps instead of using a core.
step_counter._SPINS, step_counter._YIELDS, mailbox._SPINS, client._LINGER = 200, 10, 10, 0.0
for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():  # every seed would be kept for it together with the stack, a hundred frames of pytest
        places: list[Any] = [device, getattr(device, "random", device)]
        for place in places:
            place._lazy_call = lambda call, **_: None
prepare_to_fork()
