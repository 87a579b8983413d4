"""What workers that make every update together notice about each other's scripts."""

from __future__ import annotations

import math
from collections.abc import Callable

from paceline.errors import TeamError, left_out_step, unlike_losses, unlike_rates, unlike_samples
from paceline.parameters.loss_digest import LossComparison
from paceline.strategies.step_table import StepAgreement

_SUSPICIOUS = 3
"""Updates in a row with equal losses that are no chance."""


class StepNotices:
    """Raises an error, on all workers, where scripts cannot go on together, and says once what else is odd."""

    def __init__(self, say: Callable[[str], None], not_finite: Callable[[float, int], TeamError]) -> None:
        """not_finite: the error of a loss of a rank that is not finite."""
        self._say_line, self._not_finite = say, not_finite
        self._said: set[str] = set()
        self._comparison = LossComparison()
        self.refused: float | None = None
        """A loss that is not finite, until all workers know it."""
        self._equal = 0
        """Updates in a row in which workers without a loader had the same loss."""

    def position(self, number: int, loss: float) -> tuple[int, float]:
        """The round of this worker's loader and its loss, for its note."""
        refused, self.refused = self.refused, None
        if refused is not None:
            return number, refused
        return number, loss if math.isfinite(loss) else 0.0

    def check(self, agreed: StepAgreement, *, averaged: bool) -> None:
        """Looks at the workers' notes of an update; averaged: this worker's, as in its note."""
        for rank, loss in agreed.not_finite.items():
            raise self._not_finite(loss, rank)
        rounds = agreed.rounds
        if len(set(rounds.values())) > 1:
            first = min(rounds)
            raise left_out_step([rank for rank, number in rounds.items() if number != rounds[first]], first)
        if agreed.unlike >= 0:
            self._say("rates", unlike_rates(agreed.unlike, min(rounds)))
        if "ways" not in self._said and (other := self._comparison.unlike(agreed.ways)) >= 0:
            self._say("ways", unlike_losses(other, min(agreed.ways)))
        if agreed.averaged and not averaged:  # else this worker has said it
            self._say("averaged", unlike_samples(agreed.averaged[0]))
        self._equal = self._equal + 1 if agreed.alike else 0
        if self._equal == _SUSPICIOUS:
            self._say(
                "alike",
                "all workers have the same loss, so they seem to train on the same data: without a loader of the team "
                "each must draw its own, for example after torch.manual_seed(seed + team.rank)",
            )

    def _say(self, what: str, line: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._say_line(line)
