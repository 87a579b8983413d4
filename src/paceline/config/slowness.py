"""Artificial slowness of workers, for tests and demonstrations."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
import numpy as np

from paceline.config.checks import NUMBER
from paceline.config.distributions import FORMS, parse_distribution
from paceline.errors import UsageError


class Slowness(msgspec.Struct, frozen=True, kw_only=True):
    """Artificial slowness of a worker: a factor on its computing, or a drawn length of each step."""

    factor: float = 1.0
    """The factor on computing times."""
    length: str = ""
    """The distribution of a step's length in seconds, if it is drawn."""
    where: str = "computing"
    """The slow part of a step: `computing` as a whole, `loading`, `forward`, `backward`, or `link`."""

    def seconds(self, computing: float, source: np.random.Generator) -> float:
        """The length of a step that took `computing` seconds; never less than that."""
        drawn = float(parse_distribution(self.length).draw(source, 1)[0]) if self.length else 0.0
        return max(computing * self.factor, drawn)


def parse_slowness(specs: Iterable[str], workers: int, room: int = 0) -> dict[int, Slowness]:
    """`1:4`, `all:exp(0.1)`, `2:pareto(0.02,2.5)` or another distribution, `1:3@backward` by rank; a later one wins.

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
            raise UsageError(f"--slow is '{spec}'; '{who}' is not a rank from 0 to {workers - 1}, nor 'all'")
        for rank in ranks:
            slow[rank] = _slowness(spec, what)
    return slow


_WHERE = ("computing", "loading", "forward", "backward", "link")


def _slowness(spec: str, what: str) -> Slowness:
    what, at, where = what.partition("@")
    if at and where not in _WHERE:
        raise UsageError(f"--slow is '{spec}'; '{where}' is not a part of a step; there are {', '.join(_WHERE)}")
    where = where or _WHERE[0]
    if NUMBER.match(what) and 1 <= float(what) < math.inf:
        return Slowness(factor=float(what), where=where)
    try:
        if not NUMBER.match(what):
            parse_distribution(what)
            return Slowness(length=what, where=where)
    except UsageError:
        pass
    allowed = f"a factor of at least 1 nor one of {FORMS}, in seconds"
    raise UsageError(f"--slow is '{spec}'; '{what}' is neither {allowed}")
