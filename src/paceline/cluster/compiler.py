"""Torch's compiler in a worker's process: imported late, kept out of functions, or ignored."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch

Method = TypeVar("Method", bound=Callable[..., Any])
_DYNAMO = "torch._dynamo"
_MARKED = "__dynamo_disable"
"""The attribute in which torch keeps the form of a function that its compiler skips."""


def import_compiler_late() -> None:
    """Lets an optimizer be made without importing torch's compiler, which takes longer than importing torch itself.

    At the first call of some methods torch imports the compiler, only to exclude them from it. As long as no other
    code has imported it, there is nothing to exclude them from.
    """
    from torch.optim import Optimizer

    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        marked = getattr(Optimizer, name)
        plain = getattr(marked, "__wrapped__", None)
        if plain is not None and not hasattr(plain, _MARKED):
            setattr(plain, _MARKED, _unless_imported(plain, marked))


def _unless_imported(plain: Callable[..., Any], marked: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if _DYNAMO not in sys.modules:
            return plain(*args, **kwargs)
        if getattr(plain, _MARKED, None) is call:
            delattr(plain, _MARKED)
        return marked(*args, **kwargs)

    return call


def keep_out_of_graphs(function: Method) -> Method:
    """Makes torch.compile call a function without tracing it or its callees."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(function.__code__, skip)
    return function


class IgnoredCompiler:
    """Makes torch.compile do nothing, so that what is compiled runs as it was written, until the last one's `undo`.

    The compiler is not imported for that: `renew` tells one that was imported since.
    """

    _all: ClassVar[list[IgnoredCompiler]] = []
    _stance: ClassVar[Any] = None
    """Has the stance that the compiler had before."""

    def __init__(self, model: torch.nn.Module, say: Callable[[str], None]) -> None:
        if not self._all and _is_compiled(model):
            say("torch.compile is ignored: a model that is split over workers runs uncompiled")
        self._all.append(self)
        self.renew()

    def renew(self) -> None:
        if IgnoredCompiler._stance is None and _DYNAMO in sys.modules:
            IgnoredCompiler._stance = torch.compiler.set_stance("force_eager")

    def undo(self) -> None:
        self._all.remove(self)
        stance = IgnoredCompiler._stance
        if stance is not None and not self._all:
            IgnoredCompiler._stance = None
            stance.__exit__(None, None, None)


def _is_compiled(model: torch.nn.Module) -> bool:
    """True if it can be seen that the model or a part of it is compiled."""
    return any(
        type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
        for module in model.modules()
    )
