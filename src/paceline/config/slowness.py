"""Artificial slowness of workers, for tests and demonstrations."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable

import msgspec

from paceline.config.checks import DECIMAL, NUMBER
from paceline.errors import UsageError

_EXPONENTIAL = re.compile(rf"^(?:(?P<shift>{DECIMAL})\+)?exp\((?P<mean>{DECIMAL})\)$")
_PARETO = re.compile(rf"^pareto\((?P<least>{DECIMAL}),(?P<shape>{DECIMAL})\)$")


class Slowness(msgspec.Struct, frozen=True, kw_only=True):
    """Artificial slowness of a worker: a factor on its computing, or a drawn length of each step."""

    factor: float = 1.0
    """The factor on computing times."""
    shift: float = 0.0
    """The least length of a drawn step, in seconds."""
    mean: float = 0.0
    """The mean of the exponential part of a drawn step, in seconds."""
    least: float = 0.0
    """The smallest value of a Pareto-distributed step, in seconds."""
    shape: float = 0.0
    """The shape of that distribution: the smaller, the heavier its tail."""
    where: str = "computing"
    """The slow part of a step: `computing` as a whole, `loading`, `forward`, `backward`, or `link`."""

    def seconds(self, computing: float, source: random.Random) -> float:
        """The length of a step that took `computing` seconds; never less than that."""
        drawn = self.shift
        if self.mean:
            drawn += source.expovariate(1 / self.mean)
        if self.least:
            drawn += self.least * source.paretovariate(self.shape)
        return max(computing * self.factor, drawn)


def parse_slowness(specs: Iterable[str], workers: int, room: int = 0) -> dict[int, Slowness]:
    """`1:4`, `all:exp(0.1)`, `all:0.05+exp(0.05)`, `2:pareto(0.02,2.5)`, `1:3@backward` by rank; a later one wins.

    room: the number of workers that there may be later; `all` includes them.
    """
    slow: dict[int, Slowness] = {}
    for spec in specs:
        who, _, what = spec.replace(" ", "").partition(":")
        if who == "all":
            ranks: Iterable[int] = range(max(workers, room))
        elif who.isdecimal() and int(who) < workers:
            ranks = [int(who)]
        else:
            raise UsageError(f"--slow '{spec}': '{who}' is not a rank from 0 to {workers - 1}, nor 'all'")
        for rank in ranks:
            slow[rank] = _slowness(spec, what)
    return slow


_WHERE = ("computing", "loading", "forward", "backward", "link")


def _slowness(spec: str, what: str) -> Slowness:
    what, at, where = what.partition("@")
    if at and where not in _WHERE:
        raise UsageError(f"--slow '{spec}': '{where}' is not a part of a step; there are {', '.join(_WHERE)}")
    where = where or _WHERE[0]
    if NUMBER.match(what) and 1 <= float(what) < math.inf:
        return Slowness(factor=float(what), where=where)
    if (match := _EXPONENTIAL.match(what)) and 0 < float(match["mean"]) < math.inf:
        return Slowness(shift=float(match["shift"] or 0), mean=float(match["mean"]), where=where)
    if (match := _PARETO.match(what)) and float(match["least"]) > 0 and float(match["shape"]) > 0:
        return Slowness(least=float(match["least"]), shape=float(match["shape"]), where=where)
    raise UsageError(
        f"--slow '{spec}': '{what}' is neither a factor of at least 1, exp(MEAN), SHIFT+exp(MEAN) "
        "nor pareto(LEAST,SHAPE), in seconds"
    )
