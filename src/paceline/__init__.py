"""Train PyTorch models over many devices and machines at the pace of the pack, not of the slowest rider."""

import sys
from typing import TYPE_CHECKING, Any

from paceline.collectives.registration import register as _register
from paceline.config import AllReduce, Mesh, Pipeline, Tensor, Timeouts
from paceline.errors import (
    JoinError,
    Mismatch,
    PacelineError,
    ServerLost,
    TeamError,
    TeamTimeout,
    UsageError,
    WorkerLost,
)
from paceline.policies import Adaptive, Async, Auto, Backup, Groups, KAsync, KBatchAsync, KBatchSync, KSync, Ssp, Sync

if TYPE_CHECKING:
    from paceline.team import Team, join

if "torch" in sys.modules:  # otherwise torch will ask for it, once it is imported
    _register()

__all__ = [
    "Adaptive",
    "AllReduce",
    "Async",
    "Auto",
    "Backup",
    "Groups",
    "JoinError",
    "KAsync",
    "KBatchAsync",
    "KBatchSync",
    "KSync",
    "Mesh",
    "Mismatch",
    "PacelineError",
    "Pipeline",
    "ServerLost",
    "Ssp",
    "Sync",
    "Team",
    "TeamError",
    "TeamTimeout",
    "Tensor",
    "Timeouts",
    "UsageError",
    "WorkerLost",
    "join",
]


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is asked for: a launcher that only starts workers does without."""
    if name in ("Team", "join"):
        from paceline import team

        return getattr(team, name)
    raise AttributeError(f"module 'paceline' has no attribute '{name}'")
