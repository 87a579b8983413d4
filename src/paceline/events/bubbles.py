"""The bubble of a pipeline, measured from its passes and by formula."""

from __future__ import annotations

import statistics

import msgspec

from paceline.config import Mesh, Pipeline, parse_strategy
from paceline.errors import UsageError
from paceline.events import Pass, Stages
from paceline.schedules import EVEN, PassTimes, bubble

_MOST = 10_000
"""The first steps, which alone are measured, so that memory does not grow with the run."""


class Bubble(msgspec.Struct, kw_only=True):
    """The idle share of all devices' time in a pipeline, from the first pass of a step to its last."""

    measured: float
    formula: float | None
    """For stages of equal length and messages that take no time; None if there is no formula."""
    step: float = 0.0
    """Seconds of a step, from its first pass to its last."""
    predicted: float | None = None
    """The same as predicted when the model was cut, from its operations and links; None if it was not."""


class Bubbles:
    """Sums the devices' computing time and the length of every step; passes may come in any order."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._steps: dict[int, list[float]] = {}
        """By version: the start of the first pass, the end of the last, and the seconds of all."""
        self._seconds = {"F": [0.0, 0], "B": [0.0, 0], "W": [0.0, 0]}
        self._ranks: set[int] = set()
        self._stages = self._microbatches = 0
        self._predicted: dict[int, float] = {}
        """By the first rank of a pipeline."""

    def add_cut(self, event: Stages) -> None:
        """Adds the prediction that was made when a model was cut."""
        self._predicted[event.rank] = event.predicted

    def add(self, event: Pass) -> None:
        """Adds a pass."""
        self._first = event.version if self._first is None else self._first
        if event.version > self._first + _MOST:
            return
        end = event.start + event.seconds
        step = self._steps.setdefault(event.version, [event.start, end, 0.0])
        step[0], step[1], step[2] = min(step[0], event.start), max(step[1], end), step[2] + event.seconds
        kind = self._seconds.setdefault(event.kind, [0.0, 0])
        kind[0] += event.seconds
        kind[1] += 1
        self._ranks.add(event.rank)
        self._stages = max(self._stages, event.stage + 1)
        self._microbatches = max(self._microbatches, event.microbatch + 1)

    def result(self, spec: str | None) -> Bubble | None:
        """The bubble of a run under this strategy; None without a pipeline."""
        measured = self.measured()
        if measured is None:
            return None
        predicted = max(self._predicted.values(), default=None)
        return Bubble(measured=measured, formula=self.formula(spec), step=self._step(), predicted=predicted)

    def _step(self) -> float:
        """The median length of a step, without the first if there are more."""
        lengths = [end - begin for _, (begin, end, _) in sorted(self._steps.items())]
        return statistics.median(lengths[1:] or lengths)

    def measured(self) -> float | None:
        """The median idle share of a step, without the first step if there are more: it includes start-up costs.

        A median, because other processes of the machine lengthen some steps.
        """
        first = min(self._steps, default=0)
        shares = [
            1 - busy / (len(self._ranks) * (end - begin))
            for version, (begin, end, busy) in self._steps.items()
            if end > begin and (version != first or len(self._steps) == 1)
        ]
        return statistics.median(shares) if shares else None

    def formula(self, spec: str | None) -> float | None:
        """The idle share for stages of equal length and messages that take no time; None if there is no formula."""
        try:
            strategy = parse_strategy(spec or "")
        except UsageError:
            return None
        match strategy:
            case Pipeline(shared=False, stages=stages) | Mesh(pipeline=stages) if self._microbatches:
                means = PassTimes(*(total / count if count else 0.0 for total, count in self._seconds.values()))
                times = means if means.whole else EVEN
                return bubble(strategy.schedule, stages, self._microbatches, max(1, self._stages // stages), times)
        return None
