"""A model as operations in the order in which they are done: what is common to all ways to find them."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

Value = Any
"""What an operation gives: a tensor, a number, or, where it may not be cut off, several of them."""


@dataclasses.dataclass(frozen=True)
class ModelOperation:
    """One operation of a model, by what it needs."""

    name: str
    inputs: tuple[int, ...]
    """The operations whose values it takes."""
    parameters: tuple[str, ...] = ()
    """Those that it uses, by name."""
    shown: str = ""
    """What it is, for people."""


@dataclasses.dataclass(frozen=True)
class ModelPart:
    """A stretch of a model's operations, to be run by one stage."""

    takes: tuple[int, ...]
    """Numbers of the values that it needs: from 0 on those of operations, below 0 the model's inputs, -1 the first."""
    gives: tuple[int, ...]
    """Values that are needed after it."""
    run: Callable[[Sequence[Value]], list[Value]]
    """From what it takes to what it gives."""
    parameters: tuple[nn.Parameter, ...]
    buffers: tuple[torch.Tensor, ...]
    random: bool
    """Whether it draws random numbers."""


CHANGES_INPUT = (
    "the model changes its input in place (in '{}'), which only the worker with the first layers would see; let it "
    "work on a copy, as x = x.clone() gives it"
)
_OPERATIONS = 0xF_FFFF
"""Bits of a seed that tell operations apart."""


def draw_for(number: int) -> None:
    """Let what one operation draws depend on the seed and on the operation alone, wherever the model is cut."""
    torch.default_generator.manual_seed(torch.default_generator.initial_seed() & ~_OPERATIONS | number)


class ModelTrace(ABC):
    """A model as operations."""

    operations: list[ModelOperation]
    results: tuple[int, ...]
    """The values that the model computes and returns."""
    summarises: bool = False
    """Whether one of these has no row for every sample: a loss, say."""
    remembers: bool = False
    """Whether a call changes what the model keeps."""
    counts: bool = False
    """Whether it is good for batches of one size only, as the model computes with how many samples there are."""
    mixes: bool = False
    """Whether what it returns for a sample depends on the others of its batch."""
    changed: Sequence[tuple[nn.Module, str, Any]] = ()
    """Numbers and words that the model has put into attributes when it was called: module, name, value."""

    @abstractmethod
    def flat_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The model's inputs, in the order of their numbers."""

    @abstractmethod
    def returned(self, values: Sequence[Value], inputs: Sequence[Any]) -> Any:
        """What the model returns, from its results and its inputs."""

    @abstractmethod
    def computed(self, returned: Any) -> list[Value]:
        """Of what the model returns, its results."""

    @abstractmethod
    def part(self, first: int, last: int) -> ModelPart:
        """The operations from `first` up to, not including, `last`."""

    @abstractmethod
    def execute(self, number: int, values: dict[int, Value]) -> Value:
        """Run one operation on the values there are."""

    @abstractmethod
    def execute_calmly(self, number: int, values: dict[int, Value]) -> Value:
        """The same without anything that differs from draw to draw."""

    def cuts(self) -> list[int]:
        """Where the list may be cut: in front of which operations."""
        forbidden: set[int] = set()
        for number, operation in enumerate(self.operations):
            for needed in operation.inputs:
                if needed >= 0 and self._inseparable(needed, number):
                    forbidden.update(range(needed + 1, number + 1))
        return [number for number in range(1, len(self.operations)) if number not in forbidden]

    def changes(self, number: int) -> bool:
        """Whether an operation may change what it is given in place."""
        return True

    def changes_buffers(self, first: int, last: int) -> bool:
        """Whether a stretch may change what the model keeps from one call to the next."""
        return True

    def _inseparable(self, source: int, target: int) -> bool:
        """Whether two operations must be in one part."""
        return False

    def crossing(self) -> list[list[int]]:
        """In front of each operation, the values of earlier ones that are still needed."""
        last = list(range(len(self.operations)))
        for number, operation in enumerate(self.operations):
            for needed in operation.inputs:
                if needed >= 0:
                    last[needed] = number
        for result in self.results:
            last[result] = len(self.operations)
        alive: list[list[int]] = []
        open_: list[int] = []
        for number in range(len(self.operations)):
            open_ = [value for value in open_ if last[value] >= number]
            alive.append(list(open_))
            open_.append(number)
        return alive

    def ends(self, first: int, last: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What a stretch takes from before and gives to those after."""
        takes: dict[int, None] = {}
        for operation in self.operations[first:last]:
            takes.update((needed, None) for needed in operation.inputs if not first <= needed < last)
        later = {needed for operation in self.operations[last:] for needed in operation.inputs} | set(self.results)
        return tuple(takes), tuple(number for number in range(first, last) if number in later)
