"""What a policy is told, and what it answers.

A policy decides when the parameters are updated, with which gradients, who waits and who is cancelled. It is pure: it
knows no tensor, no clock and no wire, so that a server and a simulator can drive the same object.
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


class Push(msgspec.Struct, frozen=True):
    """A gradient that has arrived."""

    ticket: int
    """By which it is called in decisions; never the same twice."""
    worker: int
    version: int
    """Of the parameters that it was computed on."""


class Decision(msgspec.Struct, frozen=True):
    """What follows from what happened."""

    reason: str
    use: tuple[Push, ...] = ()
    """Make the next version from the mean of these; if there are none, there is no update."""
    drop: tuple[Push, ...] = ()
    """Forget these."""
    orders: dict[int, Order] = {}
    """For workers, by rank. Those who are not named go on as they were."""


class Policy(ABC):
    """One run's policy, and all it remembers. `version` is how many updates there were."""

    def __init__(self, workers: Iterable[int]) -> None:
        self.workers = set(workers)
        self.version = 0
        self.held: list[Push] = []
        """Gradients that have come and are not used yet."""
        self.waiting: set[int] = set()
        if not self.workers:
            raise UsageError("a policy needs at least one worker")

    @abstractmethod
    def arrive(self, push: Push) -> Decision:
        """A gradient has come."""

    def join(self, worker: int) -> Decision:
        """A worker has come."""
        self.workers.add(worker)
        return Decision(f"worker {worker} has come", orders={worker: Order.RENEW})

    def leave(self, worker: int) -> Decision:
        """A worker has gone; what it has pushed still counts. Those who waited for it may go on."""
        self.workers.discard(worker)
        self.waiting.discard(worker)
        return self.reconsider(f"worker {worker} has gone")

    def reconsider(self, why: str) -> Decision:
        """Whether there can be an update now, though no gradient has come."""
        return Decision(why)

    @property
    def size(self) -> int:
        """How many workers there are."""
        return len(self.workers)

    def _hold(self, push: Push, order: Order, reason: str) -> Decision:
        self.held.append(push)
        if order is Order.WAIT:
            self.waiting.add(push.worker)
        return Decision(reason, orders={push.worker: order})

    def _drop(self, push: Push, reason: str) -> Decision:
        return Decision(reason, drop=(push,), orders={push.worker: Order.RENEW})

    def _update(self, reason: str, orders: dict[int, Order]) -> Decision:
        """Use all that is held, and let everybody go who waited."""
        use, self.held = tuple(self.held), []
        released = dict.fromkeys(sorted(self.waiting), Order.RENEW)
        self.waiting.clear()
        self.version += 1
        return Decision(reason, use=use, orders={**released, **orders})


def count(name: str, value: int, workers: int) -> int:
    """K, if it can be."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= workers:
        raise UsageError(f"{name} is {value!r}; with {workers} workers it must be a whole number from 1 to {workers}")
    return value
