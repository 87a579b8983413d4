"""Compares runs: which is the best, by how much, and on what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.config.units import duration

_LOSSES = ("loss", "train_loss", "training_loss", "val_loss")
_CLOSE = 1.02
"""Ratio up to which two runs count as equal."""


def compare(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The winner among the facts of runs: by the time to the loss that all reach, else by throughput."""
    reached = _by_loss(runs)
    if reached is not None:
        metric, level, seconds = reached
        order = sorted(range(len(runs)), key=seconds.__getitem__)
        best, second = seconds[order[0]], seconds[order[1]]
        words = _words(runs, order, second / best if best > 0 else 1.0)
        on = f"the {metric} of {level:.3g}, which all runs reach"
        sentence = f"{words} to {on}: {duration(best)}, against {duration(second)}"
        return {"winner": order[0], "sentence": f"{sentence}.", "seconds_to_loss": seconds, "level": level}
    rates = [run["samples_per_second"] or 0.0 for run in runs]
    order = sorted(range(len(runs)), key=lambda number: -rates[number])
    best, second = rates[order[0]], rates[order[1]]
    if not second:
        return {"winner": None, "sentence": "", "seconds_to_loss": None, "level": None}
    words = _words(runs, order, best / second)
    sentence = f"{words} by throughput: {best:,.0f} samples per second, against {second:,.0f}"
    return {"winner": order[0], "sentence": f"{sentence}.", "seconds_to_loss": None, "level": None}


def _words(runs: Sequence[dict[str, Any]], order: Sequence[int], ratio: float) -> str:
    first, second = runs[order[0]]["name"], runs[order[1]]["name"]
    if ratio < _CLOSE:
        return f"{first} and {second} are equally quick"
    return f"{first} is the quickest, {ratio:.2f} times as quick as the next, {second},"


def _by_loss(runs: Sequence[dict[str, Any]]) -> tuple[str, float, list[float]] | None:
    """The metric, the level that all runs reach, and the seconds of each to it; None without a common loss."""
    for name in _LOSSES:
        curves = [run["curves"]["metrics"].get(name) for run in runs]
        if any(curve is None or len(curve["values"]) < 2 for curve in curves):
            continue
        smooth = [_smoothed(np.array(curve["values"])) for curve in curves]
        level = max(float(values.min()) for values in smooth)
        if level >= min(float(values[0]) for values in smooth):
            return None  # one run was there from the start: it says nothing of speed
        seconds = []
        for curve, values in zip(curves, smooth, strict=True):
            seconds.append(float(curve["seconds"][int(np.argmax(values <= level))]))
        return name, level, seconds
    return None


def _smoothed(values: Any) -> Any:
    """Means over a window that grows with the curve, as the page draws them."""
    half = len(values) // 16
    if half < 1:
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    place = np.arange(len(values))
    reach = np.minimum(half, np.minimum(place, len(values) - 1 - place))
    return (sums[place + reach + 1] - sums[place - reach]) / (2 * reach + 1)
