"""A stream that is leased: a worker gets the next stretch of it when it needs one.

Of a dataset in shards a worker leases whole shards, one after the other, so that a fast one reads more of them; the
shards of a lost worker are opened again by others. Any other stream is read by every worker, which skips the stretches
that others have leased. A minibatch may be made of the ends of several shards.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from torch.utils.data import DataLoader

from paceline.data.leased_loader import LeasedEpoch, Lender, Minibatch
from paceline.data.ledger import Lease
from paceline.data.loader import check_divisible, global_batch_of
from paceline.data.split import even
from paceline.data.stream.kinds import batch_maker, check_stream, is_keyed, shards_in, whole_notice, whole_stream
from paceline.data.stream.marks import Mark
from paceline.data.stream.reader import Reading, Request, StreamReader
from paceline.data.stream.requests import request_loader, seed_alike, seed_state, weakly
from paceline.data.stream.sources import ShardSources, Sources
from paceline.data.stream.whole_pass import whole_batches
from paceline.data.stream_epoch import StreamPlan
from paceline.data.user_loader import UserLoader
from paceline.errors import TeamError, UsageError, unlike_streams

_PARTS = 4
"""Parts per worker that a dataset is cut into if any number will do: a fast worker gets more of them."""
_EPOCH = 1 << 32
"""More than the batches of an epoch, to number those of all epochs."""


class LeasedStream(UserLoader):
    """The stretches of a stream that are leased to this worker; iterated like the DataLoader itself."""

    def __init__(
        self,
        loader: DataLoader[Any],
        lender: Lender,
        number: int,
        *,
        global_batch: int | None = None,
        per_worker: bool = False,
        steps: int | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """steps: of all workers together, after which an epoch ends; the next one goes on from there."""
        super().__init__(loader)
        check_stream(loader)
        self._lender, self._number, self._asked, self._limit = lender, number, global_batch, steps
        self.global_batch = global_batch_of(loader, lender.size, global_batch, per_worker=per_worker)
        """Samples in one minibatch of every worker together."""
        self._sizes = even(self.global_batch, lender.size)
        self._shards = shards = shards_in(loader, lender.size, _PARTS * lender.size)
        self._sources: Sources = whole_stream(loader) if shards is None else ShardSources(shards)
        if shards is None and (notice := whole_notice(loader, lender.size)):
            say(notice)
        self._lanes = 1 if is_keyed(loader) else max(1, loader.num_workers)
        self._maker = batch_maker(loader)
        # What is cancelled or returned is read again from what a reader has kept.
        kept = self.global_batch * (2 + (loader.prefetch_factor or 0))
        self._reader = StreamReader(
            self._sources,
            stride=self.global_batch if shards is None and lender.size > 1 else 0,
            window=kept,
            copies=self._maker.copies,
        )
        requests = _Requests(weakly(self._request), self._lanes)
        self._inner = request_loader(loader, self._reader, requests, self._maker, keyed=is_keyed(loader))
        self._stream: Iterator[Reading] | None = None
        self._epoch = -1
        self._requested: deque[Lease | None] = deque()
        """Leases whose samples are being read; None for those that this worker has no more."""
        self._waiting: list[deque[Lease]] = [deque() for _ in range(self._lanes)]
        """By process of the loader, leases that it is to read."""
        self._ends: list[tuple[Lease, list[Any]]] = []
        """Samples at the ends of shards, too few for a minibatch."""
        self._ended: set[tuple[int, int]] = set()
        """Turn and source of those whose end was reported."""
        self._over = True
        self._unchecked: deque[Request] = deque()
        """Requests that find nothing, if the stream ends on this worker where it ended on another one."""
        self._checked = False
        self._given = 0
        """Minibatches of the epoch so far."""
        self._had_none = False
        """True if this worker had no part of a batch of the epoch."""

    # -- lengths and evaluation --------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._loader) if self._evaluated or self._limit is None else self._limit

    def _evaluates(self) -> bool:
        return self._lender.evaluates

    def _steps(self) -> int | None:
        return self._lender.steps if self._lender.size > 1 else None

    def _whole(self) -> Iterable[Any]:
        if not self._lender.splits:
            return self._loader
        return whole_batches(self._loader, self._seed_replica, self._compare)

    def _seed_replica(self, inner: DataLoader[Any]) -> None:
        first = False

        def draw() -> bytes:
            nonlocal first
            first = True
            return seed_state(self._loader)

        state = self._lender.from_first(draw)
        if not first:
            seed_alike(self._loader, inner, state)

    def _compare(self, marks: Sequence[Mark]) -> None:
        """Raises Mismatch if the workers that share a model have not read the same samples."""
        payloads = self._lender.from_replica(msgspec.msgpack.encode(list(marks)))
        others = [place for place, payload in enumerate(payloads) if payload != payloads[0]]
        if others:
            raise unlike_streams(others, 0, marks[-1].samples)

    # -- training ----------------------------------------------------------------------------------------------------

    def _train(self) -> Iterator[Any]:
        check_divisible(self._loader, self.global_batch, self._lender.size, self._asked)
        stream = self._begin()
        over = False
        try:
            while True:
                self._lender.ask_batch()
                found = self._next(stream)
                if found is None:
                    break
                minibatch, batch = found
                self._given += 1
                self._lender.begin(minibatch)
                yield batch
            over = True
        except TeamError:
            over = True  # there is no server left to return samples to
            raise
        finally:
            if not over:
                self._forget()
                self._lender.quit(self._number, self._epoch)
            if self._limit is None:
                self._stream = None

    def _begin(self) -> Iterator[Reading]:
        self._epoch += 1
        self._over, self._given, self._had_none = False, 0, False
        drew = False

        def draw() -> LeasedEpoch:
            nonlocal drew
            drew = True
            limit = (self._limit or 0) * self.global_batch
            plan = StreamPlan(self._sources.count, self._shards is None, limit, seed_state(self._loader))
            return LeasedEpoch(b"", self._sizes, stream=plan)

        shards = 0 if self._shards is None else self._shards.digest()
        note = self._lender.enter(self._number, self._epoch, draw, shards)
        if self._stream is None:
            if not drew:
                seed_alike(self._loader, self._inner, note)
            self._stream = iter(self._inner)
        return self._stream

    def _forget(self) -> None:
        """The script has left the epoch: its leases are returned, also those that are being read."""
        self._requested = deque(None for _ in self._requested)
        self._ends.clear()
        for lane in self._waiting:
            lane.clear()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _request(self, lane: int) -> tuple[Request | None, bool]:
        """What a process of the loader shall read next; True if there will be nothing in this turn of the stream."""
        lease = self._lease(lane)
        if lease is None or lease.stretch is None:
            return self._check(lane) if self._over else (None, False)
        self._requested.append(lease)
        stretch = lease.stretch
        sizes = self._sizes if stretch.part >= 0 else ()
        # What completes a minibatch that was begun is not one by itself.
        least = 0 if self._shards is None else stretch.size + 1 if self._ends else self._size
        full = bool(self._loader.drop_last) and self._shards is None
        where = (stretch.source, stretch.start, stretch.size, stretch.turn)
        return Request(*where, sizes, max(0, stretch.part), full, least), False

    @property
    def _size(self) -> int:
        """Samples of a minibatch, where it may be made of several leases."""
        return self._sizes[-1]

    def _lease(self, lane: int) -> Lease | None:
        if self._waiting[lane]:
            return self._waiting[lane].popleft()
        busy = bool(self._requested or self._ends or any(self._waiting))
        if self._over:
            return None
        # Only the worker itself can fill up a minibatch: what processes read was requested before.
        most = self._size - self._short if self._ends and not self._loader.num_workers else 0
        lease = self._lender.ask(self._number, self._epoch, ahead=busy, lane=lane, most=most)
        if lease is None or lease.stretch is None:
            if not busy:
                self._end_epoch()
            return None
        if lease.stretch.lane == lane:
            return lease
        self._waiting[lease.stretch.lane].append(lease)
        return None

    def _end_epoch(self) -> None:
        """The epoch is over. A stream that all read must end here on this worker, too."""
        self._over = True
        turn, lengths = self._lender.lengths
        for source, length in lengths:
            if (turn, source) not in self._ended:
                self._unchecked.append(Request(source, length, 1, turn))

    def _check(self, lane: int) -> tuple[Request | None, bool]:
        """The request that checks the end of a process's stream; True if there is nothing left to do."""
        for request in self._unchecked:
            if request.source == lane:
                self._unchecked.remove(request)
                self._requested.append(None)
                self._checked = True
                return request, False
        return None, not self._unchecked and self._limit is None

    @property
    def _short(self) -> int:
        """Samples of the minibatch that is not complete."""
        return sum(len(samples) for _, samples in self._ends)

    # -- readings ----------------------------------------------------------------------------------------------------

    def _next(self, stream: Iterator[Reading]) -> tuple[Minibatch, Any] | None:
        """The next minibatch and its batch; None at the end of the epoch."""
        for reading in stream:
            request = reading.request
            if request is None:
                if self._requested:
                    continue
                if self._ends and (found := self._last()) is not None:
                    return found
                if self._over and not self._unchecked:
                    break
                continue
            lease = self._requested.popleft()
            self._report(reading, request)
            if lease is None:
                continue
            if not reading.samples:
                self._pass_over(lease, reading)
            elif self._had_none:
                raise UsageError(
                    "a batch of the stream has too few samples to be divided among the workers, and is not the last "
                    "one of the epoch; use drop_last=True, or fewer loader processes"
                )
            elif reading.samples >= request.least:
                return self._minibatch(lease, reading), reading.batch
            elif (found := self._add_end(lease, reading)) is not None:
                return found
        if self._checked:  # the answer is an error, if the stream does not end there
            self._checked = False
            self._lender.ask(self._number, self._epoch, ahead=False)
        return self._last() if self._ends else None

    def _report(self, reading: Reading, request: Request) -> None:
        ends = []
        if self._over and reading.samples:  # it should have ended before
            ends.append((request.source, request.start + 1))
        if reading.length >= 0 and (request.turn, request.source) not in self._ended:
            self._ended.add((request.turn, request.source))
            ends.append((request.source, reading.length))
        if reading.marks or ends:
            if self._lender.splits and reading.marks:
                self._compare(reading.marks)
            self._lender.report(self._number, request.turn, reading.marks, ends)

    def _pass_over(self, lease: Lease, reading: Reading) -> None:
        """A lease has no samples for this worker."""
        self._had_none = self._had_none or reading.whole > 0
        self._lender.skip(lease)
        if reading.lost and lease.stretch is not None:
            self._lender.report(self._number, lease.stretch.turn, lost=lease.samples)

    def _minibatch(self, lease: Lease, reading: Reading) -> Minibatch:
        stretch = lease.stretch
        if stretch is None or stretch.part < 0:
            return Minibatch([lease], reading.samples, None, self._ordinal)
        return Minibatch(
            [lease], reading.samples, reading.samples / reading.whole, stretch.turn * _EPOCH + stretch.batch
        )

    @property
    def _ordinal(self) -> int:
        """The number of the next minibatch, of workers that each read their own shards."""
        return self._epoch * _EPOCH + self._given

    def _add_end(self, lease: Lease, reading: Reading) -> tuple[Minibatch, Any] | None:
        """Adds the end of a shard to others; returns a minibatch if they are enough for one."""
        found = self._joined() if self._ends and self._short + reading.samples > self._size else None
        self._ends.append((lease, reading.batch))
        return self._joined() if found is None and self._short >= self._size else found

    def _last(self) -> tuple[Minibatch, Any] | None:
        """A minibatch of what is left; None if it is incomplete, and such are dropped."""
        if not self._loader.drop_last:
            return self._joined()
        for lease, _ in self._ends:
            self._lender.skip(lease)
        self._ends = []
        return None

    def _joined(self) -> tuple[Minibatch, Any]:
        """A minibatch of the ends of shards."""
        leases, parts = zip(*self._ends, strict=True)
        self._ends = []
        samples = list(itertools.chain(*parts))
        return Minibatch(leases, len(samples), None, self._ordinal), self._maker(samples)


class _Requests:
    """The requests of a leased stream, for one process of the loader after the other."""

    def __init__(self, make: Callable[[int], tuple[Request | None, bool]], lanes: int) -> None:
        """make: makes the next request of a process; True if there is none, and will not be."""
        self._make, self._lanes = make, lanes

    def __iter__(self) -> Iterator[Request | None]:
        for lane in itertools.cycle(range(self._lanes)):
            request, ended = self._make(lane)
            if ended:
                return
            yield request
