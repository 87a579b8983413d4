"""Learning rates and their like, kept equal over the team.

Every worker runs its own copy of the user's schedulers. A worker that took no part in a step, or whose scheduler uses a
local metric, would get other values than the rest. So all shards are updated with the values of one worker: the lowest
rank that took part in the step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer

from paceline.config import one_of
from paceline.errors import UsageError
from paceline.parameters.worker_table import SLOT


class Hyperparameters:
    """This worker's values for the others to read, and theirs for this one."""

    STATE = ("_versions", "_cache")
    """Attributes that change while it reads."""

    def __init__(self, optimizer: Optimizer | None, slots: list[memoryview], rank: int = -1) -> None:
        """Without an optimizer, only to read."""
        self._optimizer, self._slots, self._rank = optimizer, slots, rank
        self._seen: list[dict[str, Any]] = []
        self._in_tensors = False
        self._versions = [0] * len(slots)
        self._cache: list[list[dict[str, Any]]] = [[] for _ in slots]
        self.version = 0

    def publish(self) -> int:
        """Write this worker's values if they have changed; returns the number of their current state."""
        assert self._optimizer is not None
        groups = self._optimizer.param_groups  # another list after each `load_state_dict`
        # A rate kept in a tensor is changed in place, so it never looks changed.
        if self._in_tensors or groups != self._seen:
            self._seen = [
                {key: list(value) if isinstance(value, list) else value for key, value in group.items()}
                for group in groups
            ]
            self._in_tensors = any(isinstance(value, torch.Tensor) for group in self._seen for value in group.values())
            self.version += 1
            text = msgspec.json.encode([plain(group) for group in groups])
            if len(text) + 8 > SLOT:
                raise UsageError(f"the optimizer's parameter groups take {len(text)} bytes; {SLOT - 8} are allowed")
            slot = self._slots[self._rank]
            slot[:8] = len(text).to_bytes(8, "little")
            slot[8 : 8 + len(text)] = text
        return self.version

    def forget(self, rank: int) -> None:
        """Reset the state of a rank that another worker has now."""
        self._versions[rank] = 0

    def written(self, rank: int) -> bytes:
        """The values of `rank`, encoded, as it has written them last."""
        slot = self._slots[rank]
        return bytes(slot[8 : 8 + int.from_bytes(slot[:8], "little")])

    def read(
        self, rank: int, version: int, find: Callable[[Callable[[], bytes]], bytes] = lambda written: written()
    ) -> list[dict[str, Any]]:
        """The values of `rank` in that state; find: is passed how to find them, encoded."""
        if self._versions[rank] != version:
            groups = [_tuples(group) for group in msgspec.json.decode(find(lambda: self.written(rank)))]
            # Workers mostly have the same values: then they are the same object, which is quickly seen.
            self._cache[rank] = next((known for known in self._cache if known == groups), groups)
            self._versions[rank] = version
        return self._cache[rank]


def plain(group: dict[str, Any]) -> dict[str, Any]:
    """The values of a group that can be sent: numbers, flags and tuples of them; not the parameters or their names."""
    plain = {}
    for key, value in group.items():
        item = float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if isinstance(item, (bool, int, float, str, tuple, list, type(None))) and not key.startswith("param"):
            plain[key] = item
    # These say how torch computes, not what; the shards have their own.
    for key in ("fused", "foreach", "capturable"):
        plain.pop(key, None)
    return plain


def multiplied(groups: list[dict[str, Any]], factor: float) -> list[dict[str, Any]]:
    """The groups with their learning rates multiplied; the same object for a factor of 1."""
    if factor == 1.0:
        return groups
    return [{**group, "lr": group["lr"] * factor} if "lr" in group else group for group in groups]


def _tuples(group: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}


@dataclasses.dataclass(frozen=True)
class RateScaling:
    """How the learning rate grows with the batch: a factor on whatever rate the script and its schedulers set."""

    rule: str | None
    workers: int
    warmup: int
    """Updates over which the factor goes from 1 to its full value."""
    batch: float | None = None
    """Samples of an update, relative to the script's own batch; None if each worker brings a batch of its own."""

    def __post_init__(self) -> None:
        one_of("scale_lr", self.rule, (None, "linear", "sqrt"))
        if self.warmup < 0:
            raise UsageError(f"warmup is {self.warmup}; it must be a number of updates, 0 or more")

    def of(self, workers: int) -> RateScaling:
        """The same rule for another number of workers."""
        return dataclasses.replace(self, workers=workers)

    def scaled(self, groups: list[dict[str, Any]], update: int) -> list[dict[str, Any]]:
        """The groups with their learning rates scaled; the same object if the factor is 1."""
        return multiplied(groups, self.factor(update))

    def factor(self, update: int) -> float:
        if self.rule is None:
            return 1.0
        growth = float(self.workers) if self.batch is None else self.batch
        full = growth if self.rule == "linear" else math.sqrt(growth)
        if update >= self.warmup:
            return full
        return 1.0 + (full - 1.0) * (update + 1) / (self.warmup + 1)
