"""A stream of which each worker gets its share of every batch, where all workers make every update together.

A dataset in shards is divided by them: each replica reads its own, and takes its part of a batch from there. Any other
stream is read by every worker as a whole, which keeps its part of each batch: so the batches are those of one process.
What the workers read is compared from time to time, as they must all see the same stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from torch.utils.data import DataLoader

from paceline.data.balance import Balancer
from paceline.data.epochs import EpochLeft
from paceline.data.loader import check_divisible, global_batch_of
from paceline.data.place import LoaderPlace, StreamPlace
from paceline.data.stream.kinds import batch_maker, check_stream, is_keyed, shards_in, whole_notice, whole_stream
from paceline.data.stream.marks import Mark
from paceline.data.stream.reader import Reading, Request, StreamReader
from paceline.data.stream.requests import ahead_of, request_loader, seed_alike, seed_state, weakly
from paceline.data.stream.sources import ShardChains, Sources
from paceline.data.stream.whole_pass import TurnRequests, whole_batches
from paceline.data.team_view import TeamView
from paceline.data.user_loader import UserLoader
from paceline.errors import UsageError, unlike_streams


class _Start(msgspec.Struct, array_like=True):
    """A worker's facts at the start of an epoch."""

    given: int
    """Batches that the script has had."""
    random: bytes
    """The state of the generator from which the loader seeds its processes."""
    shards: int
    """The digest of the list of shards."""


class TeamStream(UserLoader):
    """This worker's share of a stream; iterated like the DataLoader itself."""

    def __init__(
        self,
        loader: DataLoader[Any],
        team: TeamView,
        *,
        global_batch: int | None = None,
        balance: bool = False,
        per_worker: bool = False,
        steps: int | None = None,
        number: int = 0,
        changed: Callable[[int, list[int]], None] = lambda _start, _shares: None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """per_worker: the loader's batch is one worker's, and all workers take equally many batches of an epoch.

        steps: after which an epoch ends; the next one goes on from there. number: of the loader, among the team's.
        """
        super().__init__(loader)
        check_stream(loader)
        self._number = number
        self._team, self._asked, self._limit = team, global_batch, steps
        self.global_batch = global_batch_of(loader, team.replicas, global_batch, per_worker=per_worker)
        """Samples in a round, all workers together."""
        self._balancer = Balancer(team.replicas, self.global_batch, on=balance, changed=changed)
        # Where all workers need equally many batches, all must know when the stream ends.
        alike = team.lockstep or per_worker
        shards = None if alike else shards_in(loader, team.replicas, team.replicas)
        self._shards = shards
        sources: Sources = whole_stream(loader)
        if shards is not None:
            sources = ShardChains(shards, team.replica, team.replicas, loader.num_workers)
        elif notice := whole_notice(loader, team.replicas):
            say(notice)
        self._sources = sources
        self._turn = -1
        self._positions: list[int] = []
        """Of each source, if this worker reads it alone: the samples that were requested."""
        self._requests = TurnRequests(weakly(self._part), sources.count)
        self._reader = StreamReader(sources, stride=self.global_batch if shards is None else 0)
        self._inner = request_loader(loader, self._reader, self._requests, batch_maker(loader), keyed=is_keyed(loader))
        self._stream: Iterator[Reading] | None = None
        """The readings of an epoch, or of the turn of the stream that several epochs continue."""
        self._given = 0
        self._base = 0
        """The number of the first round of the epoch."""
        self.reads_whole = shards is None
        self._epochs = 0
        """Epochs of training that have begun."""
        self._next = self._begun = 0
        """The next batch of the stream; batches of the epoch so far."""
        self._marks: dict[int, Mark] = {}
        """By source, the last mark of what was read in this turn of the stream."""
        self._resumed: StreamPlace | None = None

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def place(self, left: EpochLeft | None) -> LoaderPlace | None:
        if not self.reads_whole:
            return None
        if not self._epochs:
            return LoaderPlace(0)
        marks = [(mark.source, mark.samples, mark.digest) for mark in self._marks.values()]
        place = StreamPlace(self._next, self.global_batch, self._sources.count, self._begun, marks)
        return LoaderPlace(self._epochs - 1, stream=place)

    def _continue(self, place: LoaderPlace) -> None:
        super()._continue(place)
        known = place.stream
        self._epochs, self._resumed = place.epoch, known
        if known is not None and (known.batch, known.sources) != (self.global_batch, self._sources.count):
            raise UsageError(
                f"the snapshot is of a stream in batches of {known.batch}, read by {known.sources} process"
                f"{'es' if known.sources > 1 else ''}, and the loader has batches of {self.global_batch} and "
                f"{self._sources.count}; go on with the same batch_size and num_workers"
            )

    def draws(self) -> dict[str, Any]:
        return {**super().draws(), "sampler": None}  # it is read from its beginning, as any stream

    def _compare_trained(self, marks: Sequence[Mark]) -> None:
        """As `_compare`; refuses to go on in another stream than that of the snapshot."""
        before = {} if self._resumed is None else {one[:2]: one[2] for one in self._resumed.marks}
        for mark in marks:
            self._marks[mark.source] = mark
            if before.get((mark.source, mark.samples), mark.digest) != mark.digest:
                raise UsageError(
                    "the stream is not the one that the snapshot is of: its samples, or their order, have changed; a "
                    "stream that draws random numbers must seed them by itself, alike in every run"
                )
        self._compare(marks)

    # -- lengths -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._loader) if self._evaluated or self._limit is None else self._limit

    # -- evaluation --------------------------------------------------------------------------------------------------

    def _evaluates(self) -> bool:
        return self._team.evaluates

    def _steps(self) -> int | None:
        return self._team.steps if self._team.replicas > 1 else None

    def _whole(self) -> Iterable[Any]:
        if self._team.replicas == self._team.size:
            return self._loader
        return whole_batches(self._loader, functools.partial(self._agree, evaluates=True), self._compare)

    # -- training ----------------------------------------------------------------------------------------------------

    def _train(self) -> Iterator[Any]:
        check_divisible(self._loader, self.global_batch, self._team.replicas, self._asked)
        limit, self._epochs = self._limit, self._epochs + 1
        stream = self._begin()
        given = self._begun
        try:
            while limit is None or given < limit:
                self._team.ask_batch()
                reading = self._requests.following(stream, self._compare_trained)
                if reading is None:
                    self._stream = None
                    break
                whole = reading.whole if self._shards is None else self.global_batch
                self._team.take_batch(reading.samples, reading.samples / whole, self, self._base + given)
                if reading.request is not None and self.reads_whole:
                    start, source = reading.request.start, reading.request.source
                    self._next = start // self.global_batch * self._sources.count + source + 1
                given += 1
                self._begun, self._given = given, self._base + given
                yield reading.batch
        finally:
            if limit is None:
                self._stream = None  # a script that leaves the loop begins anew, as with any loader
        if self._stream is None and self._shards is None:
            self._check_end()
        self._team.finish_epoch()

    def _begin(self) -> Iterator[Reading]:
        """Begins an epoch; all workers do it together."""
        begun = self._stream
        start = self._agree(self._inner, begin=begun is None)
        self._base = max(one.given for one in start)
        self._begun = 0
        if begun is None:
            self._next, self._marks = 0, {}
            if self._turn >= 0:
                self._resumed = None
            elif self._resumed is not None:
                self._begun, self._next = self._resumed.given, self._resumed.next
                self._requests.first = self._next
            self._turn += 1
            self._positions = [0] * self._sources.count
            begun = self._stream = iter(self._inner)
        return begun

    def _agree(self, inner: DataLoader[Any], *, begin: bool = True, evaluates: bool = False) -> list[_Start]:
        """Exchanges what all must know at the start of an epoch, and lets loader processes draw alike.

        begin: True if processes are started; evaluates: True if the epoch is only evaluated.
        """
        leads = self._team.rank == self._team.lead
        state = seed_state(self._loader) if begin and leads else b""
        shards = 0 if self._shards is None else self._shards.digest()
        own = msgspec.msgpack.encode(_Start(self._given, state, shards))
        payloads = self._team.from_all(own, self._number, evaluates=evaluates)
        found = [msgspec.msgpack.decode(payload, type=_Start) for payload in payloads]
        others = [rank for rank, one in enumerate(found) if one.shards != found[0].shards]
        if others:
            raise unlike_streams(others, 0, 1)
        if begin and not leads:
            seed_alike(self._loader, inner, found[self._team.lead].random)
        return found

    def _part(self, number: int, source: int) -> Request:
        """The request for this worker's part of a batch."""
        shares = self._balancer.shares(self._base + number)
        full = bool(self._loader.drop_last)
        if self._shards is None:
            start = number // self._sources.count * self.global_batch
            return Request(source, start, self.global_batch, self._turn, shares, self._team.replica, full)
        start, size = self._positions[source], shares[self._team.replica]
        self._positions[source] += size
        return Request(source, start, size, self._turn, full=full)

    # -- workers that must read the same stream ----------------------------------------------------------------------

    def _compare(self, marks: Sequence[Mark]) -> None:
        """Raises Mismatch, on all workers, if they have not read the same samples."""
        own = msgspec.msgpack.encode(list(marks))
        payloads = self._team.compare(own)
        others = [rank for rank, payload in enumerate(payloads) if payload and payload != payloads[0]]
        if others:
            raise unlike_streams(others, 0, marks[-1].samples)

    def _check_end(self) -> None:
        """Raises Mismatch if a worker's stream ends here and another's goes on."""
        if self._team.size > 1:
            self._team.compare(b"", end=True)

    # -- uneven workers ----------------------------------------------------------------------------------------------

    def measure(self, paces: Sequence[tuple[float, int]], round_number: int) -> None:
        """Adds each worker's seconds and samples of a round, by which a balanced loader splits later ones."""
        self._balancer.measure(paces, round_number, ahead_of(self._loader))
