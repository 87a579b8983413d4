"""Refuses to train a model in two ways at once: by the team and by torch's DistributedDataParallel."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import UsageError


class WrappingPatch:
    """Refuses DistributedDataParallel for a model that the team trains, until `undo`.

    Its constructor is replaced, since frameworks wrap models by themselves.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._plain = plain = DistributedDataParallel.__init__
        trained = {id(parameter) for parameter in model.parameters()}

        @functools.wraps(plain)
        def init(wrapper: DistributedDataParallel, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            if any(id(parameter) in trained for parameter in module.parameters()):
                raise UsageError(
                    "the team trains this model since team.setup, and DistributedDataParallel would average its "
                    "gradients once more; leave one of them out (accelerator.prepare(model) and strategy='ddp' "
                    "wrap it, too)"
                )
            plain(wrapper, module, *args, **kwargs)

        self._own = init
        DistributedDataParallel.__init__ = init  # type: ignore[method-assign,assignment]

    def undo(self) -> None:
        if DistributedDataParallel.__init__ is self._own:
            DistributedDataParallel.__init__ = self._plain  # type: ignore[method-assign]


def check_unwrapped(model: torch.nn.Module) -> None:
    """Refuses a model that is wrapped already."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise UsageError(
            "the model is wrapped in DistributedDataParallel, which averages gradients by itself; give team.setup the "
            "model without the wrapper"
        )
