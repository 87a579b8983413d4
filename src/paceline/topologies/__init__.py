"""Pure: the topologies of collectives, and one cost model.

Collectives, simulator and planner choose by the same costs. With N ranks, S bytes, bandwidth B:

| topology | messages that a rank sends in an all-reduce | time of an all-reduce | suited to |
|---|---|---|---|
| ring | 2(N−1) | 2(N−1)(latency + S/(N·B)) | large tensors |
| tree | 2 to 4, at any N | about 2·floor(log2 N)(latency + S/B) | small tensors, many ranks |
| halving-doubling | 2·log2 N | 2·log2 N·latency + 2(N−1)/N·S/B | all sizes, when N is a power of two |
| hub | 1, but N−1 at the hub | 2·latency + 2(N−1)·S/B | few ranks, or a hub with a faster link |
| direct | 2(N−1), all at once | 2·latency + 2(N−1)/N·S/B | small tensors, on a network that joins every pair |

A new topology is one file with its algorithm, `collectives/algorithms/NAME.py`, and one line in `TOPOLOGIES` with its
cost. Configuration, command line, collectives, simulator and planner read this list and no other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from paceline.errors import UsageError
from paceline.topologies import halving_doubling, tree
from paceline.topologies.costs import ExchangeCost, Link, Traffic, sharded_servers

__all__ = [
    "TOPOLOGIES",
    "ExchangeCost",
    "Link",
    "Topology",
    "Traffic",
    "choices",
    "quickest",
    "seconds",
    "sharded_servers",
    "with_costs",
]


@dataclasses.dataclass(frozen=True)
class Topology:
    """The shape that the messages of a collective take."""

    cost: Callable[[int], ExchangeCost] | None = None
    """The cost of an all-reduce over N > 1 ranks. Without it the topology runs if asked for, but is never chosen."""
    handicap: float = 1.1
    """Factor on the cost when topologies are compared: adding, which the cost leaves out, follows each message."""


TOPOLOGIES: dict[str, Topology] = {
    # The ring alone is run in small messages, so that adding overlaps with the next message.
    "ring": Topology(lambda size: ExchangeCost(2 * (size - 1), 2 * (size - 1) / size), handicap=1.0),
    "tree": Topology(tree.cost),
    "halving-doubling": Topology(halving_doubling.cost),
    "hub": Topology(lambda size: ExchangeCost(2, 2 * (size - 1))),
    "direct": Topology(lambda size: ExchangeCost(2, 2 * (size - 1) / size)),
}


def choices() -> tuple[str, ...]:
    """The names that a strategy's `topology` may have."""
    return ("auto", *TOPOLOGIES)


def with_costs() -> list[str]:
    """The topologies that have a cost, among which `quickest` chooses."""
    return [name for name, topology in TOPOLOGIES.items() if topology.cost is not None]


def seconds(topology: str, ranks: int, size: float, link: Link) -> float:
    """Seconds of an all-reduce of `size` bytes over `ranks` ranks.

    Exact if all chunks have one length; otherwise a message may be one element longer.
    """
    cost = TOPOLOGIES.get(topology, Topology()).cost
    if cost is None:
        raise UsageError(f"there is no formula for the topology {topology!r}; there are {', '.join(with_costs())}")
    return cost(ranks).seconds(size, link) if ranks > 1 else 0.0


def quickest(ranks: int, size: float, link: Link, ring: Link | None = None) -> str:
    """The topology chosen for an all-reduce of `size` bytes; `ring` is the slowest link of the ring if it differs."""

    def key(name: str) -> tuple[float, str]:
        used = ring if ring is not None and name == "ring" else link
        return TOPOLOGIES[name].handicap * seconds(name, ranks, size, used), name

    return min(with_costs(), key=key)
