"""Makes the backend "paceline" known to torch.distributed. Torch itself calls this when it is imported."""

from __future__ import annotations

import datetime
from typing import Any


def register() -> None:
    """Let `init_process_group("paceline")` find us; what it needs is loaded when it is called."""
    from torch import distributed

    if distributed.is_available() and "PACELINE" not in distributed.Backend._plugins:
        distributed.Backend.register_backend("paceline", _create, devices=["cpu"])


def _create(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    from paceline.collectives.process_group import create

    return create(store, rank, size, timeout)
