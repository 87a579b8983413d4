"""The ledger of leases: which worker may train on which samples. Pure: no clock, no socket.

The samples of an epoch are leased in minibatches on request, so that a fast worker gets more. A lease ends as done,
when its gradient is part of a version, or as returned: then another worker gets it. An epoch is over when every sample
is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from paceline.data.epochs import ANYTHING, EpochLeft, EpochParts, Part, Stretch, Want
from paceline.data.split import scaled
from paceline.data.stream_epoch import StreamEpoch, StreamPlan


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
    stretch: Stretch | None = None
    """Of a stream, where the worker reads the samples, instead of keys."""

    @property
    def samples(self) -> int:
        """Fewer at the end of a stream."""
        return len(self.keys) if self.stretch is None else self.stretch.samples


class Ledger:
    """All leases of a run."""

    def __init__(self, workers: Iterable[int], *, in_turns: bool) -> None:
        self._workers = set(workers)
        self._in_turns = in_turns
        """True if the workers take samples in the order of their ranks, so that a run can be repeated exactly."""
        self._epochs: dict[int, EpochParts] = {}
        """The running epoch of each loader."""
        self._out: dict[int, tuple[int, Lease]] = {}
        """Open leases, with their workers."""
        self._carried: set[int] = set()
        """Open leases that will be pushed in a later epoch, and count as done in their own."""
        self._ahead: set[int] = set()
        """Open leases that were fetched ahead, and are not known to be begun."""
        self._number = 0
        self.in_step = in_turns
        """True if all workers are at the same batch, as nothing has changed their turns."""

    # -- epochs ------------------------------------------------------------------------------------------------------

    def is_open(self, loader: int, epoch: int) -> bool:
        """True if this is the loader's current epoch."""
        running = self._epochs.get(loader)
        return running is not None and running.number == epoch

    def current(self, loader: int) -> int:
        """The number of the loader's current epoch."""
        return self._epochs[loader].number

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
        parts: list[Part] = []
        if not sizes:
            parts = [Part(place, list(keys)) for place, keys in enumerate(order)]
        elif self._in_turns and drop_last:
            order = order[: len(order) // sum(sizes) * sum(sizes)]  # an update takes a whole batch
        first = 0
        while sizes and first < len(order):
            turn = len(parts) % len(sizes)
            if self._in_turns and not turn and len(order) - first < sum(sizes):
                sizes = scaled(sizes, len(order) - first)  # the last batch is divided, too
            parts.append(Part(first, list(order[first : first + sizes[turn]])))
            first += len(parts[-1].keys)
        if drop_last and parts and sizes and len(parts[-1].keys) < sizes[(len(parts) - 1) % len(sizes)]:
            parts.pop()
        self._epochs[loader] = EpochParts(epoch, parts, sorted(self._workers) if self._in_turns else None)
        return sum(len(part.keys) for part in parts)

    def open_stream(self, loader: int, epoch: int, plan: StreamPlan, sizes: Sequence[int]) -> None:
        """Opens an epoch of a stream.

        sizes: of the minibatches, in turn.
        """
        workers = sorted(self._workers) if self._in_turns else None
        self._epochs[loader] = StreamEpoch(epoch, plan, sizes, workers, self._epochs.get(loader))

    def note(self, loader: int) -> bytes:
        """What the worker that began the current epoch of a stream lets the others know."""
        epoch = self._epochs[loader]
        return epoch.note if isinstance(epoch, StreamEpoch) else b""

    def end_source(self, loader: int, source: int, turn: int, length: int) -> None:
        """Notes the end of a stream's source."""
        epoch = self._epochs[loader]
        if isinstance(epoch, StreamEpoch):
            epoch.end(source, turn, length)

    def lengths(self, loader: int) -> tuple[int, list[tuple[int, int]]]:
        """The turn of a stream, and the sources that every worker reads and that have ended, with their samples."""
        epoch = self._epochs[loader]
        return (epoch.turn, epoch.lengths) if isinstance(epoch, StreamEpoch) else (0, [])

    def is_over(self, loader: int) -> bool:
        """True if every sample of the current epoch is done, or no worker takes part any more."""
        epoch = self._epochs[loader]
        return epoch.complete or not (epoch.here & self._workers)

    def close(self, loader: int) -> bool:
        """Marks the epoch as over; True if it was not marked before."""
        noted, self._epochs[loader].over = self._epochs[loader].over, True
        return not noted

    def enter(self, worker: int, loader: int) -> None:
        """Adds a worker to the current epoch."""
        self._epochs[loader].here.add(worker)

    def is_left(self, loader: int) -> bool:
        """True if all workers that have been in the current epoch have left it."""
        return not self._epochs[loader].here

    def quit(self, worker: int, loader: int, epoch: int, pushed: Iterable[int] = ()) -> list[Lease]:
        """Removes a worker from the epoch before its end, and returns the leases it held and has not pushed."""
        if not self.is_open(loader, epoch):
            return []
        self._epochs[loader].here.discard(worker)
        kept = set(pushed)
        mine = [lease for lease in self.held_by(worker) if lease.loader == loader and lease.number not in kept]
        self._share(self._epochs[loader], worker)
        self.give_back([lease.number for lease in mine])
        self._epochs[loader].shared_out |= bool(mine)
        return mine

    # -- leases ------------------------------------------------------------------------------------------------------

    def lease(self, worker: int, loader: int, *, ahead: bool = False, want: Want = ANYTHING) -> Lease | None:
        """The next minibatch for this worker, if there is one for it now.

        ahead: it is fetched before it is needed; then a worker gets no more than its fair share, or others would be
        idle at the end of the epoch while this one still holds many.
        want: what it needs of a stream.
        """
        epoch = self._epochs[loader]
        if ahead and not self._fair(worker, epoch):
            return None
        part = epoch.take(worker, want)
        if part is None:
            return None
        self._number += 1
        lease = Lease(self._number, loader, epoch.number, *part)
        self._out[lease.number] = (worker, lease)
        epoch.given[worker] = epoch.given.get(worker, 0) + 1
        epoch.out[worker] += 1
        if ahead and lease.stretch is None:
            self._ahead.add(lease.number)
        return lease

    def _fair(self, worker: int, epoch: EpochParts) -> bool:
        if self._in_turns:
            return True
        # In this epoch: a gradient may still have minibatches of the one before.
        paces = {other: max(1, epoch.given.get(other, 0) - epoch.out[other] + 1) for other in {worker, *epoch.here}}
        return epoch.out[worker] < 1 + epoch.left * paces[worker] / sum(paces.values())

    def done(self, numbers: Iterable[int]) -> None:
        """Ends leases whose gradients are part of a version."""
        for number in numbers:
            lease = self._end(number)
            if number in self._carried:
                self._carried.discard(number)
            elif self.is_open(lease.loader, lease.epoch):
                self._epochs[lease.loader].done += 1

    def _end(self, number: int) -> Lease:
        """Takes a lease out of those that are open."""
        worker, lease = self._out.pop(number)
        self._ahead.discard(number)
        if self.is_open(lease.loader, lease.epoch):
            self._epochs[lease.loader].out[worker] -= 1
        return lease

    def give_back(self, numbers: Iterable[int]) -> None:
        """Returns leases that were not trained on; the next request gets them."""
        for number in reversed(list(numbers)):
            worker, lease = self._out[number][0], self._end(number)
            epoch = self._epochs[lease.loader]
            if epoch.number != lease.epoch:  # its own epoch has ended: it is added to the current one
                epoch.size += 1
            elif number in self._carried:
                epoch.done -= 1
            self._carried.discard(number)
            epoch.put_back(worker, Part(lease.first, lease.keys, lease.stretch))

    def carry(self, worker: int, loader: int) -> None:
        """Counts a worker's open leases as done: it waits for the epoch's end, and pushes them in the next epoch."""
        epoch = self._epochs[loader]
        for number, (owner, lease) in self._out.items():
            of_this = (lease.loader, lease.epoch) == (loader, epoch.number)
            if owner == worker and of_this and number not in self._carried:
                self._carried.add(number)
                epoch.done += 1

    def left(self, loader: int) -> EpochLeft:
        """The samples of the current epoch that are not done: also those that are leased."""
        epoch = self._epochs[loader]
        parts: list[tuple[int, list[Any]]] = []
        if epoch.here & self._workers:  # else the scripts have left it, and what nobody has is not wanted
            parts = [(part.first, part.keys) for queue in (epoch.common, *epoch.own.values()) for part in queue]
        for _, lease in self._out.values():
            if lease.loader == loader:
                parts.append((lease.first if lease.epoch == epoch.number else -1, lease.keys))
        return EpochLeft(epoch.number, parts, isinstance(epoch, StreamEpoch))

    def loaders(self) -> list[int]:
        """The loaders of which an epoch was opened."""
        return sorted(self._epochs)

    def held_by(self, worker: int) -> list[Lease]:
        """The open leases of a worker."""
        return [lease for owner, lease in self._out.values() if owner == worker]

    def fetched(self, worker: int, loader: int, *, pushed: Iterable[int], waits: bool) -> list[int]:
        """Leases that a worker has fetched ahead in the current epoch and not begun, which another could get.

        pushed: its leases whose gradients are with the server. waits: True if it waits for an answer; if not, it
        computes the first of the others, or is about to. None while workers take turns, or if they read a stream.
        """
        epoch, known = self._epochs[loader], set(pushed)
        if self._in_turns and not epoch.changed:
            return []
        held = [lease for lease in self.held_by(worker) if lease.number not in known]
        return [
            lease.number
            for lease in held[0 if waits else 1 :]
            if lease.number in self._ahead and self.is_open(loader, lease.epoch) and lease.loader == loader
        ]

    def begin(self, number: int) -> None:
        """Notes that a worker begins a minibatch that it has fetched ahead."""
        self._ahead.discard(number)

    def leave(self, worker: int, pushed: Iterable[int] = ()) -> list[Lease]:
        """Removes a worker, and returns the leases it held and has not pushed."""
        self._workers.discard(worker)
        for epoch in self._epochs.values():
            epoch.here.discard(worker)
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
            epoch.admit(worker)

    def is_entered(self, loader: int) -> bool:
        """True if all workers that have samples of the current epoch take part in it."""
        return not self._epochs[loader].absent()

    def is_shared_out(self, loader: int) -> bool:
        """True if other workers have got the turns of one in the current epoch."""
        epoch = self._epochs.get(loader)
        return epoch is not None and epoch.shared_out

    def spread(self, loader: int) -> None:
        """Gives the turns of workers that have not entered the epoch to all."""
        epoch = self._epochs[loader]
        for worker in epoch.absent():
            self._share(epoch, worker)

    def _share(self, epoch: EpochParts, worker: int) -> None:
        """Gives a worker's turns to all."""
        if epoch.release(worker):
            self.in_step, epoch.shared_out = False, True
