"""The `GradScaler` of a script: found without being told, so that a snapshot has its scale."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch


class Scalers:
    """The script's `GradScaler`, if it has one; of several it is not known which one a model belongs to."""

    def __init__(self) -> None:
        self._known: weakref.ref[Any] | None = None
        self._looked = False

    def _find(self) -> Any:
        """The one that there is; looked for once, since it takes long, and a script makes it before it trains."""
        found = None if self._known is None else self._known()
        if found is None and not self._looked:
            self._looked = True
            known = (one for one in gc.get_objects() if issubclass(type(one), torch.amp.GradScaler))
            scalers = [one for one in known if one.is_enabled()]
            if len(scalers) == 1:
                found, self._known = scalers[0], weakref.ref(scalers[0])
        return found

    def state(self) -> dict[str, Any]:
        """Its state; empty without one."""
        scaler = self._find()
        return {} if scaler is None else dict(scaler.state_dict())

    def restore(self, state: dict[str, Any]) -> bool:
        """Restores it; False if there was one, and now there is none."""
        if not state:
            return True
        scaler = self._find()
        if scaler is not None:
            scaler.load_state_dict(state)
        return scaler is not None
