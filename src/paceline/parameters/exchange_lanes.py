"""The threads that exchange a worker's buckets with other machines, while its script computes.

Several lanes take turns with the buckets: while one waits for an answer, another one sends. A lane is ready to receive
a bucket before it is made, and sends it once all workers of this machine have announced it.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from paceline.collectives.inter_machine import Awaited, InterMachineReduce
from paceline.parameters.announcements import Header, RoundBoard
from paceline.parameters.buckets import Bucket
from paceline.parameters.reduction import Weights

_LANES = 2
"""With two, the link between two or three machines of 1 Gbit/s is full; more only take time from the script."""
_AHEAD = 3
"""Buckets that a lane is ready to receive before it comes to them: a sender learns it after all that is on its way."""
_SLICE = 0.2
"""Seconds after which a lane that sleeps looks whether it shall stop."""
Share = tuple[Weights, list[bytes] | None]
"""The weights of ranks, and per rank a byte per parameter, 1 if it has a gradient; None if all have."""
Weigh = Callable[[Sequence[tuple[int, Header]]], Weights]


class _Stopped(Exception):
    """The lanes shall end."""


@dataclasses.dataclass(eq=False)
class _Job:
    """The exchange of all buckets, once."""

    base: int
    """The count at which the round starts."""
    announced: bool
    """True if buckets are exchanged when they are announced; else they are there."""
    given: threading.Event = dataclasses.field(default_factory=threading.Event)
    share: Share | None = None
    """The weights that the workers have agreed on, once `given`."""
    left: int = _LANES
    """Lanes that have not done their part."""
    received: int = 0
    sent: float = 0.0
    """When the first bucket was sent; 0.0 before."""
    error: BaseException | None = None


class ExchangeLanes:
    """One worker's threads, until `close`."""

    def __init__(
        self,
        between: InterMachineReduce,
        buckets: Sequence[tuple[int, Bucket]],
        total: Callable[[Bucket], torch.Tensor],
        make: Callable[[Bucket, Weights, list[bytes] | None], int],
        whole: int,
        board: RoundBoard | None = None,
        weigh: Weigh | None = None,
        *,
        leads: bool = False,
        places: Sequence[int] = (),
    ) -> None:
        """buckets: this worker's own, in the order of all, with their numbers there.

        total: where the sum of a bucket lies; make: sums it on this machine, and returns the bytes read. whole: bytes
        of all workers' buckets, by which the topology is chosen. board: of announcements, if there are any; weigh: the
        weights that follow from headers. leads: True if this worker exchanges the headers; places: workers that
        announce, by their place on this machine.
        """
        self._between, self._buckets, self._total, self._make = between, buckets, total, make
        self._board, self._weigh, self._leads, self._places = board, weigh, leads, places
        self._whole = whole
        self._one = threading.Lock()
        """Held while a bucket is summed: the sources have one place for what they read."""
        self._turn = threading.Condition()
        self._jobs = 0
        self._job = _Job(0, announced=False, left=0)
        self._stopping = False
        self._process = os.getpid()
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"exchange {lane}", daemon=True)
            for lane in range(min(_LANES, max(1, len(buckets))))
        ]
        for thread in self._threads:
            thread.start()

    # -- called by the worker ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Exchange the buckets of the board's round when they are announced."""
        assert self._board is not None
        self._post(_Job(self._board.base, announced=True, left=len(self._threads)))

    def confirm(self, weights: Weights, used: list[bytes] | None) -> int:
        """All workers have come: wait until the round's buckets are exchanged; returns the bytes received."""
        return self._await(self._job, (weights, used))

    @property
    def sent(self) -> float:
        """When the first bucket of the last round or exchange was sent; 0.0 if none was."""
        return self._job.sent

    def exchange(self, weights: Weights, used: list[bytes] | None) -> int:
        """Exchange all buckets now; returns the bytes received."""
        job = _Job(0, announced=False, left=len(self._threads))
        self._post(job)
        return self._await(job, (weights, used))

    def _post(self, job: _Job) -> None:
        with self._turn:
            self._job, self._jobs = job, self._jobs + 1
            self._turn.notify_all()

    def _await(self, job: _Job, share: Share) -> int:
        job.share = share
        job.given.set()
        until = time.monotonic() + self._between.limit
        with self._turn:
            while job.left and job.error is None and (rest := until - time.monotonic()) > 0:
                self._turn.wait(rest)
        if job.error is not None:
            raise job.error
        if job.left:
            error = self._between.late()
            self._between.abort()
            raise error
        return job.received

    def close(self) -> None:
        """Ends the threads; an exchange that runs is broken off, also for the others."""
        if os.getpid() != self._process:
            return  # a fork has no such threads
        with self._turn:
            self._stopping = True
            job = self._job
            job.given.set()
            self._turn.notify_all()
        if job.left and (self._between.waiting or not job.announced):  # else all sleep until something is announced
            self._between.abort()
        for thread in self._threads:
            thread.join(2.0)

    # -- the threads -------------------------------------------------------------------------------------------------

    def _run(self, lane: int) -> None:
        done = 0
        while True:
            with self._turn:
                while self._jobs == done and not self._stopping:
                    self._turn.wait()
                if self._stopping:
                    return
                done, job = self._jobs, self._job
            received = 0
            try:
                later = iter(self._buckets[lane :: len(self._threads)])
                coming = deque(self._expected(*one) for one in itertools.islice(later, 1 + _AHEAD))
                if job.announced and self._leads and lane == 0:
                    self._share_headers(job)
                while coming:
                    received += self._exchange(job, *coming.popleft())
                    coming += [self._expected(*one) for one in itertools.islice(later, 1)]
            except _Stopped:
                return
            except BaseException as error:
                with self._turn:
                    job.error = job.error or error
            with self._turn:
                job.left -= 1
                job.received += received
                self._turn.notify_all()

    def _expected(self, number: int, bucket: Bucket) -> tuple[int, Bucket, Awaited]:
        return number, bucket, self._between.expect(self._total(bucket), bucket.owners, number, self._whole)

    def _exchange(self, job: _Job, number: int, bucket: Bucket, awaited: Awaited) -> int:
        weights = self._headers(job) if job.announced else None
        for place in self._places if job.announced else ():
            assert self._board is not None
            self._until(place, job.base + 2 + number)
        if weights is None or self._board is None:
            weights, used = self._given(job)
        else:
            used = self._board.used()
        with self._one:
            self._make(bucket, weights, used)
            job.sent = job.sent or time.perf_counter()
        return self._between.all_reduce(self._total(bucket), awaited)

    def _given(self, job: _Job) -> Share:
        job.given.wait()
        if job.share is None:
            raise _Stopped
        return job.share

    def _headers(self, job: _Job) -> Weights | None:
        """The weights of a round, as soon as all workers of the team have told what theirs follow from.

        None if one does not know that before all have agreed.
        """
        board = self._board
        assert board is not None and self._weigh is not None
        self._until(board.known, job.base + 1)
        headers = board.all_headers()
        return None if headers is None else self._weigh(headers)

    def _share_headers(self, job: _Job) -> None:
        """Tell the other machines the headers of this one's workers, and these theirs."""
        board = self._board
        assert board is not None
        own = torch.frombuffer(board.headers, dtype=torch.uint8)
        awaited = self._between.expect_shared(own)
        for place in self._places:
            self._until(place, job.base + 1)
        board.spread(job.base, self._between.share(own.clone(), awaited))

    def _until(self, place: int, count: int) -> None:
        """Sleep until a word of the board is as far as this."""
        assert self._board is not None
        while (seen := self._board.reached(place, count)) is not None:
            if self._stopping:
                raise _Stopped
            self._board.words.sleep(place, seen, _SLICE)
