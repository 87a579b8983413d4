"""The one place that opens gloo groups: through which address, with which timeouts, known to torch or not.

A group that is let go of closes its connections, so every peer that waits for this member gets an error at once.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from paceline.cluster.membership import current

_BACKEND = "paceline-gloo"


def open_gloo(
    store: Store,
    rank: int,
    size: int,
    host: str | None,
    timeout: datetime.timedelta,
    later: datetime.timedelta | None = None,
) -> Any:
    """A gloo group that torch.distributed does not know.

    host: this machine's address, as the others reach it; None lets gloo choose one by the machine's name, which may be
    one that others cannot reach. timeout: until all members are connected, and of every operation unless `later` is
    given for these.
    """
    kind: Any = ProcessGroupGloo  # torch's types leave much of it out
    if host is None:
        group = kind(store, rank, size, timeout)
    else:
        options = kind._Options()
        options._devices = [kind.create_device(hostname=host)]
        options._timeout = timeout
        group = kind(store, rank, size, options)
    if later is not None:
        group._set_default_timeout(later)
    return group


def init_default_group(device: torch.device, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
    """Makes torch's default group: on CPUs gloo on the team's addresses, else the device's own backend."""
    backend = distributed.get_default_backend_for_device(device)
    if device.type == "cpu":
        backend = _BACKEND
        if backend.upper() not in distributed.Backend._plugins:
            distributed.Backend.register_backend(backend, _create, devices=["cpu"])
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def _create(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    """Called by torch.distributed for its default group, and for every group that a script makes besides."""
    members = current()
    assert members is not None  # a team is joined before it trains
    return open_gloo(store, rank, size, members.hosts[members.machine], timeout)
