"""Operations of a whole group, by the names that lectures give them.

    from paceline import collectives

    collectives.all_reduce(tensor)                       # through shared memory, or whatever is quickest
    collectives.all_reduce(tensor, "max", topology="ring")
    collectives.push(tensor, to=1);  collectives.pull(tensor, source=0)

They work on the default group of torch.distributed, or on the workers of the team that `paceline run` or torchrun has
started. A plain tensor is changed in place; for one that requires grad a new tensor is returned, and the gradient
travels back through the operation. So always go on with what is returned.

Whether a gradient is wanted must be the same on all members, except where the operation finds out by itself (scatter,
gather, all_gather, all_to_all).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.collectives.functions import (
        all_gather,
        all_reduce,
        all_to_all,
        attach,
        barrier,
        broadcast,
        empty,
        gather,
        map_reduce,
        observe,
        pull,
        push,
        reduce,
        reduce_scatter,
        scatter,
        wait,
    )

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
    """What needs torch is imported when it is asked for."""
    if name in __all__:
        from paceline.collectives import functions

        for known in __all__:  # from now on without this detour
            globals()[known] = getattr(functions, known)
        return globals()[name]
    raise AttributeError(f"module 'paceline.collectives' has no attribute '{name}'")
