"""Notices batches that are divided among the workers although the script only evaluates them.

A loader divides its batches unless the script evaluates when it asks for them. A script that enters `torch.no_grad`
only after it has a batch, with the model in training mode, computes on this worker's part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle


class Iteration:
    """One iteration of the script over the divided batches of a loader."""

    def __init__(self, loader: object) -> None:
        self.loader = loader
        self.before: object = None
        """Backward passes and updates before the first batch."""
        self.open, self.given, self.left = True, False, False
        """Going on; has given a batch; has been left before its end."""


class DivisionWatch:
    """Says once that a divided batch was evaluated."""

    def __init__(
        self, trained: Callable[[], object], models: Callable[[], Iterable[torch.nn.Module]], say: Callable[[], None]
    ) -> None:
        """trained: counts of backward passes and updates so far. models: those that the team trains."""
        self._trained, self._models, self._say = trained, models, say
        self._said = False
        self._last: Iteration | None = None
        """The iteration that gave the last batch."""
        self._uses: set[tuple[int, bool]] = set()
        """Loaders whose batches the script trains on, each with whether it had begun another iteration over it."""
        self._call: RemovableHandle | None = None

    def give(self, iteration: Iteration) -> None:
        """The script gets a batch."""
        if self._said or iteration is self._last:
            return
        if not iteration.given:
            iteration.given, iteration.before = True, self._trained()
        self.judge()
        last, self._last = self._last, iteration
        if last is not None and (last.loader is not iteration.loader or last.open):
            self._watch_call((id(iteration.loader), last.loader is iteration.loader))

    def end(self, iteration: Iteration, *, over: bool) -> None:
        """The iteration is over, or the script has left it."""
        iteration.open, iteration.left = False, not over
        if over and iteration.given and iteration.before == self._trained():
            self._untrained()

    def judge(self) -> None:
        """Another batch comes, or none: the script has had the chance to train on the last one."""
        last = self._last
        if last is not None and last.left and last.before == self._trained():
            self._untrained()

    def _watch_call(self, use: tuple[int, bool]) -> None:
        """Finds out whether the model's next call, probably with the batch that is given now, has gradients."""
        if use in self._uses:
            return
        self._stop()
        own = {id(module) for model in self._models() for module in model.modules()}

        def before(module: torch.nn.Module, _inputs: object) -> None:
            if id(module) not in own:
                return
            self._stop()
            if torch.is_grad_enabled():
                self._uses.add(use)
            else:
                self._untrained()

        # Not a hook of the model itself, which would be copied and pickled with it.
        self._call = register_module_forward_pre_hook(before)

    def _stop(self) -> None:
        if self._call is not None:
            self._call.remove()
            self._call = None

    def close(self) -> None:
        """The training is over."""
        self.judge()
        self._stop()

    def _untrained(self) -> None:
        self._stop()
        if not self._said:
            self._said = True
            self._say()
