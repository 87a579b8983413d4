"""Compares the pushes of workers that make every update together, as their scripts should be alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.errors import unlike_losses, unlike_rates, unlike_samples
from paceline.parameters.loss_digest import LossComparison
from paceline.server.updates import PendingPush


class PushComparison:
    """Says once what is unlike in the pushes of one update."""

    STATE = ("_losses", "_said_rates", "_said_losses", "_said_samples")
    """Attributes that change."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._losses = LossComparison()
        self._said_rates = self._said_losses = self._said_samples = False
        """True if it was said that workers have different learning rates, losses of different kinds, or of samples that
        do not count alike."""

    def compare(self, pushes: Sequence[PendingPush]) -> None:
        """pushes: those of one update."""
        first = pushes[0]
        if not self._said_rates:
            others = [one.rank for one in pushes if one.groups is not first.groups and one.groups != first.groups]
            if others:
                self._said_rates = True
                self._say(unlike_rates(others[0], first.rank))
        sums = any(one.sums for one in pushes)
        averaged = [one.rank for one in pushes if one.message.averaged or (sums and one.message.undecided)]
        if averaged and not self._said_samples:
            self._said_samples = True
            if averaged[0] > 0 or not pushes[0].message.averaged:  # else the lead has said it
                self._say(unlike_samples(averaged[0]))
        if not self._said_losses:
            ways = {one.rank: one.message.way for one in pushes if one.message.samples and one.message.batch >= 0}
            other = self._losses.unlike(ways)
            if other >= 0:
                self._said_losses = True
                self._say(unlike_losses(other, min(ways)))
