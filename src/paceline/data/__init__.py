"""Which worker trains on which samples: the split of every epoch and batch, and loaders made of it."""

from typing import TYPE_CHECKING, Any

from paceline.data.balance import Balancer

if TYPE_CHECKING:
    from paceline.data.loader import TeamLoader

__all__ = ["Balancer", "TeamLoader"]


def __getattr__(name: str) -> Any:  # loaders need torch, which a relay does without
    if name == "TeamLoader":
        from paceline.data.loader import TeamLoader

        return TeamLoader
    raise AttributeError(name)
