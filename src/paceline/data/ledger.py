"""The ledger of leases: which worker may train on which samples. Pure: no clock, no socket.

The samples of an epoch are leased in minibatches on request, so that a fast worker gets more. A lease ends as done,
when its gradient is part of a version, or as returned: then another worker gets it. An epoch is over when every sample
is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from paceline.data.split import scaled


class Lease(msgspec.Struct, frozen=True):
    """The right of one worker to train on certain samples."""

    number: int
    """Unique in a run."""
    loader: int
    epoch: int
    first: int
    """Index of its first sample in the order of the epoch; of its batch, if the loader has a batch sampler."""
    keys: list[Any]
    """The sampler's keys of the samples."""


class _Epoch:
    """The samples of one epoch of one loader."""

    def __init__(self, number: int, parts: Sequence[tuple[int, list[Any]]], workers: Sequence[int] | None) -> None:
        self.number = number
        self.size = len(parts)
        self.done = 0
        self.common: deque[tuple[int, list[Any]]] = deque()
        """Minibatches for any worker."""
        self.own: dict[int, deque[tuple[int, list[Any]]]] = {}
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
        self.over = False

    @property
    def left(self) -> int:
        """Minibatches that are not leased."""
        return len(self.common) + sum(len(queue) for queue in self.own.values())


class Ledger:
    """All leases of a run."""

    def __init__(self, workers: Iterable[int], *, in_turns: bool) -> None:
        self._workers = set(workers)
        self._in_turns = in_turns
        """True if the workers take samples in the order of their ranks, so that a run can be repeated exactly."""
        self._epochs: dict[int, _Epoch] = {}
        """The running epoch of each loader."""
        self._out: dict[int, tuple[int, Lease]] = {}
        """Open leases, with their workers."""
        self._carried: set[int] = set()
        """Open leases that will be pushed in a later epoch, and count as done in their own."""
        self._number = 0
        self.in_step = in_turns
        """True if all workers are at the same batch, as nothing has changed their turns."""

    # -- epochs ------------------------------------------------------------------------------------------------------

    def is_open(self, loader: int, epoch: int) -> bool:
        """True if this is the loader's current epoch."""
        running = self._epochs.get(loader)
        return running is not None and running.number == epoch

    def is_past(self, loader: int, epoch: int) -> bool:
        """True if a later epoch is current: all workers of this one have left it."""
        running = self._epochs.get(loader)
        return running is not None and running.number > epoch

    def may_open(self, loader: int, epoch: int) -> bool:
        """True if this is the next epoch, and the one before is over for all."""
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
    ) -> int:
        """Opens an epoch; returns its number of samples.

        sizes: of the minibatches, in turn; empty if the order is one of whole batches.
        """
        parts: list[tuple[int, list[Any]]] = []
        if not sizes:
            parts = [(place, list(keys)) for place, keys in enumerate(order)]
        elif self._in_turns and drop_last:
            order = order[: len(order) // sum(sizes) * sum(sizes)]  # an update takes a whole batch
        first = 0
        while sizes and first < len(order):
            turn = len(parts) % len(sizes)
            if self._in_turns and not turn and len(order) - first < sum(sizes):
                sizes = scaled(sizes, len(order) - first)  # the last batch is divided, too
            parts.append((first, list(order[first : first + sizes[turn]])))
            first += len(parts[-1][1])
        if drop_last and parts and sizes and len(parts[-1][1]) < sizes[(len(parts) - 1) % len(sizes)]:
            parts.pop()
        self._epochs[loader] = _Epoch(epoch, parts, sorted(self._workers) if self._in_turns else None)
        return sum(len(keys) for _, keys in parts)

    def is_over(self, loader: int) -> bool:
        """True if every sample of the current epoch is done, or no worker takes part any more."""
        epoch = self._epochs[loader]
        return epoch.done == epoch.size or not (epoch.here & self._workers)

    def close(self, loader: int) -> bool:
        """Marks the epoch as over; True if it was not marked before."""
        noted, self._epochs[loader].over = self._epochs[loader].over, True
        return not noted

    def enter(self, worker: int, loader: int) -> None:
        """Adds a worker to the current epoch."""
        self._epochs[loader].here.add(worker)

    def quit(self, worker: int, loader: int, epoch: int, pushed: Iterable[int] = ()) -> list[Lease]:
        """Removes a worker from the epoch before its end, and returns the leases it held and has not pushed."""
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

        ahead: it is fetched before it is needed; then a worker gets no more than its fair share, or others would be
        idle at the end of the epoch while this one still holds many.
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
        """Ends leases whose gradients are part of a version."""
        for number in numbers:
            _, lease = self._out.pop(number)
            if number in self._carried:
                self._carried.discard(number)
            elif self.is_open(lease.loader, lease.epoch):
                self._epochs[lease.loader].done += 1

    def give_back(self, numbers: Iterable[int]) -> None:
        """Returns leases that were not trained on; the next request gets them."""
        for number in reversed(list(numbers)):
            _, lease = self._out.pop(number)
            epoch = self._epochs[lease.loader]
            if epoch.number != lease.epoch:  # its own epoch has ended: it is added to the current one
                epoch.size += 1
            elif number in self._carried:
                epoch.done -= 1
            self._carried.discard(number)
            epoch.common.appendleft((lease.first, lease.keys))

    def carry(self, worker: int, loader: int) -> None:
        """Counts a worker's open leases as done: it waits for the epoch's end, and pushes them in the next epoch."""
        epoch = self._epochs[loader]
        for number, (owner, lease) in self._out.items():
            of_this = (lease.loader, lease.epoch) == (loader, epoch.number)
            if owner == worker and of_this and number not in self._carried:
                self._carried.add(number)
                epoch.done += 1

    def held_by(self, worker: int) -> list[Lease]:
        """The open leases of a worker."""
        return [lease for owner, lease in self._out.values() if owner == worker]

    def leave(self, worker: int, pushed: Iterable[int] = ()) -> list[Lease]:
        """Removes a worker, and returns the leases it held and has not pushed."""
        self._workers.discard(worker)
        for epoch in self._epochs.values():
            self._share(epoch, worker)
        kept = set(pushed)
        mine = [lease for lease in self.held_by(worker) if lease.number not in kept]
        self.give_back([lease.number for lease in mine])
        return mine

    def join(self, worker: int) -> None:
        """Adds a worker. If workers take turns, the rest of the current epochs is dealt out anew."""
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
        """Gives the turns of workers that have not entered the epoch to all."""
        epoch = self._epochs[loader]
        for worker in sorted(epoch.own.keys() - epoch.here):
            self._share(epoch, worker)

    def _share(self, epoch: _Epoch, worker: int) -> None:
        """Gives a worker's turns to all."""
        left = epoch.own.pop(worker, ())
        self.in_step = self.in_step and not left
        epoch.common.extend(left)
