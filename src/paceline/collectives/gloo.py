"""gloo as torch has it, told through which of a machine's addresses to talk."""

from __future__ import annotations

import datetime
from typing import Any

from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]


def open_gloo(store: Store, rank: int, size: int, host: str, timeout: datetime.timedelta) -> Any:
    """A gloo group of its own, which torch.distributed does not know; its connections close when it is let go of."""
    kind: Any = ProcessGroupGloo  # of which torch's types do not tell all
    options = kind._Options()
    # Left to itself, gloo asks the machine's name for an address, which may be one that others cannot reach.
    options._devices = [kind.create_device(hostname=host)]
    options._timeout = timeout
    return kind(store, rank, size, options)
