"""The ledger of leases: who may train on which samples. Pure: the server asks, it answers.

The samples of an epoch are given out in minibatches, to whoever asks, so that a fast worker gets more. A lease ends as
done, once its gradient is part of a version, or as returned: then somebody else gets it. An epoch is over when every
sample is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec


class Lease(msgspec.Struct, frozen=True):
    """The right of one worker to train on certain samples."""

    number: int
    """Never the same twice in a run."""
    loader: int
    epoch: int
    first: int
    """Place of its first sample in the order of the epoch; of its batch, where the loader brings its own batches."""
    keys: list[Any]
    """What the loader's sampler called them."""


class _Epoch:
    """The samples of one epoch of one loader."""

    def __init__(self, number: int, parts: Sequence[tuple[int, list[Any]]], workers: Sequence[int] | None) -> None:
        self.number = number
        self.size = len(parts)
        self.done = 0
        self.common: deque[tuple[int, list[Any]]] = deque()
        """What anybody may have."""
        self.own: dict[int, deque[tuple[int, list[Any]]]] = {}
        """What only one worker may have."""
        if workers is None:
            self.common.extend(parts)
        else:
            for place, part in enumerate(parts):
                self.own.setdefault(workers[place % len(workers)], deque()).append(part)
        self.here: set[int] = set()
        """Who takes part."""
        self.given: dict[int, int] = {}
        """How many leases each worker has had."""
        self.over = False

    @property
    def left(self) -> int:
        return len(self.common) + sum(len(queue) for queue in self.own.values())


class Ledger:
    """All leases of a run."""

    def __init__(self, workers: Iterable[int], *, in_turns: bool) -> None:
        self._workers = set(workers)
        self._in_turns = in_turns
        """Whether the workers take samples in the order of their ranks, so that a run can be repeated exactly."""
        self._epochs: dict[int, _Epoch] = {}
        """The running epoch of each loader."""
        self._out: dict[int, tuple[int, Lease]] = {}
        """Leases that have not ended, with their workers."""
        self._carried: set[int] = set()
        """Of those, the ones that will be pushed in a later epoch, and are counted as done in their own."""
        self._number = 0

    # -- epochs ------------------------------------------------------------------------------------------------------

    def is_open(self, loader: int, epoch: int) -> bool:
        running = self._epochs.get(loader)
        return running is not None and running.number == epoch

    def is_past(self, loader: int, epoch: int) -> bool:
        """Whether a later epoch runs already: those who took part in this one have all left it."""
        running = self._epochs.get(loader)
        return running is not None and running.number > epoch

    def may_open(self, loader: int, epoch: int) -> bool:
        """Whether this is the next epoch, and the one before is over for all."""
        running = self._epochs.get(loader)
        return running is None or (running.number < epoch and self.is_over(loader))

    def open(
        self,
        loader: int,
        epoch: int,
        order: Sequence[Any],
        sizes: Sequence[int],
        *,
        drop_last: bool,
        turns: bool = True,
    ) -> int:
        """Begin an epoch; returns how many samples it has.

        sizes: of the minibatches, in turns; none if the order is one of whole batches.
        turns: the workers may have to take their turns, where runs are to be repeatable.
        """
        in_turns = self._in_turns and turns
        parts: list[tuple[int, list[Any]]] = []
        if not sizes:
            parts = [(place, list(keys)) for place, keys in enumerate(order)]
        else:
            first = 0
            while first < len(order):
                parts.append((first, list(order[first : first + sizes[len(parts) % len(sizes)]])))
                first += len(parts[-1][1])
        if drop_last:
            whole = len(sizes) or 1
            if parts and sizes and len(parts[-1][1]) < sizes[(len(parts) - 1) % whole]:
                parts.pop()
            if in_turns and sizes:
                del parts[len(parts) // whole * whole :]  # an update is made of a whole round
        self._epochs[loader] = _Epoch(epoch, parts, sorted(self._workers) if in_turns else None)
        return sum(len(keys) for _, keys in parts)

    def is_over(self, loader: int) -> bool:
        """Whether every sample of the running epoch is done, or nobody takes part any more."""
        epoch = self._epochs[loader]
        return epoch.done == epoch.size or not (epoch.here & self._workers)

    def close(self, loader: int) -> bool:
        """Note that an epoch is over; whether it was not noted before."""
        noted, self._epochs[loader].over = self._epochs[loader].over, True
        return not noted

    def enter(self, worker: int, loader: int) -> None:
        self._epochs[loader].here.add(worker)

    def quit(self, worker: int, loader: int, epoch: int, pushed: Iterable[int] = ()) -> list[Lease]:
        """A worker has left the epoch before its end: what it holds goes back, but for what it has pushed."""
        if not self.is_open(loader, epoch):
            return []
        self._epochs[loader].here.discard(worker)
        self._share(self._epochs[loader], worker)
        kept = set(pushed)
        mine = [lease for lease in self.held_by(worker) if lease.loader == loader and lease.number not in kept]
        self.give_back([lease.number for lease in mine])
        return mine

    # -- leases ------------------------------------------------------------------------------------------------------

    def lease(self, worker: int, loader: int, *, ahead: bool = False) -> Lease | None:
        """The next minibatch for this worker, if there is one for it now.

        ahead: it is fetched before it is needed; then nobody gets more than is fair, or the others would have nothing
        to do at the end of the epoch while this one still has a lot.
        """
        epoch = self._epochs[loader]
        if ahead and not self._fair(worker, loader, epoch):
            return None
        queue = epoch.common or epoch.own.get(worker)
        if not queue:
            return None
        first, keys = queue.popleft()
        self._number += 1
        lease = Lease(self._number, loader, epoch.number, first, keys)
        self._out[lease.number] = (worker, lease)
        epoch.given[worker] = epoch.given.get(worker, 0) + 1
        return lease

    def _fair(self, worker: int, loader: int, epoch: _Epoch) -> bool:
        if self._in_turns:
            return True
        holds = sum(owner == worker and lease.loader == loader for owner, lease in self._out.values())
        pace = epoch.given.get(worker, 0) - holds + 1
        paces = sum(epoch.given.get(other, 0) + 1 for other in epoch.here) - sum(
            lease.loader == loader for _, lease in self._out.values()
        )
        return holds < 1 + epoch.left * pace / max(pace, paces)

    def done(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            _, lease = self._out.pop(number)
            if number in self._carried:
                self._carried.discard(number)
            elif self.is_open(lease.loader, lease.epoch):
                self._epochs[lease.loader].done += 1

    def give_back(self, numbers: Iterable[int]) -> None:
        """These were not trained on; the next one who asks gets them."""
        for number in reversed(list(numbers)):
            _, lease = self._out.pop(number)
            epoch = self._epochs[lease.loader]
            if epoch.number != lease.epoch:  # its own epoch has ended: it is an extra of the one that runs now
                epoch.size += 1
            elif number in self._carried:
                epoch.done -= 1
            self._carried.discard(number)
            epoch.common.appendleft((lease.first, lease.keys))

    def carry(self, worker: int, loader: int) -> None:
        """A worker waits for the end of the epoch with minibatches that it will push in the next one."""
        epoch = self._epochs[loader]
        for number, (owner, lease) in self._out.items():
            of_this = (lease.loader, lease.epoch) == (loader, epoch.number)
            if owner == worker and of_this and number not in self._carried:
                self._carried.add(number)
                epoch.done += 1

    def held_by(self, worker: int) -> list[Lease]:
        return [lease for owner, lease in self._out.values() if owner == worker]

    def leave(self, worker: int, pushed: Iterable[int] = ()) -> list[Lease]:
        """A worker has gone: what it held goes back, but for what it has pushed."""
        self._workers.discard(worker)
        for epoch in self._epochs.values():
            self._share(epoch, worker)
        kept = set(pushed)
        mine = [lease for lease in self.held_by(worker) if lease.number not in kept]
        self.give_back([lease.number for lease in mine])
        return mine

    def join(self, worker: int) -> None:
        """A worker has come. Where workers take turns, what is left of the epochs is dealt out anew."""
        if worker in self._workers:
            return
        self._workers.add(worker)
        for epoch in self._epochs.values():
            if not epoch.own:
                continue
            left = sorted((part for queue in epoch.own.values() for part in queue), key=lambda part: part[0])
            ranks = sorted({*epoch.own, worker})
            epoch.own = {rank: deque(left[turn :: len(ranks)]) for turn, rank in enumerate(ranks)}

    def spread(self, loader: int) -> None:
        """Those who have not come to this epoch will not: their turns are anybody's."""
        epoch = self._epochs[loader]
        for worker in sorted(epoch.own.keys() - epoch.here):
            self._share(epoch, worker)

    def _share(self, epoch: _Epoch, worker: int) -> None:
        """What was one worker's turn is anybody's now."""
        epoch.common.extend(epoch.own.pop(worker, ()))
