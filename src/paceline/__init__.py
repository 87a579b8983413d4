"""Train PyTorch models over many devices and machines at the pace of the pack, not of the slowest rider."""

from paceline.config import AllReduce, Timeouts
from paceline.errors import (
    JoinError,
    Mismatch,
    PacelineError,
    TeamError,
    TeamTimeout,
    UsageError,
    WorkerLost,
)
from paceline.team import Team, join

__all__ = [
    "AllReduce",
    "JoinError",
    "Mismatch",
    "PacelineError",
    "Team",
    "TeamError",
    "TeamTimeout",
    "Timeouts",
    "UsageError",
    "WorkerLost",
    "join",
]
