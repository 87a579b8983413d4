"""The schedulers of a script's learning rates, which know their optimizer, while no optimizer knows its schedulers."""

from __future__ import annotations

import copy
import gc
import sys
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.parameters.joint import parts_of


class Schedulers:
    """The schedulers of the team's optimizers."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._parts = parts_of(optimizer)
        self._found: list[Any] = []
        self._references = 0
        """References to the optimizers when schedulers were last searched for."""

    def _all(self) -> list[Any]:
        """Searches again only if there are more references to an optimizer: a scheduler holds one."""
        references = sum(map(sys.getrefcount, self._parts))
        if references > self._references:
            known = (one for one in gc.get_objects() if issubclass(type(one), LRScheduler))
            own = [one for one in known if any(getattr(one, "optimizer", None) is part for part in self._parts)]
            self._found = sorted(own, key=lambda one: type(one).__name__)
            self._references = sum(map(sys.getrefcount, self._parts))
        return self._found

    def state(self) -> list[dict[str, Any]]:
        """As a part of a snapshot: class and state of each."""
        return [{"class": type(one).__name__, "state": copy.deepcopy(one.state_dict())} for one in self._all()]

    def restore(self, states: list[dict[str, Any]]) -> bool:
        """Loads their states; False if the script has made others."""
        self._references = 0
        own = self._all()
        if [type(one).__name__ for one in own] != [known["class"] for known in states]:
            return False
        for one, known in zip(own, states, strict=True):
            one.load_state_dict(copy.deepcopy(known["state"]))
        return True
