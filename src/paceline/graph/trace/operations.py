"""A traced model: its operations in the order in which they are computed."""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

Value = Any
"""Output of an operation: a tensor, a number, or, if no cut may follow it, several of them."""


@dataclasses.dataclass(frozen=True)
class ModelOperation:
    """One operation of a model."""

    name: str
    inputs: tuple[int, ...]
    """Numbers of the values that it takes."""
    parameters: tuple[str, ...] = ()
    """Names of the parameters that it uses."""
    kind: str = ""
    """Name of its function or layer class, for people."""
    buffers: tuple[str, ...] = ()
    """Names of the buffers that it uses."""


@dataclasses.dataclass(frozen=True)
class ModelPart:
    """A contiguous range of a model's operations, which one stage runs."""

    inputs: tuple[int, ...]
    """Numbers of the values that it takes: outputs of operations from 0 on, the model's inputs from -1 down."""
    outputs: tuple[int, ...]
    """Numbers of its values that later operations or the model's results need."""
    run: Callable[[Sequence[Value]], list[Value]]
    """Computes its outputs from its inputs."""
    parameters: tuple[nn.Parameter, ...]
    random: bool
    """True if it draws random numbers."""


CHANGES_INPUT = (
    "the model changes its input in place (in '{}'), which only the worker of the first stage would see; let it "
    "work on a copy: x = x.clone()"
)
_OPERATIONS = 0xF_FFFF
"""Bits of a seed that hold the number of an operation."""


def seed_operation(number: int) -> None:
    """Makes the random numbers of an operation depend only on the seed and its number, wherever the model is cut."""
    torch.default_generator.manual_seed(torch.default_generator.initial_seed() & ~_OPERATIONS | number)


class ModelTrace(ABC):
    """A model as a list of operations."""

    operations: list[ModelOperation]
    results: tuple[int, ...]
    """Numbers of the values from which the model's return value follows."""
    reduces_batch: bool = False
    """True if a result has no row for every sample, nor is it, as a loss, a sum over samples of what has."""
    mutates_buffers: bool = False
    """True if a call changes the model's buffers."""
    fixed_batch: bool = False
    """True if the trace is valid for one batch size only, since the model computes with the number of samples."""
    mixes_samples: bool = False
    """True if the results for a sample depend on the others of its batch."""
    with_values: Callable[[int], contextlib.AbstractContextManager[None]] = staticmethod(
        lambda _number: contextlib.nullcontext()
    )
    """While entered, an operation can be run; replaced for a model whose parameters have no values."""
    changed_attributes: Sequence[tuple[nn.Module, str, Any]] = ()
    """Scalars and strings that a call stores in attributes of modules: module, name, value."""

    @abstractmethod
    def flat_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The model's inputs by number."""

    @abstractmethod
    def returned(self, values: Sequence[Value], inputs: Sequence[Any]) -> Any:
        """The model's return value, from its results and inputs."""

    def drop_tail(self) -> None:
        """Leaves the computation of values of the batch, such as a loss, to the last stage: no batch is divided."""

    @property
    def has_tail(self) -> bool:
        """True if values of the batch are computed from the results of the last stage."""
        return False

    def infer(self, inputs: Sequence[Any]) -> list[torch.Tensor] | None:
        """The results as tensors without values; None if only a call of the model gives them."""
        return None

    @abstractmethod
    def part(self, first: int, last: int) -> ModelPart:
        """The operations from `first` up to, not including, `last`."""

    @abstractmethod
    def execute(self, number: int, values: dict[int, Value]) -> Value:
        """Runs one operation on its inputs, by number."""

    @abstractmethod
    def execute_deterministic(self, number: int, values: dict[int, Value]) -> Value:
        """Runs one operation without randomness: dropout, say, passes its input on."""

    def cuts(self) -> list[int]:
        """The operations before which the model may be cut."""
        forbidden: set[int] = set()
        for number, operation in enumerate(self.operations):
            for needed in operation.inputs:
                if needed >= 0 and self._inseparable(needed, number):
                    forbidden.update(range(needed + 1, number + 1))
        return [number for number in range(1, len(self.operations)) if number not in forbidden]

    def may_mutate(self, number: int) -> bool:
        """True if an operation may change its inputs in place."""
        return True

    def changes_buffers(self, first: int, last: int) -> bool:
        """True if a range of operations may change buffers."""
        return True

    def _inseparable(self, source: int, target: int) -> bool:
        """True if two operations must be in one part."""
        return False

    def crossing(self) -> list[list[int]]:
        """Before each operation, the values of earlier ones that are still needed."""
        last = list(range(len(self.operations)))
        for number, operation in enumerate(self.operations):
            for needed in operation.inputs:
                if needed >= 0:
                    last[needed] = number
        for result in self.results:
            last[result] = len(self.operations)
        crossing: list[list[int]] = []
        open_: list[int] = []
        for number in range(len(self.operations)):
            open_ = [value for value in open_ if last[value] >= number]
            crossing.append(list(open_))
            open_.append(number)
        return crossing

    def interface(self, first: int, last: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Numbers of the values that a range of operations takes from outside and gives to later operations."""
        inputs: dict[int, None] = {}
        for operation in self.operations[first:last]:
            inputs.update((needed, None) for needed in operation.inputs if not first <= needed < last)
        later = {needed for operation in self.operations[last:] for needed in operation.inputs} | set(self.results)
        return tuple(inputs), tuple(number for number in range(first, last) if number in later)
