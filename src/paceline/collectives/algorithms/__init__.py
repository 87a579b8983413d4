"""Collective algorithms, each written once over a channel. A new topology is one file and one line here.

| topology | messages that a rank sends in an all-reduce | it is for |
|---|---|---|
| ring | 2(N−1) | large tensors |
| tree | 2 to 4, at any N | small tensors, many ranks |
| halving-doubling | 2·log2 N | all sizes, when N is a power of two |
| hub | 1, but N−1 at the hub | few ranks, or a hub with a faster link |
| direct | 2(N−1), all at once | small tensors, on a network that joins every pair |

`costs` says what each one takes. All functions work in place on flat, contiguous tensors, of one dtype, and all ranks
must call the same one in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from paceline.collectives.algorithms import direct, halving_doubling, hub, ring, tree
from paceline.collectives.algorithms.messages import Combine
from paceline.errors import UsageError

OPERATIONS = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
)


def _operations(module: ModuleType) -> dict[str, Callable[..., None]]:
    return {name: getattr(module, name) for name in OPERATIONS if hasattr(module, name)}


ALGORITHMS: dict[str, dict[str, Callable[..., None]]] = {
    "ring": _operations(ring),
    "tree": _operations(tree),
    "halving-doubling": _operations(halving_doubling),
    "hub": _operations(hub),
    "direct": _operations(direct),
}
"""Topology, operation, function."""


def find(topology: str, operation: str) -> Callable[..., None]:
    """The function that does an operation in a topology."""
    if operation not in OPERATIONS:
        raise UsageError(f"there is no operation {operation!r}; there are {', '.join(OPERATIONS)}")
    if topology not in ALGORITHMS:
        raise UsageError(f"there is no topology {topology!r}; there are {', '.join(ALGORITHMS)}")
    if operation not in ALGORITHMS[topology]:
        having = [name for name, operations in ALGORITHMS.items() if operation in operations]
        raise UsageError(f"the topology {topology} has no {operation}; these have: {', '.join(having)}")
    return ALGORITHMS[topology][operation]


__all__ = ["ALGORITHMS", "OPERATIONS", "Combine", "find"]
