"""The samples of one epoch of one loader, as the ledger gives them out. Pure: no clock, no socket."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec


class Stretch(msgspec.Struct, frozen=True, array_like=True):
    """Samples of a stream, which a worker reads by itself."""

    source: int
    """The number of the iterator that they are read from."""
    start: int
    size: int
    turn: int
    """How often the stream was begun before."""
    lane: int
    """The process of the worker's loader that reads the source."""
    samples: int
    """Samples that are the worker's; fewer at the end of the source."""
    part: int = -1
    """Which part of these samples is the worker's; -1 if all are."""
    batch: int = -1
    """The number of the batch that they are, if they are divided."""


class Part(NamedTuple):
    """What is leased at once."""

    first: int
    """Index of the first sample, or of the batch."""
    keys: list[Any]
    stretch: Stretch | None = None


class Want(NamedTuple):
    """What a worker asks for; of a stream only."""

    lane: int = 0
    """The process of its loader that would read the samples."""
    any_lane: bool = True
    """True if samples for another process will do."""
    most: int = 0
    """Samples at most; 0 for a whole minibatch."""


ANYTHING = Want()


class EpochLeft(msgspec.Struct, frozen=True, array_like=True):
    """The samples of a leased epoch that are not part of a version."""

    number: int
    parts: list[tuple[int, list[Any]]]
    """Index and keys of each minibatch, by index; -1 for those of an epoch before."""
    stream: bool = False
    """True if they are those of a stream, which has no keys."""


class EpochParts:
    """The minibatches of an epoch."""

    def __init__(self, number: int, parts: Sequence[Part], workers: Sequence[int] | None) -> None:
        """workers: that take turns; None if any worker takes any minibatch."""
        self.number = number
        self.size = len(parts)
        self.done = 0
        self.common: deque[Part] = deque()
        """Minibatches for any worker."""
        self.own: dict[int, deque[Part]] = {}
        """Minibatches for one worker only."""
        if workers is None:
            self.common.extend(parts)
        else:
            for place, part in enumerate(parts):
                self.own.setdefault(workers[place % len(workers)], deque()).append(part)
        self.here: set[int] = set()
        """Workers that take part."""
        self.given: dict[int, int] = {}
        """Leases given to each worker so far."""
        self.out: Counter[int] = Counter()
        """Open leases of each worker."""
        self.over = False
        self.changed = False
        """True if workers that take turns have come or gone, or a minibatch has come back."""
        self.shared_out = False
        """True if others may train on samples of a worker that has left the epoch."""

    @property
    def left(self) -> float:
        """Minibatches that are not leased."""
        return len(self.common) + sum(len(queue) for queue in self.own.values())

    @property
    def complete(self) -> bool:
        """True if every sample is done."""
        return self.done == self.size

    def take(self, worker: int, want: Want) -> Part | None:
        """Takes out the next minibatch for a worker, if there is one for it now."""
        queue = self.common or self.own.get(worker)
        if not queue and self.changed and want.any_lane:
            return self._take_over()
        return queue.popleft() if queue else None

    def _take_over(self) -> Part | None:
        """A minibatch of a worker that has more turns left than the one that it is at, or has not begun."""
        left = {rank: len(queue) + self.out[rank] + (rank not in self.given) for rank, queue in self.own.items()}
        most = max((rank for rank, queue in self.own.items() if queue), key=left.__getitem__, default=None)
        return None if most is None or left[most] < 2 else self.own[most].pop()

    def put_back(self, _worker: int, part: Part) -> None:
        """Takes back a minibatch that a worker has had; the next request gets it, or one of those with fewest turns."""
        self.changed = True
        self._fewest().appendleft(part)

    def _fewest(self) -> deque[Part]:
        """The minibatches of a worker that has fewest turns left, with the one that it is at, so that all end together.

        Those for any worker, if workers take no turns.
        """
        ranks = sorted(self.own)
        fewest = min(ranks, key=lambda rank: len(self.own[rank]) + self.out[rank], default=None)
        return self.common if fewest is None else self.own[fewest]

    def release(self, worker: int) -> bool:
        """Gives a worker's turns to all; True if it had some left."""
        left = self.own.pop(worker, ())
        self.given.pop(worker, None)
        self.changed = self.changed or bool(left)
        for part in left:
            self._fewest().append(part)
        return bool(left)

    def admit(self, worker: int) -> None:
        """Adds a worker; if workers take turns, the rest is dealt out anew."""
        if not self.own:
            return
        self.changed = True
        queues = (self.common, *self.own.values())
        left = sorted((part for queue in queues for part in queue), key=lambda part: part.first)
        self.common.clear()
        self.own = {rank: deque() for rank in {*self.own, worker}}
        for part in left:
            self._fewest().append(part)

    def absent(self) -> list[int]:
        """Workers that have turns and do not take part."""
        return sorted(self.own.keys() - self.here)
