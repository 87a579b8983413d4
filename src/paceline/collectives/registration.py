"""Registers the backend "paceline" with torch.distributed. Torch calls this when it is imported."""

from __future__ import annotations

import datetime
import functools
import os
import sys
from typing import Any

from paceline.config import Launch
from paceline.requirements import unmet


def register() -> None:
    """Registers the backend; its modules are imported by `init_process_group`."""
    if unmet():  # torch is being imported, which must not fail; a program that imports Paceline afterwards is told
        for name in [name for name in sys.modules if name.split(".")[0] == "paceline"]:
            del sys.modules[name]
        return
    if Launch.VARIABLE in os.environ:  # in a worker; its script may make an optimizer before it joins the team
        from paceline.cluster.compiler import import_compiler_late

        import_compiler_late()
    from torch import distributed

    if not distributed.is_available() or "PACELINE" in distributed.Backend._plugins:
        return
    distributed.Backend.register_backend("paceline", _create, extended_api=True, devices=["cpu"])
    _extend(distributed)


def _extend(distributed: Any) -> None:
    """Lets functions of torch.distributed that ask for gloo take groups of this backend, too."""
    from torch.distributed import distributed_c10d

    barrier, set_timeout = distributed_c10d.monitored_barrier, distributed_c10d._set_pg_timeout

    def ours(group: Any) -> Any:
        """The group, if it is one of this backend."""
        chosen = group if group is not None else distributed_c10d.GroupMember.WORLD
        return chosen if type(chosen).__name__ == "PacelineProcessGroup" else None

    @functools.wraps(barrier)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        own = ours(group)
        if own is None:
            return barrier(group, timeout, wait_all_ranks)
        if isinstance(timeout, float):
            timeout = datetime.timedelta(seconds=timeout)
        if timeout is not None:
            distributed_c10d._check_valid_timeout(timeout)
        return own.monitored_barrier(timeout, wait_all_ranks)

    @functools.wraps(set_timeout)
    def set_pg_timeout(timeout: datetime.timedelta, group: Any = None) -> None:
        own = ours(group)
        own.set_timeout(timeout) if own is not None else set_timeout(timeout, group)

    distributed.monitored_barrier = distributed_c10d.monitored_barrier = monitored_barrier
    distributed_c10d._set_pg_timeout = set_pg_timeout


def _create(given: Any, _: Any) -> Any:
    from paceline.collectives.process_group import PacelineProcessGroup
    from paceline.observation import observer

    # With cpu:paceline,cuda:nccl torch keeps only the group that we return, so that group creates the others; torch
    # does not pass their names.
    spec = sys._getframe(1).f_locals.get("backend_config")
    devices = spec.get_device_backend_map() if spec is not None else {}
    others = {device: name for device, name in devices.items() if device != "cpu" and name != "paceline"}
    group = PacelineProcessGroup(given.store, given.group_rank, given.group_size, given.timeout, others)
    group.options.global_ranks_in_group = list(given.global_ranks_in_group)
    if observer.wanted():
        observer.start(given.store, given.group_rank, given.group_size, one_machine=group.on_one_machine)
    return group
