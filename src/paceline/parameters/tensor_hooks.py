"""Notices hooks that a script puts on tensors of a graph: they run whenever a gradient passes there."""

from __future__ import annotations

import sys
from typing import Any

import torch

_plain: dict[str, Any] = {"register_hook": None, "retain_grad": None}
"""The methods of `torch.Tensor` by which hooks are put on tensors, as they are defined there; None if inherited."""
_watches = 0
_count = 0


class TensorHooks:
    """Knows, until `close`, whether a script has put hooks on tensors since it was asked last."""

    def __init__(self) -> None:
        global _watches
        if not _watches:
            for name in _plain:
                _plain[name] = vars(torch.Tensor).get(name)
                setattr(torch.Tensor, name, _counted(getattr(torch.Tensor, name)))
        _watches += 1
        self._known, self._open = _count, True

    def any_new(self) -> bool:
        """True if there are hooks on results of operations that were not there at the last call."""
        known, self._known = self._known, _count
        return known != _count

    def close(self) -> None:
        global _watches
        _watches -= self._open
        if self._open and not _watches:
            for name, method in _plain.items():
                delattr(torch.Tensor, name)
                if method is not None:
                    setattr(torch.Tensor, name, method)
        self._open = False


def _counted(plain: Any) -> Any:
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        global _count
        # FSDP has hooks below the outputs of the model, where no gradient is asked for.
        ours = sys._getframe(1).f_globals.get("__name__", "").startswith("torch.distributed.fsdp")
        _count += self.grad_fn is not None and not ours
        return plain(self, *args, **kwargs)

    return method
