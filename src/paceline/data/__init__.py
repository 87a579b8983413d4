"""Which worker trains on which samples: the split of every epoch and batch, and loaders made of it."""

from paceline.data.balance import Balancer
from paceline.data.loader import TeamLoader

__all__ = ["Balancer", "TeamLoader"]
