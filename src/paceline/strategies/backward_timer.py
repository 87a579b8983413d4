"""Measures when backward passes begin and end."""

from __future__ import annotations

from typing import Any

import torch

from paceline.events.stopwatch import Stopwatch


class BackwardTimer:
    """Tells a stopwatch when backward passes begin and end, until `undo`.

    Autograd has no hook for that, so `torch.autograd.backward`, which every backward pass of a script goes through, is
    replaced by one that looks at the watch before and after.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._plain = plain = torch.autograd.backward
        inside = False

        def backward(*args: Any, **kwargs: Any) -> None:
            nonlocal inside
            if inside:  # of a backward pass in a backward pass, as checkpointing has it
                plain(*args, **kwargs)
                return
            inside = True
            stopwatch.turn()
            try:
                plain(*args, **kwargs)
            finally:
                stopwatch.turn_back()
                inside = False

        self._own = backward
        torch.autograd.backward = backward

    def undo(self) -> None:
        if torch.autograd.backward is self._own:
            torch.autograd.backward = self._plain
