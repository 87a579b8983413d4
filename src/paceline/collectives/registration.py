"""Registers the backend "paceline" with torch.distributed. Torch calls this when it is imported."""

from __future__ import annotations

import datetime
import os
import sys
from typing import Any

from paceline.config import Launch


def register() -> None:
    """Registers the backend; its modules are imported by `init_process_group`."""
    if Launch.VARIABLE in os.environ:  # in a worker; its script may make an optimizer before it joins the team
        from paceline.cluster.process import import_compiler_late

        import_compiler_late()
    from torch import distributed

    if not distributed.is_available() or "PACELINE" in distributed.Backend._plugins:
        return
    from torch.distributed import distributed_c10d

    distributed.Backend.register_backend("paceline", _create, devices=["cpu"])
    original = distributed_c10d.monitored_barrier

    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        # torch raises for all backends but gloo.
        chosen: Any = group if group is not None else distributed_c10d.GroupMember.WORLD
        if getattr(chosen, "has_monitored_barrier", False):
            return chosen.monitored_barrier(timeout, wait_all_ranks)
        return original(group, timeout, wait_all_ranks)

    monitored_barrier.__doc__ = original.__doc__
    distributed.monitored_barrier = distributed_c10d.monitored_barrier = monitored_barrier


def _create(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    from paceline.collectives.process_group import PacelineProcessGroup

    # With cpu:paceline,cuda:nccl torch keeps only the group that we return, so that group creates the others; torch
    # does not pass their names.
    spec = sys._getframe(1).f_locals.get("backend_config")
    devices = spec.get_device_backend_map() if spec is not None else {}
    others = {device: name for device, name in devices.items() if device != "cpu" and name != "paceline"}
    return PacelineProcessGroup(store, rank, size, timeout, others)
