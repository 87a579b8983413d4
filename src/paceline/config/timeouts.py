"""Timeouts of all waits."""

from __future__ import annotations

from typing import Annotated

import msgspec

Positive = Annotated[float, msgspec.Meta(gt=0)]


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts, in seconds. Every wait in Paceline ends by one of these."""

    join: Positive = 120.0
    """Until all members of the team have joined, counted from this one's join."""
    barrier: Positive = 300.0
    """For other workers, at an update, a barrier or the start of an epoch."""
    notice: Positive = 5.0
    """Until a waiting worker prints which workers it waits for."""
    stop: Positive = 2.0
    """For the other processes to end by themselves after one has failed; then they are stopped."""
