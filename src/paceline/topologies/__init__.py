"""Pure: the topologies of collectives, and one cost model.

Collectives, simulator and planner choose by the same costs. With N ranks, S bytes, bandwidth B:

| topology | messages that a rank sends in an all-reduce | time of an all-reduce | suited to |
|---|---|---|---|
| ring | 2(N−1) | 2(N−1)(latency + S/(N·B)) | large tensors |
| tree | 2 to 4, at any N | about 2·floor(log2 N)(latency + S/B) | small tensors, many ranks |
| halving-doubling | 2·log2 N | 2·log2 N·latency + 2(N−1)/N·S/B | all sizes, when N is a power of two |
| hub | 1, but N−1 at the hub | 2·latency + 2(N−1)·S/B | few ranks, or a hub with a faster link |
| direct | 2(N−1), all at once | 2·latency + 2(N−1)/N·S/B | small tensors, on a network that joins every pair |
"""

from paceline.topologies.costs import ExchangeCost, Link, Traffic, sharded_servers
from paceline.topologies.registry import TOPOLOGIES, Topology, choices, quickest, seconds, with_costs

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
