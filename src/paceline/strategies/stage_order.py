"""The order in which the stages of a pipeline go through its workers on several machines, by the links between these.

The workers of a stage, which share its layers, have consecutive ranks, and so are on one machine where ranks are given
machine by machine. Neighbouring stages send each other values and gradients of every microbatch: so they are on one
machine if they can be, and else where the link between their machines is fast. The first stage is where rank 0 is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from paceline.collectives.links import LinkMatrix
from paceline.config.units import size

_MESSAGE = 1 << 20
"""Bytes of the message by whose time links are compared."""
_GAIN = 0.8
"""An order must take less than this share of the time of the ranks' own order: links are measured with some noise."""
_FEW = 8
"""Stages of which all orders are tried."""


def stage_order(stages: Sequence[Sequence[int]], links: LinkMatrix, say: Callable[[str], None]) -> list[int]:
    """The places of the stages, in their order; `stages` has the machine of each place, by replica."""
    own = list(range(len(stages[0])))
    if len(own) > _FEW:
        return own
    orders = ([0, *rest] for rest in itertools.permutations(own[1:]))
    best = min(orders, key=lambda order: _times(order, stages, links))
    before, after = _times(own, stages, links), _times(best, stages, links)
    if not (after[0] < _GAIN * before[0] or (after[0] <= before[0] and after[1] < _GAIN * before[1])):
        return own
    ways = [
        f"{size(links.bandwidth[machines[a]][machines[b]])}/s"
        for machines in stages[:1]
        for a, b in itertools.pairwise(best)
        if machines[a] != machines[b]
    ]
    say(
        f"by the measured links the stages go through the workers in the order {'+'.join(map(str, best))} (over "
        f"{', '.join(ways)}); order={'+'.join(map(str, own))} keeps that of the ranks"
    )
    return best


def _times(order: Sequence[int], stages: Sequence[Sequence[int]], links: LinkMatrix) -> tuple[float, float]:
    """Seconds of a message over the slowest link between neighbours, and over all of them."""
    seconds = [
        links.latency[one][other] + _MESSAGE / links.bandwidth[one][other] if one != other else 0.0
        for machines in stages
        for a, b in itertools.pairwise(order)
        for one, other in ((machines[a], machines[b]), (machines[b], machines[a]))
    ]
    return max(seconds, default=0.0), sum(seconds)
