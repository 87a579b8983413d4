"""Collective algorithms over a channel, one file per topology.

The files are those of `paceline.topologies.TOPOLOGIES`, which has one line per topology: `halving-doubling` is in
`halving_doubling.py`. Each file has `all_reduce` and as many of the other operations as suit it. All functions work in
place on flat, contiguous tensors of one dtype, and all ranks must call the same one in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from paceline.errors import UsageError
from paceline.topologies import TOPOLOGIES

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


def operations(topology: str) -> dict[str, Callable[..., None]]:
    """The operations that the file of a topology defines."""
    module = import_module(f"{__name__}.{topology.replace('-', '_')}")
    return {name: getattr(module, name) for name in OPERATIONS if hasattr(module, name)}


ALGORITHMS: dict[str, dict[str, Callable[..., None]]] = {name: operations(name) for name in TOPOLOGIES}
"""Topology, operation, function."""


def find(topology: str, operation: str) -> Callable[..., None]:
    """The function for an operation in a topology."""
    if operation not in OPERATIONS:
        raise UsageError(f"there is no operation {operation!r}; there are {', '.join(OPERATIONS)}")
    if topology not in ALGORITHMS:
        raise UsageError(f"there is no topology {topology!r}; there are {', '.join(ALGORITHMS)}")
    if operation not in ALGORITHMS[topology]:
        having = [name for name, operations in ALGORITHMS.items() if operation in operations]
        raise UsageError(f"the topology {topology} has no {operation}; these have: {', '.join(having)}")
    return ALGORITHMS[topology][operation]
