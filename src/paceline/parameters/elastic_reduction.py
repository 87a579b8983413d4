"""The mean gradient of an elastic team on several machines, whose owners of shards change when workers are lost.

On every machine all shards have an owner among the workers that are left there. The sums of an update are written
beside the gradients, not over them: if a worker is lost during an exchange, the others repeat it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence

from torch.distributed import DistError

from paceline.cluster.membership import Members
from paceline.collectives.inter_machine import InterMachineReduce, ReduceSegment
from paceline.errors import TeamError
from paceline.parameters.announcements import Header
from paceline.parameters.bucket_exchange import Announcing, BucketExchange, sum_here
from paceline.parameters.buckets import cut_buckets
from paceline.parameters.exchange_lanes import Weigh
from paceline.parameters.gradients import Gradients
from paceline.parameters.layout import Layout
from paceline.parameters.reduction import SharedReduction, Weights


def shard_owner(ranks: Sequence[int], shard: int, shards: int) -> int:
    """The rank among these that owns a shard."""
    return ranks[shard * len(ranks) // shards]


class ElasticReduction:
    """One worker's part, formed again whenever a worker is lost."""

    def __init__(self, layout: Layout, gradients: Gradients, members: Members, topology: str, shards: int) -> None:
        self._layout, self._members, self._topology, self._shards = layout, members, topology, shards
        self._here = members.machines[members.machine]
        self.place = len(self._here)
        """The index of the sums, behind the gradients of this machine's workers."""
        self._gradients = gradients
        self._sums = SharedReduction(layout, gradients, self.place)
        self._between: InterMachineReduce | None = None
        self._exchange: BucketExchange | None = None
        self._announcing: Announcing | None = None
        self._alive = list(range(len(members.machines)))
        """Machines on which a worker is left."""
        self._order: list[int] | None = None
        """The order of machines around the ring, once it is known."""
        self.broken = False
        """True if an exchange has failed since the connections were made."""
        self.trouble = ""
        """Why, in one sentence."""

    def alive(self, rank: int) -> bool:
        """True if a worker is left on this rank's machine, where its gradient lies."""
        return any(rank in self._members.machines[machine] for machine in self._alive)

    def form(self, gone: Collection[int]) -> None:
        """Connects the workers that are left; all of them do this at the same time."""
        members = self._members
        self.close()  # so that no worker waits on them
        left = [[rank for rank in ranks if rank not in gone] for ranks in members.machines]
        self._alive = [machine for machine, ranks in enumerate(left) if ranks]
        machines = [left[machine] for machine in self._alive]
        found = [] if members.rank in gone else self._cut(machines)
        self._segments = [segment for segment in found if members.rank in segment.owners]
        self._buckets = cut_buckets(self._layout, found, len(machines))
        if self._announcing is not None:
            self._announcing.board.form(self._alive, [rank for ranks in machines for rank in ranks])
            self._announcing.announcer.next(wrong=True, buckets=self._buckets)
        self._gone = gone
        self.broken = False
        if len(machines) == 1:
            return
        order = self._order and [self._alive.index(machine) for machine in self._order if machine in self._alive]
        try:
            self._between = between = InterMachineReduce(members, self._topology, machines, order)
        except (TeamError, DistError, RuntimeError) as error:
            self._fail(str(error))
            return
        self._order = [self._alive[machine] for machine in between.order]
        self._open()

    def _open(self) -> None:
        assert self._between is not None
        given = self._members, self._between, self._buckets, self._sums, self._here
        self._exchange = BucketExchange(*given, self._announcing, self._gone)

    def announce(self, header: Callable[[], Header], weigh: Weigh) -> Announcing:
        """From now on announce this worker's gradients; all workers call it. Arguments: see `Announcing`."""
        self._announcing = Announcing(self._members, self._gradients, self._buckets, header, weigh)
        self._close_exchange()
        self._open()
        return self._announcing

    def close(self) -> None:
        """Closes the connections."""
        self._close_exchange()
        self._between = None

    def _close_exchange(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = None

    @property
    def sent(self) -> tuple[float, int]:
        """When the buckets of the last round began to leave, 0.0 if none left, and the bytes that came."""
        return (0.0, 0) if self._exchange is None else (self._exchange.sent, self._exchange.received)

    def _cut(self, machines: Sequence[Sequence[int]]) -> list[ReduceSegment]:
        """Segments of whole shards with the same owner on each machine."""
        owners = [[shard_owner(ranks, shard, self._shards) for ranks in machines] for shard in range(self._shards)]
        found = []
        for own, run in itertools.groupby(range(self._shards), lambda shard: owners[shard]):
            shards = list(run)
            for number, flat in enumerate(self._layout.flats):
                start, stop = flat.shards[shards[0]][0], flat.shards[shards[-1]][1]
                found += [ReduceSegment(number, start, stop, own)] if start < stop else []
        return found

    def sum(self, weights: Weights, used: list[bytes] | None, *, again: bool = False) -> int:
        """Makes this worker's part of the sums; returns the bytes received. Check `broken` afterwards.

        again: True if a worker has announced what is not its gradient.
        """
        if self._exchange is None:
            return sum(sum_here(self._sums, self._here, one, weights, used) for one in self._segments)
        try:
            return self._exchange.sum(weights, used, again=again)
        except TeamError as error:
            self._fail(str(error))
            return 0

    def _fail(self, why: str) -> None:
        """Closes this worker's connections, so that no other waits for it."""
        self.broken, self.trouble = True, why
        self.close()
