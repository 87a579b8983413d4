"""The base class of policies: how they are written as values, what they are told and what they answer.

A policy decides when the parameters are updated, with which gradients, which workers wait and which are cancelled. It
is pure: it knows no tensor, no clock and no connection, so the server and the simulator run the same object.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec

from paceline.config import Strategy, parse_compression, parse_correction, parse_servers, parse_strategy
from paceline.errors import UsageError


class Order(Enum):
    """The next action of a worker."""

    STAY = "stay"
    """Go on with the next minibatch, on the same version."""
    RENEW = "renew"
    """Pull the newest version, and go on."""
    WAIT = "wait"
    """Do nothing until the next order."""
    CANCEL = "cancel"
    """Leave the step that is under way: its gradient can no longer be used. Pull the newest version, and go on."""


class Arrival(msgspec.Struct, frozen=True):
    """A gradient that has arrived."""

    ticket: int
    """The number that identifies it in decisions; unique in a run."""
    worker: int
    version: int
    """The version of the parameters that it was computed on."""


class Decision(msgspec.Struct, frozen=True):
    """A policy's answer to an event."""

    reason: str
    use: tuple[Arrival, ...] = ()
    """Gradients whose mean makes the next version; without any there is no update."""
    drop: tuple[Arrival, ...] = ()
    """Gradients to discard."""
    orders: dict[int, Order] = {}
    """Orders by rank. A worker that is not named goes on as before."""
    together: tuple[Arrival, ...] = ()
    """Gradients of one group that is complete now: they count as one from here on."""


class Rule(Enum):
    """A regular pattern of updates. N is the number that a policy gives with it."""

    FRESH_WORKERS = "all workers start on each version, and the N-th of them to finish ends it"
    FRESH_MINIBATCHES = "all workers start on each version, and the N-th finished minibatch ends it"
    STALE_WORKERS = "an update needs pushes of N distinct workers, which wait for it; the others go on"
    STALE_MINIBATCHES = "every N-th push is an update, and no worker waits"
    BOUNDED = "every push is an update, and no worker is more than N steps ahead of the slowest"
    ASYNC_GROUPS = "groups of N workers are synchronous inside, and every push of a group is an update"


class Timing(msgspec.Struct, frozen=True):
    """The rule that a running policy follows."""

    rule: Rule
    number: int


_STATE = {"workers", "version", "held", "waiting", "resting", "members"}


class Policy(Strategy, ABC):
    """A strategy of the parameter server: as a value its spec, as a running copy its behaviour and state.

    `KSync(k=3)` is a value: it cannot be changed, and prints as `k-sync:k=3`. `KSync(k=3).for_workers(range(4))` is a
    running copy, which remembers `workers`, `version`, `held`, `waiting` and `resting`, and may change its attributes.

    A subclass declares its options as annotated attributes and implements `arrive`, mostly with `hold`, `drop` and
    `update`. It may set up more state in `begin`, answer further events, and tell planner and simulator about itself
    (`candidates`, `timing`). See docs/policies/your-own.md.
    """

    servers: int | str = 1
    """Where the parameters are held: a number of processes, "lead", "all", "each" or "MACHINE:COUNT,…"."""
    corrections: Sequence[str] | str = ()
    """Corrections for stale gradients: "lr/staleness", "drop:above=8", "dc-asgd", …"""
    compress: str = "none"
    """The format of a pushed gradient: "bf16", "fp16", "int8", "topk:0.01"; "none" leaves it as it is."""

    fresh_only = False
    """True if a gradient counts only if it was computed on the newest version."""
    _rule: ClassVar[Rule | None] = None
    """The rule of `timing`, with K as its number."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if taken := sorted(_STATE & cls.options().keys()):
            raise TypeError(f"{cls.__name__} has an option '{taken[0]}', which names a part of every policy's state")

    def __post_init__(self) -> None:
        given = self.corrections
        corrections = tuple(re.split(r"\+(?=[a-z])", given) if isinstance(given, str) and given else given)
        for correction in corrections:
            parse_correction(correction)
        parse_compression(self.compress)
        self.__dict__.update(servers=parse_servers(str(self.servers)), corrections=corrections)

    # -- its start -------------------------------------------------------------------------------------------------

    def for_workers(self, workers: Iterable[int]) -> Self:
        """A running copy for these workers, or one sentence about why there can be none."""
        try:
            return self._started(workers)
        except UsageError as error:
            raise UsageError(f"strategy '{self}': {error}") from None

    def _started(self, workers: Iterable[int]) -> Self:
        running = copy.copy(self)
        running.__dict__["_running"] = True
        running._reset(set(workers))
        running.begin()
        return running

    def _reset(self, workers: set[int]) -> None:
        if not workers:
            raise UsageError("a policy needs at least one worker")
        self.workers = workers
        self.version = 0
        """How many updates there were."""
        self.held: list[Arrival] = []
        """Gradients that have arrived and are not used yet."""
        self.waiting: set[int] = set()
        """Workers that were told to wait."""
        self.resting: set[int] = set()
        """Workers that have nothing to compute: the samples of an epoch are all given out."""
        self.members: dict[int, set[int]] = {}
        """By group, the workers that push as one; empty for a policy without groups."""
        self.k: int = self.__dict__.get("k", 1)
        """How many gradients make an update."""
        self._started_with = len(workers)

    def begin(self) -> None:
        """Sets up more state of a running copy, and refuses options that its workers rule out."""

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            if "_running" in self.__dict__:
                object.__setattr__(self, name, value)
            else:
                super().__setattr__(name, value)

    # -- its nature ------------------------------------------------------------------------------------------------

    @classmethod
    def candidates(cls, workers: int) -> Iterable[Policy]:
        """Values that a plan tries for so many workers; by default one, if every option has a default."""
        return [] if any(option.default is dataclasses.MISSING for option in cls.options().values()) else [cls()]

    @classmethod
    def adapted_k(cls, start: int, workers: int, fallen: float) -> float:
        """The K, not rounded, that AdaSync's rule asks for once the loss has fallen by a factor; `adaptive` uses it."""
        return float(min(workers, start * fallen**0.5))

    @property
    def timing(self) -> Timing | None:
        """The rule that updates follow, if it is a known one; a simulation finds out the rest."""
        return None if self._rule is None else Timing(self._rule, self.k)

    @property
    def spare(self) -> bool:
        """True if the run can go on when a worker is lost."""
        return self._started_with > 1

    @property
    def lockstep(self) -> bool:
        """True if every update is made of one gradient from each worker, so that a run can be repeated exactly."""
        return False

    @property
    def cancels(self) -> bool:
        """True if it may tell a worker to leave its step."""
        return self.fresh_only and not self.lockstep

    @property
    def computing(self) -> int:
        """How many workers may push without a further order."""
        idle = len(self.waiting) + len(self.resting) - len(self.waiting & self.resting)
        return len(self.workers) - idle

    # -- events ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def arrive(self, push: Arrival) -> Decision:
        """A gradient has arrived."""

    def join(self, worker: int) -> Decision:
        """A worker has joined. K stays as it was."""
        self.workers.add(worker)
        return Decision(f"worker {worker} has come", orders={worker: Order.RENEW})

    def leave(self, worker: int) -> Decision:
        """A worker has left; its pushed gradients still count. Workers that waited for it may go on.

        K stays: with fewer than K workers left, an update is made of one gradient of each, and of K again once enough
        have joined.
        """
        for known in (self.workers, self.waiting, self.resting):
            known.discard(worker)
        return self.reconsider(f"worker {worker} has gone")

    def rest(self, worker: int) -> Decision:
        """A worker has nothing to compute for now."""
        self.resting.add(worker)
        return self.reconsider(f"worker {worker} has nothing to compute")

    def wake(self, worker: int) -> None:
        """A worker has something to compute again."""
        self.resting.discard(worker)

    def may_begin(self, worker: int) -> bool:
        """True if a worker may begin a step without having pushed: at the start of an epoch, or when it has rested."""
        return True

    def observe(self, loss: float) -> None:
        """The loss has this value now; only a policy that adapts to it uses it."""

    def state_dict(self) -> dict[str, Any]:
        """The values that a run which goes on from a snapshot begins with: numbers, texts, and lists of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes these values; called after `begin`, of a run that perhaps has another number of workers."""

    def reconsider(self, why: str) -> Decision:
        """Decides whether there is an update though no gradient has arrived: it may be that no more can."""
        return Decision(why)

    # -- parts of decisions ----------------------------------------------------------------------------------------

    def hold(self, push: Arrival, order: Order, reason: str) -> Decision:
        """Keeps a gradient for a later update, with this order for its worker."""
        self.held.append(push)
        if order is Order.WAIT:
            self.waiting.add(push.worker)
        return Decision(reason, orders={push.worker: order})

    def drop(self, push: Arrival, reason: str) -> Decision:
        """Discards a gradient; its worker pulls the newest version."""
        return Decision(reason, drop=(push,), orders={push.worker: Order.RENEW})

    def update(self, reason: str, orders: dict[int, Order]) -> Decision:
        """Uses all held gradients, and releases all waiting workers."""
        use = tuple(self.held)
        self.held.clear()
        if self.waiting:
            orders = {**dict.fromkeys(sorted(self.waiting), Order.RENEW), **orders}
            self.waiting.clear()
        self.version += 1
        return Decision(reason, use=use, orders=orders)


def parse_policy(spec: str | Strategy) -> Policy:
    """A strategy that is a policy, or one sentence."""
    strategy = parse_strategy(spec)
    if not isinstance(strategy, Policy):
        raise UsageError(f"strategy '{strategy}': it is no policy of a parameter server")
    return strategy


def count(name: str, value: int, workers: int) -> int:
    """`value`, if it is a number from 1 to `workers`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= workers:
        allowed = "it must be 1" if workers == 1 else f"it must be a whole number from 1 to {workers}"
        raise UsageError(f"{name} is {value!r}, with {workers} workers; {allowed}")
    return value


def whole(name: str, value: int) -> int:
    """`value`, if it is a number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} is {value!r}; it must be a whole number of at least 1")
    return value


def some(values: range) -> list[int]:
    """All of a few numbers; of many the first, the last and five between."""
    every = list(values)
    if len(every) <= 6:
        return every
    last = len(every) - 1
    return sorted({every[round(last * part / 6)] for part in range(7)})


class OfK(Policy):
    """K gradients make an update, which may be more than there are workers."""

    def begin(self) -> None:
        self.k = whole("k", self.k)

    @property
    def needed(self) -> int:
        """How many gradients make an update now: fewer than K once no worker computes."""
        return self.k if self.computing else 1


class OfWorkers(OfK):
    """Gradients of K distinct workers make an update."""

    def begin(self) -> None:
        self.k = count("k", self.k, len(self.workers))

    @property
    def needed(self) -> int:
        """Fewer than K once so many cannot arrive: workers have left, or the epoch has no samples left."""
        return max(1, min(self.k, len(self.held) + self.computing))

    @property
    def spare(self) -> bool:
        return self.k < self._started_with

    @property
    def lockstep(self) -> bool:
        return self.k == self._started_with
