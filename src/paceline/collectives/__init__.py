"""Collectives: operations of a whole group.

    from paceline import collectives

    collectives.all_reduce(tensor)                       # through shared memory, or in the fastest topology
    collectives.all_reduce(tensor, "max", topology="ring")
    collectives.push(tensor, to=1);  collectives.pull(tensor, source=0)

They run on the default group of torch.distributed, or on the workers of the team that `paceline run` or torchrun has
started. A plain tensor is changed in place; for one that requires grad a new tensor is returned, and `backward` goes
through the operation. So always use the returned tensor.

All members' tensors must require grad alike, except for scatter, gather, all_gather and all_to_all.
"""

# ruff: noqa: F403, F405

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.collectives.functions import *

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "attach",
    "barrier",
    "broadcast",
    "empty",
    "gather",
    "map_reduce",
    "observe",
    "pull",
    "push",
    "reduce",
    "reduce_scatter",
    "scatter",
    "wait",
]


def __getattr__(name: str) -> Any:
    """Imports the functions, which need torch, at the first use."""
    if name in __all__:
        from paceline.collectives import functions

        for known in __all__:  # from now on without this detour
            globals()[known] = getattr(functions, known)
        return globals()[name]
    raise AttributeError(f"module 'paceline.collectives' has no attribute '{name}'")
