"""Memory fences for processors that let other cores see writes in another order, such as ARM's.

A member publishes data in shared memory by a count that it writes afterwards: it needs a fence before the count, and
whoever reads the count one before the data. x86-64 and s390x keep the order by themselves.

Python has no fence, but its locks have: releasing one is a store-release and acquiring one a load-acquire, and ARMv8
orders an access before a store-release, that before a later load-acquire, and that before a later access.
"""

from __future__ import annotations

import platform
from threading import Lock

WEAK = platform.machine() not in ("x86_64", "i686", "s390x")
"""True if this processor needs fences."""


def fence() -> None:
    """Orders all accesses of this thread before it and all after it."""
    lock = Lock()
    lock.acquire()
    lock.release()
    lock.acquire()
