"""The assignment of samples to workers: ledger, split of epochs and batches, and the loaders on top of them."""

from typing import TYPE_CHECKING, Any

from paceline.data.balance import Balancer

if TYPE_CHECKING:
    from paceline.data.loader import TeamLoader

__all__ = ["Balancer", "TeamLoader"]


def __getattr__(name: str) -> Any:  # loaders need torch, which a relay does not load
    if name == "TeamLoader":
        from paceline.data.loader import TeamLoader

        return TeamLoader
    raise AttributeError(name)
