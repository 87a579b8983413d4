"""What a team asks of a strategy, and what it gives to one."""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.cluster.membership import Members
from paceline.config import Launch, Strategy
from paceline.errors import UsageError
from paceline.events import Recorder
from paceline.strategies.stopwatch import Stopwatch
from paceline.transport import BarrierKind


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How `team.setup` was asked to train."""

    gradients: str = "local"
    """What `.grad` holds between backward and step: this worker's own gradient, or ("visible") the team's mean."""
    scale_lr: str | None = None
    warmup: int = 0
    loss: Callable[..., Any] | None = None
    """The script's loss function."""
    loaders: Sequence[DataLoader[Any]] = ()
    """What the model is trained with, as the script made them."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrainerContext:
    """What a strategy finds around it."""

    members: Members
    strategy: Strategy
    launch: Launch
    folder: Path | None
    """Of the run."""
    recorder: Recorder
    stopwatch: Stopwatch
    device: torch.device
    say: Callable[[str], None]


class Trainer(ABC):
    """One model and its optimizer, trained by the team under one strategy."""

    version: int
    """How many updates the parameters have had."""
    paces: list[tuple[float, int]]
    """Per worker, seconds and samples of its last minibatch; equal on all workers after an update."""
    updated: Callable[[], None] = staticmethod(lambda: None)
    """Called after each update."""
    lost: Callable[[set[int], bool, list[int]], None] = staticmethod(lambda _ranks, _counted, _takers: None)
    """Called with those who are gone, whether their last gradients still count, and who takes what they leave."""
    replica: tuple[int, int] | None = None
    """Which replica this worker is of, and how many there are; None where every worker is one."""
    cancels = False
    """Whether a step may be cancelled."""
    lockstep = False
    """Whether every worker must compute in every step, and give its part of all that is saved."""

    @abstractmethod
    def __init__(
        self, model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext
    ) -> None: ...

    @property
    def present(self) -> int | None:
        """How many workers there are now, where that may change."""
        return None

    @property
    def weightless(self) -> bool:
        """Whether the minibatch at hand is a copy that counts for nothing."""
        return False

    @abstractmethod
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """What `optimizer.step()` does now."""

    @abstractmethod
    def clip(self, limit: float, norm: float) -> torch.Tensor:
        """Clip the norm of the team's gradient; returns what it was."""

    @abstractmethod
    def take_batch(self, samples: int, weight: float) -> None:
        """The script has been given a minibatch that is this share of the team's."""

    @abstractmethod
    def finish_epoch(self) -> None:
        """This worker has no more batches: help the others until they have none either."""

    @abstractmethod
    def accumulate(self, on: bool) -> None:
        """While on, gradients are summed over minibatches, and `step` and `zero_grad` do nothing."""

    def enter_step(self) -> None:
        """`with team.step():` begins."""

    def leave_step(self, error: BaseException | None) -> bool:
        """It ends, with this error; whether that is dealt with."""
        return False

    def share_loader(self, loader: DataLoader[Any], global_batch: int | None) -> Any:
        """The loader to give to the script, if this strategy gives samples out in its own way; else None."""
        return None

    def drawn(self) -> None:
        """The lead has drawn the order of an epoch, and may have used random numbers for it; all workers are here."""

    def report_loss(self, loss: float) -> None:
        """The script has reported a loss."""

    @property
    def lead(self) -> int:
        """Who decides what one must decide, where that may change."""
        return 0

    def gather(self, payload: bytes, intent: BarrierKind) -> list[bytes] | None:
        """Everybody's payload, by rank, where the strategy knows better than the team who takes part; else None."""
        return None

    def still(self) -> contextlib.AbstractContextManager[None]:
        """While in there, nothing changes the parameters and the optimizer's state."""
        return contextlib.nullcontext()

    def part(self) -> None:
        """The script has ended: say exit_report to whoever must know."""

    def settle(self) -> None:
        """This worker has written its last event: wait until it has arrived where it belongs."""

    @abstractmethod
    def load(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """Take the values of a checkpoint; all workers call it."""

    def abandon(self) -> None:
        """The script ends with an error: the others are not where this worker is, so wait for nobody."""

    @abstractmethod
    def close(self) -> None:
        """Give model and optimizer back as plain torch knows them."""


def check(model: torch.nn.Module, optimizer: Optimizer) -> None:
    """Refuse what cannot be trained, before anything is changed."""
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"setup takes a torch.nn.Module first; it got a {type(model).__name__}")
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"setup takes a torch.optim.Optimizer second; it got a {type(optimizer).__name__}")
    own = {id(parameter) for parameter in model.parameters()}
    if not own:
        raise UsageError("the model has no parameters; there is nothing to train")
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise UsageError("the model has lazy parameters, whose shape is not known yet; call it once before setup")
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(id(parameter) not in own for parameter in held)
    if foreign:
        raise UsageError(
            f"the optimizer holds {foreign} parameter{'s' * (foreign > 1)} that the model does not have; "
            "make the optimizer from this model's parameters, after the model is final"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError("SparseAdam needs sparse gradients, which a team does not exchange; use Adam")
