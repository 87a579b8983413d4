"""Copies of a team's model: `copy.deepcopy` and pickling, as `torch.save(model)` does, of the object itself.

Of a split model a worker has a part of the values, and functions of the run in place of some of its own. Only
`state_dict()` gathers the whole; a copy of the object would be a part of the model, without a word.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from paceline.errors import UsageError

_HOW = "save its values by team.save(path) or torch.save(model.state_dict(), path), and load them into a plain model"


def refuse_copies(modules: Iterable[torch.nn.Module]) -> Callable[[], None]:
    """Refuses copies of these modules and of all that contain one; the returned function allows them again."""
    return _replace(modules, {"__deepcopy__": _no_copy, "__reduce_ex__": _no_pickle})


def copy_after(modules: Iterable[torch.nn.Module], ready: Callable[[], None]) -> Callable[[], None]:
    """Calls `ready` before one of these modules is copied, and refuses to pickle them; as `refuse_copies`."""
    modules = list(modules)
    undo = _replace(modules, {"__reduce_ex__": _no_pickle})
    for module in modules:
        vars(module)["__deepcopy__"] = _Waiting(module, ready)

    def undo_all() -> None:
        undo()
        for module in modules:
            vars(module).pop("__deepcopy__", None)

    return undo_all


def copy_without(hooks: Mapping[torch.nn.Module, int]) -> Callable[[], None]:
    """Lets copies of these modules be without a forward pre-hook of the run, given by its number."""
    for module, number in hooks.items():
        vars(module)["__reduce_ex__"] = functools.partial(_reduce_without, module, number)

    def undo() -> None:
        for module in hooks:
            vars(module).pop("__reduce_ex__", None)

    return undo


def _reduce_without(module: torch.nn.Module, number: int, protocol: int) -> Any:
    made: Any = type(module).__reduce_ex__(module, protocol)
    make, arguments, state, *rest = made
    if isinstance(state, dict):
        state = {name: value for name, value in state.items() if name != "__reduce_ex__"}
        before = state["_forward_pre_hooks"]
        state["_forward_pre_hooks"] = type(before)((key, hook) for key, hook in before.items() if key != number)
    return make, arguments, state, *rest


class _Waiting:
    """The `__deepcopy__` of a module; its copy has none."""

    def __init__(self, module: torch.nn.Module, ready: Callable[[], None]) -> None:
        self._module, self._ready = module, ready

    def __call__(self, memo: dict[int, Any]) -> torch.nn.Module:
        self._ready()
        own = vars(self._module)
        replaced = {name: own.pop(name) for name in ("__deepcopy__", "__reduce_ex__")}
        try:
            return copy.deepcopy(self._module, memo)
        finally:
            own.update(replaced)


def _replace(modules: Iterable[torch.nn.Module], methods: dict[str, Callable[..., Any]]) -> Callable[[], None]:
    """Gives modules methods of their own, which `copy` and `pickle` look up in the object first."""
    modules = list(modules)
    for module in modules:
        vars(module).update(methods)

    def undo() -> None:
        for module in modules:
            for name in methods:
                vars(module).pop(name, None)

    return undo


def _no_copy(_memo: dict[int, Any]) -> Any:
    raise UsageError(f"a model that is split over workers cannot be copied; {_HOW}")


def _no_pickle(_protocol: int) -> Any:
    raise UsageError(f"a model that is split over workers cannot be pickled, as torch.save(model) does; {_HOW}")
