"""Inputs that a model can be run on, to find out how it can be split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paceline.errors import UsageError


class ExampleInputs(NamedTuple):
    """The arguments of a call of the model."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any] = {}
    origin: str = "the example_inputs of setup"
    """Where they come from, in messages to users."""


def example_inputs(given: Any) -> ExampleInputs | None:
    """The argument of `team.setup`: a tensor, a tuple of positional arguments, or a dict of keyword arguments."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        return ExampleInputs((), dict(given))
    if isinstance(given, tuple | list):
        return ExampleInputs(tuple(given))
    if hasattr(given, "shape"):
        return ExampleInputs((given,))
    raise UsageError(
        f"example_inputs is a {type(given).__name__}; it must be a tensor, a tuple of the model's arguments, or a dict "
        "of keyword arguments"
    )
