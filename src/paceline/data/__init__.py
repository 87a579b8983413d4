"""The assignment of samples to workers: ledger, split of epochs and batches, and the loaders on top of them."""

from typing import TYPE_CHECKING, Any

from paceline.data.balance import Balancer

if TYPE_CHECKING:
    from paceline.data.loader import TeamLoader
    from paceline.data.sharded_dataset import ShardedDataset

__all__ = ["Balancer", "ShardedDataset", "TeamLoader"]


def __getattr__(name: str) -> Any:  # these need torch, which a relay does not load
    if name == "TeamLoader":
        from paceline.data.loader import TeamLoader

        return TeamLoader
    if name == "ShardedDataset":
        from paceline.data.sharded_dataset import ShardedDataset

        return ShardedDataset
    raise AttributeError(name)
