"""Which of a worker's steps are long: judged by its own quick steps, so that one long step makes no other one long."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

QUICK, _QUICKEST = 0.25, 0.05
"""Quantiles of a worker's steps: a quick one is not affected by slowness of most steps."""
_LONGER = 0.35
"""Share of a quick step by which a long one is longer, at least."""
_SPREADS = 4.0
"""Spreads of quick steps by which a long one is longer, at least."""
_SAME = 0.3
"""Share of the usual excess of long steps; what is less is of another kind."""


def excess(lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds by which each long step is longer than a quick one; 0 for all others."""
    quick = float(np.quantile(lengths, QUICK))
    spread = quick - float(np.quantile(lengths, _QUICKEST))
    more = lengths - quick
    more[more < max(_LONGER * quick, _SPREADS * spread)] = 0.0
    if more.any():
        # Half of the excess is in steps of at least that excess.
        ordered = np.sort(more)[::-1]
        half = ordered[np.searchsorted(np.cumsum(ordered), more.sum() / 2)]
        more[more < _SAME * half] = 0.0
    return more
