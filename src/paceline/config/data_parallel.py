"""Strategies under which every worker has a whole model."""

from __future__ import annotations

from typing import ClassVar

from paceline.config.checks import listed
from paceline.config.strategy import Strategy
from paceline.errors import UsageError
from paceline.topologies import choices


class AllReduce(Strategy, frozen=True, kw_only=True):
    """Every worker contributes its gradient to one mean, and all go on with the same new version."""

    spec: ClassVar[str] = "all-reduce"
    topology: str = "auto"
    """The shape that messages between machines take; inside a machine gradients meet in shared memory."""

    def __post_init__(self) -> None:
        if self.topology not in choices():
            raise UsageError(
                f"option 'topology' of strategy 'all-reduce' is '{self.topology}'; it must be {listed(choices())}"
            )


class Sync(Strategy, frozen=True, kw_only=True):
    """A parameter server that updates once all workers have pushed."""

    spec: ClassVar[str] = "sync"


class KSync(Strategy, frozen=True, kw_only=True):
    """It updates once K workers have pushed; the others are cancelled."""

    spec: ClassVar[str] = "k-sync"
    k: int


class KBatchSync(Strategy, frozen=True, kw_only=True):
    """It updates once K minibatches of this version have come, from anyone; then all start on the new version."""

    spec: ClassVar[str] = "k-batch-sync"
    k: int


class Async(Strategy, frozen=True, kw_only=True):
    """It updates with every push; nobody waits for anybody."""

    spec: ClassVar[str] = "async"


class KAsync(Strategy, frozen=True, kw_only=True):
    """It updates once K workers have pushed, and those wait for it; the others go on, stale."""

    spec: ClassVar[str] = "k-async"
    k: int


class KBatchAsync(Strategy, frozen=True, kw_only=True):
    """It updates once K minibatches have come, of whatever version; nobody waits."""

    spec: ClassVar[str] = "k-batch-async"
    k: int


class Ssp(Strategy, frozen=True, kw_only=True):
    """As async, but nobody gets more than `s` steps ahead of the slowest."""

    spec: ClassVar[str] = "ssp"
    s: int


class Groups(Strategy, frozen=True, kw_only=True):
    """Workers in groups that agree by all-reduce, and push as one worker under the policy `between`."""

    spec: ClassVar[str] = "groups"
    size: int
    between: str = "async"
    staleness: int | None = None
    """A group's gradient that is older is dropped."""


class Adaptive(Strategy, frozen=True, kw_only=True):
    """A policy with a K, which grows from `start` as the loss falls."""

    spec: ClassVar[str] = "adaptive"
    of: str = "k-async"
    start: int = 1


class Auto(Strategy, frozen=True, kw_only=True):
    """A parameter server that watches `steps` steps of every worker, and then chooses its policy."""

    spec: ClassVar[str] = "auto"
    steps: int = 12
