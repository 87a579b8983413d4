"""Checks of the options, the optimizer and the calls of a split model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.cluster.membership import Members
from paceline.config import one_of
from paceline.errors import UsageError
from paceline.parameters.optimizers import ELEMENTWISE, is_elementwise
from paceline.strategies.context import Options
from paceline.transport.call_log import CallLog


def log_calls(members: Members, replica: Sequence[int]) -> CallLog:
    """The calls of a replica's model, checked wherever its workers wait; all workers of the team call it."""
    log = CallLog(members.share(CallLog.memory_size(members.size)), members.rank, members.size, replica)
    for barrier in dict.fromkeys((members.local.barrier, members.barrier)):
        log.watch(barrier)
    return log


def bit_sum(tensor: torch.Tensor) -> int:
    """A sum of a tensor's bits, by which changes are found."""
    data = tensor.detach()
    return int(data.contiguous().view(torch.int32 if data.itemsize == 4 else torch.uint8).sum(dtype=torch.int64))


def check_split(optimizer: Optimizer, options: Options, strategy: str) -> None:
    """Refuses options and optimizers that cannot train a split model."""
    one_of("gradients", options.gradients, ("local", "visible"))
    if options.gradients == "visible":
        raise UsageError(
            f"gradients is 'visible'; under '{strategy}' the mean gradient is made in parts during the update, so it "
            "must be 'local'"
        )
    if not is_elementwise(optimizer):
        known = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
        raise UsageError(
            f"{type(optimizer).__name__} is not known to treat every element by itself, as it must where no worker has "
            f"whole parameters; under '{strategy}' use one of {known}"
        )


def refuse_pipeline(model: torch.nn.Module, optimizer: Optimizer) -> None:
    """Refuses a model and an optimizer that no pipeline trains."""
    elsewhere = {parameter.device.type for parameter in model.parameters()} - {"cpu"}
    if elsewhere:
        raise UsageError(
            f"the model is on '{elsewhere.pop()}'; the stages of a pipeline share the host's memory, so it must be on "
            "'cpu'"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("LBFGS looks at all parameters at once, which no stage of a pipeline has; use Adam or SGD")


def refuse_parts(*_args: Any, **_kwargs: Any) -> Any:
    """Replaces the forward pass of a model of which this worker has only parts."""
    raise UsageError(
        "the team is closed, and of a model that was made on the meta device a worker keeps its own stages only; save "
        "it before, and load it into a plain model"
    )
