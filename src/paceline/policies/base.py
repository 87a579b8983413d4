"""What a policy is told, and what it answers.

A policy decides when the parameters are updated, with which gradients, who waits and who is cancelled. It is pure: it
knows no tensor, no clock and no connection, so that a server and a simulator can drive the same object.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from enum import Enum

import msgspec

from paceline.errors import UsageError


class Order(Enum):
    """What a worker is to do next."""

    STAY = "stay"
    """Go on with the next minibatch, on the same version."""
    RENEW = "renew"
    """Take the newest version, and go on."""
    WAIT = "wait"
    """Do nothing until the next order."""
    CANCEL = "cancel"
    """Leave the step that is under way: its gradient can no longer be used. Take the newest version, and go on."""


class Arrival(msgspec.Struct, frozen=True):
    """A gradient that has arrived."""

    ticket: int
    """By which it is called in decisions; never the same twice."""
    worker: int
    version: int
    """Of the parameters that it was computed on."""


class Decision(msgspec.Struct, frozen=True):
    """What follows from what happened."""

    reason: str
    use: tuple[Arrival, ...] = ()
    """Make the next version from the mean of these; if there are none, there is no update."""
    drop: tuple[Arrival, ...] = ()
    """Forget these."""
    orders: dict[int, Order] = {}
    """For workers, by rank. Those who are not named go on as they were."""
    together: tuple[Arrival, ...] = ()
    """These are of one group, which is complete now: they count as one from here on."""


class Policy(ABC):
    """One run's policy, and all it remembers."""

    k: int = 1
    """How many gradients make an update."""
    fresh_only = False
    """Whether a gradient counts only if it was computed on the newest version."""

    def __init__(self, workers: Iterable[int]) -> None:
        self.workers = set(workers)
        self.version = 0
        """How many updates there were."""
        self.held: list[Arrival] = []
        """Gradients that have come and are not used yet."""
        self.waiting: set[int] = set()
        """Who has been told to wait."""
        self.resting: set[int] = set()
        """Who has nothing to compute: the samples of an epoch are all given out."""
        if not self.workers:
            raise UsageError("a policy needs at least one worker")
        self._started_with = len(self.workers)

    @property
    def size(self) -> int:
        """How many workers there are."""
        return len(self.workers)

    @property
    def spare(self) -> bool:
        """Whether the run can go on when a worker is lost."""
        return self._started_with > 1

    @property
    def lockstep(self) -> bool:
        """Whether every update is made of one gradient from each worker, so that a run can be repeated exactly."""
        return False

    @property
    def cancels(self) -> bool:
        """Whether it may tell a worker to leave its step."""
        return self.fresh_only and not self.lockstep

    @property
    def computing(self) -> int:
        """How many workers may bring a gradient by themselves."""
        idle = len(self.waiting) + len(self.resting) - len(self.waiting & self.resting)
        return len(self.workers) - idle

    # -- what happens ------------------------------------------------------------------------------------------------

    @abstractmethod
    def arrive(self, push: Arrival) -> Decision:
        """A gradient has come."""

    def join(self, worker: int) -> Decision:
        """A worker has come. K stays what it was; it may be that only now so many can push."""
        self.workers.add(worker)
        return Decision(f"worker {worker} has come", orders={worker: Order.RENEW})

    def leave(self, worker: int) -> Decision:
        """A worker has gone; what it has pushed still counts. Those who waited for it may go on.

        K stays: with fewer than K workers left, an update is made of what they all bring, and of K again once enough
        have come.
        """
        for known in (self.workers, self.waiting, self.resting):
            known.discard(worker)
        return self.reconsider(f"worker {worker} has gone")

    def rest(self, worker: int) -> Decision:
        """A worker has nothing to compute for now."""
        self.resting.add(worker)
        return self.reconsider(f"worker {worker} has nothing to compute")

    def wake(self, worker: int) -> None:
        """It has something to compute again."""
        self.resting.discard(worker)

    def observe(self, loss: float) -> None:
        """The loss is this now; only a policy that adapts to it listens."""

    def reconsider(self, why: str) -> Decision:
        """Whether there is an update now, though no gradient has come: it may be that no more can come."""
        return Decision(why)

    # -- what policies are made of -----------------------------------------------------------------------------------

    def _hold(self, push: Arrival, order: Order, reason: str) -> Decision:
        self.held.append(push)
        if order is Order.WAIT:
            self.waiting.add(push.worker)
        return Decision(reason, orders={push.worker: order})

    def _drop(self, push: Arrival, reason: str) -> Decision:
        return Decision(reason, drop=(push,), orders={push.worker: Order.RENEW})

    def _update(self, reason: str, orders: dict[int, Order]) -> Decision:
        """Use all that is held, and let everybody go who waited."""
        use, self.held = tuple(self.held), []
        if self.waiting:
            orders = {**dict.fromkeys(sorted(self.waiting), Order.RENEW), **orders}
            self.waiting.clear()
        self.version += 1
        return Decision(reason, use=use, orders=orders)


def count(name: str, value: int, workers: int, what: str = "workers") -> int:
    """K, if it can be."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= workers:
        allowed = "it must be 1" if workers == 1 else f"it must be a whole number from 1 to {workers}"
        raise UsageError(f"{name} is {value!r}, with {workers} {what}; {allowed}")
    return value


class OfK(Policy):
    """K gradients make an update."""

    def __init__(self, workers: Iterable[int], k: int) -> None:
        super().__init__(workers)
        self.k = count("k", k, self.size)

    @property
    @abstractmethod
    def needed(self) -> int:
        """How many make one now."""


class OfWorkers(OfK):
    """They are of K distinct workers."""

    @property
    def needed(self) -> int:
        """Fewer than K once so many can not come any more: workers have gone, or the epoch has no samples left."""
        return max(1, min(self.k, len(self.held) + self.computing))

    @property
    def spare(self) -> bool:
        return self.k < self._started_with

    @property
    def lockstep(self) -> bool:
        return self.k == self._started_with
