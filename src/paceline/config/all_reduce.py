"""The all-reduce strategy."""

from __future__ import annotations

from paceline.config.strategy import Strategy
from paceline.topologies import choices


class AllReduce(Strategy):
    """Every worker contributes its gradient to one mean, and all go on with the same new version."""

    spec = "all-reduce"
    topology: str = "auto"
    """The shape of messages between machines; inside a machine gradients are summed in shared memory."""

    def __post_init__(self) -> None:
        self.check_option("topology", choices())
