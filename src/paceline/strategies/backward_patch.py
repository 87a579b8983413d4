"""Notices when backward passes begin and end."""

from __future__ import annotations

from typing import Any

import torch

from paceline.cluster.compiler import keep_out_of_graphs
from paceline.events.stopwatch import Stopwatch
from paceline.strategies.base import Trainer


class BackwardPatch:
    """Tells a stopwatch and a trainer when backward passes begin and end, until `undo`.

    Autograd has no hook for that, so `torch.autograd.backward`, which every backward pass of a script goes through, is
    replaced.
    """

    def __init__(self, stopwatch: Stopwatch, trainer: Trainer) -> None:
        self._plain = plain = torch.autograd.backward
        inside = False

        @keep_out_of_graphs
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            nonlocal inside
            if inside:  # of a backward pass in a backward pass, as checkpointing has it
                plain(tensors, *args, **kwargs)
                return
            inside = True
            try:
                runs = trainer.enter_backward(tensors)
                stopwatch.turn()
                try:
                    if runs:
                        plain(tensors, *args, **kwargs)
                finally:
                    stopwatch.turn_back()
                trainer.leave_backward()
            finally:
                inside = False

        self._own = backward
        torch.autograd.backward = backward

    def undo(self) -> None:
        if torch.autograd.backward is self._own:
            torch.autograd.backward = self._plain
