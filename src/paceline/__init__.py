"""Train PyTorch models over many devices and machines at the pace of the pack, not of the slowest rider."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from paceline.requirements import check_requirements as _check_requirements
from paceline.requirements import unmet as _unmet

_check_requirements()  # before anything that an older Python or torch cannot read

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
    from paceline.launcher.finished_run import Run
    from paceline.launcher.function import last_run, launch
    from paceline.team import Team, join

if "torch" in sys.modules and not _unmet():  # otherwise torch will ask for it, once it is imported
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
    "Run",
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
    "last_run",
    "launch",
]

_LATE = {
    "Run": "paceline.launcher.finished_run",
    "Team": "paceline.team",
    "join": "paceline.team",
    "last_run": "paceline.launcher.function",
    "launch": "paceline.launcher.function",
}
"""Modules of the names that are imported when they are asked for: most of them need torch, and few scripts use all."""


def __getattr__(name: str) -> Any:
    if name in _LATE:
        if _LATE[name] == "paceline.team":
            importlib.import_module("torch")
        _check_requirements()
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute '{name}'")
