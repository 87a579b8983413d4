"""A function on its way to the workers of `launch`, and its result on the way back.

Both travel by value, as pickles in memory that has no name: only processes that inherit its descriptors can read or
write it, and these are the launcher and its own workers. Nothing here ever reads a pickle from a file or a network.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import cloudpickle

from paceline.errors import UsageError

MADE_INSIDE = "make inside the function what holds a file, a lock, a process or a team"


class CallMemory:
    """The memory of one call: the function with its arguments, and an answer of each worker."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any], workers: int) -> None:
        content = _pack(function, arguments)
        self._call = os.memfd_create("paceline-call")
        self._answers = [os.memfd_create("paceline-answer") for _ in range(workers)]
        with _opened(self._call, "wb") as file:
            pickle.dump(_imports(), file)
            file.write(content)

    @property
    def descriptors(self) -> list[int]:
        """Of the call, then of each worker's answer."""
        return [self._call, *self._answers]

    def answer(self, rank: int) -> tuple[bool, Any] | None:
        """True and the result, or False and the exception, of a worker; None if it gave none that can be read."""
        with _opened(self._answers[rank], "rb") as file:
            try:
                found: tuple[bool, Any] = pickle.load(file)
            except EOFError:
                return None
        return found

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def receive(descriptor: int) -> tuple[Callable[..., Any], Sequence[Any]]:
    """The function and its arguments, in a worker, which is made like the process that sent them."""
    with _opened(descriptor, "rb") as file:
        _set_imports(pickle.load(file))
        function, arguments, state = pickle.load(file)
    inner = _innermost(function)
    if getattr(inner, "__module__", None) == "__main__":  # of a notebook or script: pickle looks there for its classes
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        vars(main).update(getattr(inner, "__globals__", {}))
    _set_random_state(state)
    return function, arguments


def answer(descriptor: int, fine: bool, value: Any) -> None:
    """Leave the worker's result, or its exception if that can be copied."""
    content = cloudpickle.dumps((fine, value))
    if not fine:
        pickle.loads(content)  # an exception may be made of fewer arguments than its class takes
    with _opened(descriptor, "wb") as file:
        file.write(content)


def _opened(descriptor: int, mode: str) -> IO[Any]:
    """The memory as a file with a position of its own."""
    return Path(f"/proc/self/fd/{descriptor}").open(mode)


# -- packing ---------------------------------------------------------------------------------------------------------


def _pack(function: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    try:
        packed: bytes = cloudpickle.dumps((function, arguments, _random_state()))
    except Exception as error:
        culprits = [name for name, value in _used(function, arguments) if not _can_be_copied(value)]
        what = f"{', '.join(culprits)}, which the function uses," if culprits else "the function"
        raise UsageError(f"{what} cannot be copied to the workers: {error}; {MADE_INSIDE}") from error
    return packed


def _used(function: Callable[..., Any], arguments: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """The values that a function uses: arguments, and variables of its module and of functions around it."""
    yield from ((f"argument {number}", value) for number, value in enumerate(arguments, start=1))
    inner = _innermost(function)
    if inspect.isfunction(inner):
        variables = inspect.getclosurevars(inner)
        yield from ((f"'{name}'", value) for name, value in {**variables.globals, **variables.nonlocals}.items())


def _innermost(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__func__", function)


def _can_be_copied(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


# -- the process around a function -----------------------------------------------------------------------------------


def _imports() -> dict[str, Any]:
    """What a worker needs before it can load the function: import paths, and the source of cells for tracebacks."""
    sources = {
        name: entry
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None and not Path(name).exists()
    }
    return {"path": [str(Path(part or ".").absolute()) for part in sys.path], "argv": sys.argv, "sources": sources}


def _set_imports(found: dict[str, Any]) -> None:
    sys.path[:], sys.argv = found["path"], found["argv"]
    linecache.cache.update(found["sources"])


def _random_state() -> dict[str, Any]:
    """The state of this process's random generators, and torch's default type."""
    state: dict[str, Any] = {"random": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        state["numpy"] = numpy.random.get_state()
    if (torch := sys.modules.get("torch")) is not None:
        state["torch"] = torch.get_rng_state(), torch.get_default_dtype()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["random"])
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])
    if "torch" in state:
        import torch

        generator, dtype = state["torch"]
        torch.set_rng_state(generator)
        torch.set_default_dtype(dtype)
