"""The mean gradient of a team on several machines: summed in shared memory on each, then between them.

Every worker owns a shard of its machine's buffers, and exchanges the machine's sum of it with the owners of the same
elements on other machines, bucket by bucket. The optimizer then updates the shard on every machine, with the same bits.

With announcements, a bucket is exchanged as soon as the backward passes of all workers have made it. The bits are the
same: the weights, the order of terms and the borders of buckets do not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.cluster.membership import Members
from paceline.collectives.inter_machine import InterMachineReduce, ReduceSegment, segments
from paceline.parameters.announcements import Header
from paceline.parameters.bucket_exchange import Announcing, BucketExchange
from paceline.parameters.buckets import cut_buckets
from paceline.parameters.exchange_lanes import Weigh
from paceline.parameters.gradients import Gradients
from paceline.parameters.layout import Layout, borders
from paceline.parameters.reduction import Reduction, SharedReduction, Weights
from paceline.transport import BarrierKind


class MachinesReduction(Reduction):
    """As `SharedReduction`, with the sums of the other machines; ranks are the team's."""

    def __init__(
        self,
        layout: Layout,
        gradients: Gradients,
        members: Members,
        topology: str,
        sources: Sequence[int] | None = None,
        target: int | None = None,
    ) -> None:
        """sources: numbers of the replicas on this machine, if a gradient is a replica's and not a worker's.

        target: the index of the buffer for the sums; by default that of this worker.
        """
        self._layout, self._gradients, self._members = layout, gradients, members
        self._here = members.machines[members.machine] if sources is None else sources
        self._rank = members.local.rank
        self.target = self._rank if target is None else target
        self.inside = SharedReduction(layout, gradients, self._rank, self.target)
        self.between = InterMachineReduce(members, topology)
        found: list[ReduceSegment] = []
        for number, flat in enumerate(layout.flats):
            bounds = [borders(flat.count, flat.dtype, len(ranks)) for ranks in members.machines]
            found += segments(number, bounds, members.machines)
        self._segments = [segment for segment in found if members.rank in segment.owners]
        """Of this worker's shard."""
        self._buckets = cut_buckets(layout, found, len(members.machines))
        """Of all workers of this machine."""
        self.announcing: Announcing | None = None
        self._exchange = self._make_exchange()

    def _make_exchange(self) -> BucketExchange:
        here = self._here
        return BucketExchange(self._members, self.between, self._buckets, self.inside, here, self.announcing)

    def announce(self, header: Callable[[], Header], weigh: Weigh) -> Announcing:
        """From now on announce this worker's gradients; all workers call it. Arguments: see `Announcing`."""
        self._exchange.close()
        self.announcing = Announcing(self._members, self._gradients, self._buckets, header, weigh)
        self._exchange = self._make_exchange()
        return self.announcing

    def shard(self, weights: Weights, used: list[bytes] | None, *, again: bool = False) -> int:
        return self._exchange.sum(weights, used, again=again)

    @property
    def sent(self) -> tuple[float, int]:
        """When the buckets of the last round began to leave, 0.0 if none left, and the bytes that came."""
        return self._exchange.sent, self._exchange.received

    def gather(self) -> int:
        if self.target == self._rank:
            return self.inside.gather()
        for own, total in zip(self._gradients.own, self._gradients.flats[self.target], strict=True):
            own.copy_(total)
        return sum(own.nbytes for own in self._gradients.own)

    def adopt(self, rank: int) -> None:
        """rank: in this machine's own numbers."""
        self.inside.adopt(rank)

    def norm(self, kind: float, used: bytes | None) -> float:
        return self.inside.norm(kind, used)

    def supply(self, passive: list[bool]) -> None:
        """Copies the mean, as scripts have changed it, to machines on which all workers are passive."""
        machines = self._members.machines
        idle = [number for number, ranks in enumerate(machines) if all(passive[rank] for rank in ranks)]
        if not idle:
            return
        source = next(number for number in range(len(machines)) if number not in idle)
        for flat, start, stop, owners in self._segments:
            takers = [owners[number] for number in idle]
            if self._members.rank == owners[source] or self._members.rank in takers:
                giver = self.source(passive) if self._members.rank == owners[source] else self._rank
                tensor = self._gradients.flats[giver][flat][start:stop]
                self.between.copy(tensor, owners[source], takers)
        if self._members.machine in idle:
            self._members.local.barrier.wait(BarrierKind.PUBLISH)
            self.inside.gather()
            self._members.local.barrier.wait(BarrierKind.PUBLISH)

    def source(self, passive: list[bool]) -> int:
        """The local number of the worker whose copy of the mean counts here: a passive worker's script saw none."""
        if not passive[self._members.rank]:
            return self._rank
        return next((index for index, rank in enumerate(self._here) if not passive[rank]), self._rank)

    def close(self) -> None:
        self._exchange.close()
