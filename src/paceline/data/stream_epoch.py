"""An epoch of a stream: its samples are not known before they are read. Pure: no clock, no socket.

A stream has sources, each an iterator that is read from its beginning to its end. Either every worker reads all of
them, and skips what others have: then stretches of a source go to any worker, in order. Or each source, a shard of the
data, is read by one worker at a time; if that worker is lost, another one opens the shard again and goes on from there.
A stretch that was cancelled or dropped goes back to its worker, which need not read it again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import msgspec

from paceline.data.epochs import EpochParts, Part, Stretch, Want


class StreamPlan(msgspec.Struct, frozen=True, array_like=True):
    """How a stream is given out."""

    sources: int
    shared: bool
    """True if every worker reads all sources."""
    limit: int = 0
    """Samples after which an epoch ends, and the next one goes on from there; 0 if it ends with the stream."""
    note: bytes = b""
    """What the worker that began the epoch lets the others know."""


class _Place:
    """How far a stream was given out; it outlives an epoch that does not end with the stream."""

    def __init__(self, sources: int, turn: int) -> None:
        self.turn = turn
        self.next = [0] * sources
        """By source, the first sample that was not leased."""
        self.ends: list[float] = [math.inf] * sources
        self.batch = 0
        """The next batch, if batches are divided."""
        self.share = 0
        """The next share of a batch."""
        self.readers: dict[int, tuple[int, int]] = {}
        """By source that is not shared, the worker and its process that read it last."""
        self.unread = deque(range(sources))
        """Sources that no worker reads."""
        self.returned: deque[tuple[int, Part]] = deque()
        """Minibatches that were returned, with their workers; -1 for those of workers that are gone."""

    def is_used_up(self, source: int) -> bool:
        return self.next[source] >= self.ends[source]

    @property
    def at_end(self) -> bool:
        return not self.returned and all(map(self.is_used_up, range(len(self.next))))


class StreamEpoch(EpochParts):
    """The minibatches of an epoch of a stream, made as they are asked for."""

    def __init__(
        self,
        number: int,
        plan: StreamPlan,
        sizes: Sequence[int],
        workers: Sequence[int] | None,
        before: EpochParts | None = None,
    ) -> None:
        """sizes: samples of the minibatches, in turn; before: the last epoch of the same loader."""
        super().__init__(number, [], workers)
        self._plan, self._sizes, self._batch = plan, [size for size in sizes if size], sum(sizes)
        self._ranks = None if workers is None else list(workers)
        self._budget = plan.limit or math.inf
        self._place = place = self._continued(before)
        self._gone: set[int] = set()
        """Workers whose shards go to others."""
        self.size = len(place.returned)
        self.note = plan.note

    def _continued(self, before: EpochParts | None) -> _Place:
        """Where this epoch begins: where the last one stopped, or at the beginning of the stream."""
        sources = self._plan.sources
        if not isinstance(before, StreamEpoch):
            return _Place(sources, 0)
        place = before._place
        place.returned.extend((-1, part) for part in before.unleased())
        if not self._plan.limit or place.at_end or len(place.next) != sources:
            return _Place(sources, place.turn + 1)
        return place

    # -- what is left ------------------------------------------------------------------------------------------------

    @property
    def _exhausted(self) -> bool:
        """True if all samples of the epoch were leased."""
        place = self._place
        return self._budget <= 0 or all(map(place.is_used_up, range(self._plan.sources)))

    @property
    def left(self) -> float:
        return super().left + len(self._place.returned) if self._exhausted else math.inf

    @property
    def complete(self) -> bool:
        return self._exhausted and not super().left and not self._place.returned and self.done >= self.size

    @property
    def turn(self) -> int:
        """How often the stream was begun before."""
        return self._place.turn

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """The sources that every worker reads and that have ended, with their samples."""
        ends = enumerate(self._place.ends) if self._plan.shared else ()
        return [(source, int(length)) for source, length in ends if length != math.inf]

    def end(self, source: int, turn: int, length: int) -> None:
        """Notes the end of a source."""
        place = self._place
        if turn != place.turn or place.ends[source] != math.inf:
            return
        place.ends[source] = length
        if not self._plan.shared:
            self._budget += max(0, place.next[source] - length)
        for queue in (self.common, *self.own.values()):
            for part in [part for part in queue if self._is_empty(part)]:
                queue.remove(part)
                self.size -= 1

    def _is_empty(self, part: Part) -> bool:
        """True if a minibatch has no samples: its source has ended before."""
        stretch, place = part.stretch, self._place
        return stretch is not None and stretch.turn == place.turn and stretch.start >= place.ends[stretch.source]

    # -- giving out --------------------------------------------------------------------------------------------------

    def take(self, worker: int, want: Want) -> Part | None:
        for place, (owner, part) in enumerate(self._place.returned):
            if owner in (worker, -1) and self._suits(part, want, again=owner == worker):
                del self._place.returned[place]
                return self._reread(part, want) if owner < 0 else part
        if self._plan.shared and self._ranks is not None:
            return self._in_turn(worker, want)
        return self._fresh_shared(want) if self._plan.shared else self._fresh(worker, want)

    def _suits(self, part: Part, want: Want, *, again: bool) -> bool:
        """again: True if the same worker has had it, whose process may have kept the samples."""
        stretch = part.stretch
        if stretch is None or (want.most and stretch.size > want.most):
            return False
        return want.any_lane or stretch.lane == want.lane or not (again or self._plan.shared)

    def _reread(self, part: Part, want: Want) -> Part:
        """A part that another worker has had."""
        if self._plan.shared or part.stretch is None:
            return part
        return part._replace(stretch=msgspec.structs.replace(part.stretch, lane=want.lane))

    def _in_turn(self, worker: int, want: Want) -> Part | None:
        """The worker's part of the next batch."""
        queue = self.common or self.own.setdefault(worker, deque())
        while not queue and worker in (self._ranks or ()) and not self._exhausted:
            self._deal()
        head = queue[0].stretch if queue else None
        if head is None or not (want.any_lane or head.lane == want.lane):
            return None
        return queue.popleft()

    def _deal(self) -> None:
        """Deals the parts of the next batch out."""
        assert self._ranks is not None
        place = self._place
        number, source = place.batch, place.batch % self._plan.sources
        place.batch += 1
        start = number // self._plan.sources * self._batch
        place.next[source] = start + self._batch
        if start >= place.ends[source]:
            return
        self._budget -= self._batch
        first = start
        for part, samples in enumerate(self._sizes):
            stretch = Stretch(source, start, self._batch, place.turn, source, samples, part, number)
            self.own.setdefault(self._ranks[part % len(self._ranks)], deque()).append(Part(first, [], stretch))
            first += samples
            self.size += 1

    def _fresh_shared(self, want: Want) -> Part | None:
        """The next minibatch of a source that all workers read."""
        place, count = self._place, self._plan.sources
        lanes = [(want.lane + step) % count for step in range(count)] if want.any_lane else [want.lane % count]
        found = next((lane for lane in lanes if not place.is_used_up(lane)), None)
        return None if found is None else self._cut(found, found, want.most)

    def _fresh(self, worker: int, want: Want) -> Part | None:
        """The next minibatch of a shard that this worker reads, or begins to."""
        place = self._place
        reads = [
            (source, lane)
            for source, (reader, lane) in place.readers.items()
            if reader == worker and not place.is_used_up(source)
        ]
        for source, lane in reads:
            if lane == want.lane:
                return self._cut(source, lane, want.most)
        if want.any_lane and reads:
            return self._cut(*reads[0], want.most)
        source = self._begin_shard(worker)
        if source < 0:
            return None
        place.readers[source] = (worker, want.lane)
        return self._cut(source, want.lane, want.most)

    def _begin_shard(self, worker: int) -> int:
        """Takes out a shard that this worker shall read; -1 if there is none."""
        place, ranks = self._place, self._ranks
        for source in place.unread:
            if ranks is None or worker not in ranks or ranks[source % len(ranks)] in {worker, *self._gone}:
                place.unread.remove(source)
                return source
        return -1

    def _cut(self, source: int, lane: int, most: int) -> Part | None:
        """The next minibatch of a source."""
        if self._budget <= 0:
            return None
        place = self._place
        size = self._sizes[place.share % len(self._sizes)]
        if most and most < size:
            size = most
        else:
            place.share += 1
        start = place.next[source]
        place.next[source] += size
        self._budget -= size
        self.size += 1
        return Part(start, [], Stretch(source, start, size, place.turn, lane, size))

    # -- returns -----------------------------------------------------------------------------------------------------

    def unleased(self) -> list[Part]:
        """Minibatches that were dealt out and not leased, in order."""
        queues = (self.common, *self.own.values())
        return sorted((part for queue in queues for part in queue), key=lambda part: part.first)

    def put_back(self, worker: int, part: Part) -> None:
        if self._is_empty(part):
            self.size -= 1
            return
        if part.stretch is not None and part.stretch.turn != self._place.turn:  # of an epoch before
            part = part._replace(stretch=msgspec.structs.replace(part.stretch, turn=self._place.turn))
        self._place.returned.appendleft((worker if worker in self.here else -1, part))

    def release(self, worker: int) -> bool:
        had = super().release(worker)
        place = self._place
        place.returned = deque((-1 if owner == worker else owner, part) for owner, part in place.returned)
        mine = [source for source, (reader, _) in place.readers.items() if reader == worker]
        for source in mine:
            del place.readers[source]
            if not place.is_used_up(source):
                place.unread.appendleft(source)
                had = True
        if self._ranks is not None and not self._plan.shared:
            self._gone.add(worker)
            had = had or any(self._ranks[source % len(self._ranks)] == worker for source in place.unread)
        elif self._ranks is not None and worker in self._ranks and len(self._ranks) > 1:
            self._ranks.remove(worker)
            had = True
        return had

    def admit(self, worker: int) -> None:
        super().admit(worker)
        if self._ranks is not None and self._plan.shared and worker not in self._ranks:
            self._ranks = sorted([*self._ranks, worker])

    def absent(self) -> list[int]:
        return sorted({*super().absent(), *(self._ranks or ())} - self.here - self._gone)
