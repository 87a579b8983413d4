"""Rules by which the ends of workers' steps become updates, where closed forms and fast simulations are known."""

from __future__ import annotations

from enum import Enum

import msgspec


class Rule(Enum):
    """A regular pattern of updates. N is the number that a policy gives with it."""

    FRESH_WORKERS = "all workers start on each version, and the N-th of them to finish ends it"
    FRESH_MINIBATCHES = "all workers start on each version, and the N-th finished minibatch ends it"
    STALE_WORKERS = "an update needs pushes of N distinct workers, which wait for it; the others go on"
    STALE_MINIBATCHES = "every N-th push is an update, and no worker waits"
    BOUNDED = "every push is an update, and no worker is more than N steps ahead of the slowest"
    ASYNC_GROUPS = "groups of N workers are synchronous inside, and every push of a group is an update"


class Timing(msgspec.Struct, frozen=True):
    """The rule that a running policy follows."""

    rule: Rule
    number: int
