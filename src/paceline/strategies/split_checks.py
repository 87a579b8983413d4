"""Checks of the options and the optimizer of a split model."""

from __future__ import annotations

from torch.optim import Optimizer

from paceline.config import one_of
from paceline.errors import UsageError
from paceline.parameters.optimizers import ELEMENTWISE
from paceline.strategies.base import Options


def check_split(optimizer: Optimizer, options: Options, strategy: str) -> None:
    """Refuses options and optimizers that cannot train a split model."""
    one_of("gradients", options.gradients, ("local", "visible"))
    if options.gradients == "visible":
        raise UsageError(
            f"gradients is 'visible'; under '{strategy}' the mean gradient is made in parts during the update, so it "
            "must be 'local'"
        )
    if type(optimizer) not in ELEMENTWISE:
        known = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
        raise UsageError(
            f"{type(optimizer).__name__} is not known to treat every element by itself, as it must where no worker has "
            f"whole parameters; under '{strategy}' use one of {known}"
        )
