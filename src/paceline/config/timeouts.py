"""How long to wait."""

from __future__ import annotations

from typing import Annotated

import msgspec

Positive = Annotated[float, msgspec.Meta(gt=0)]


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long to wait, in seconds. Every wait in Paceline ends by one of these."""

    join: Positive = 120.0
    """Until all members of the team are there, once this one is."""
    barrier: Positive = 300.0
    """For the other workers, at an update, a barrier or the start of an epoch."""
    notice: Positive = 5.0
    """After which a waiting worker says for whom it waits."""
    stop: Positive = 2.0
    """For the others to end by themselves after one has failed, before they are told to."""
