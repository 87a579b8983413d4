"""The exchange of a worker's buckets with other machines, announced in the backward pass where that can be."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence

import torch

from paceline.cluster.membership import Members
from paceline.collectives.inter_machine import InterMachineReduce, ReduceSegment
from paceline.parameters.announcements import BucketAnnouncer, Header, RoundBoard
from paceline.parameters.buckets import Bucket
from paceline.parameters.exchange_lanes import ExchangeLanes, Weigh
from paceline.parameters.gradients import Gradients
from paceline.parameters.reduction import SharedReduction, Weights


class Announcing:
    """A worker's announcements, for as long as its trainer lives."""

    def __init__(
        self,
        members: Members,
        gradients: Gradients,
        buckets: Sequence[Bucket],
        header: Callable[[], Header],
        weigh: Weigh,
    ) -> None:
        """buckets: of all workers of the machine, which all call this.

        header: what the weight of this worker's gradient follows from; weigh: the weights that follow from all.
        """
        self.board, self.weigh = RoundBoard(members, len(gradients.layout.slots)), weigh
        self.announcer = BucketAnnouncer(gradients, self.board, buckets, header)
        if gradients.places is not None:
            gradients.places.own_gradient = self.announcer.gradient


class BucketExchange:
    """One worker's part in the exchange between certain workers, until `close`."""

    def __init__(
        self,
        members: Members,
        between: InterMachineReduce,
        buckets: Sequence[Bucket],
        sums: SharedReduction,
        here: Sequence[int],
        announcing: Announcing | None = None,
        gone: Collection[int] = (),
    ) -> None:
        """buckets: of all workers of this machine; sums: makes and holds the sums; here: numbers of its sources.

        gone: workers that are lost.
        """
        self._sums, self._here, self._announcing = sums, here, announcing
        ranks = members.machines[members.machine]
        places = [place for place, rank in enumerate(ranks) if rank not in gone]
        self._lanes = ExchangeLanes(
            between,
            [(number, bucket) for number, bucket in enumerate(buckets) if members.rank in bucket.owners],
            self._total,
            self._make,
            sums.size,
            None if announcing is None else announcing.board,
            None if announcing is None else announcing.weigh,
            leads=members.local.rank == places[0],
            places=places,
        )
        self.sent, self.received = 0.0, 0
        """When the buckets of the last round began to leave, and the bytes that came; 0.0 if none left."""
        self.close = weakref.finalize(self, self._lanes.close)
        """Ends the threads; the other workers do that, too, or have failed."""
        if announcing is not None:
            self._lanes.begin()

    def _total(self, bucket: Bucket) -> torch.Tensor:
        return self._sums.total(bucket.flat, bucket.start, bucket.stop)

    def _make(self, bucket: Bucket, weights: Weights, used: list[bytes] | None) -> int:
        return sum_here(self._sums, self._here, bucket, weights, used)

    def sum(self, weights: Weights, used: list[bytes] | None, *, again: bool = False) -> int:
        """Leaves the sums over all machines in their places; returns the bytes received.

        again: True if a worker has announced what is not its gradient.
        """
        self.sent = 0.0
        if self._announcing is None:
            return self._lanes.exchange(weights, used)
        announcer = self._announcing.announcer
        if not announcer.finished:  # this worker is passive, or another one was lost since it announced
            announcer.finish(None)
        read = self._lanes.confirm(weights, used)
        self.sent, self.received = self._lanes.sent, read
        if again:
            read += self._lanes.exchange(weights, used)
        announcer.next(wrong=again)
        self._lanes.begin()
        return read


def sum_here(
    sums: SharedReduction,
    here: Sequence[int],
    part: Bucket | ReduceSegment,
    weights: Weights,
    used: list[bytes] | None,
) -> int:
    """Sum a part of the gradients of these sources, of this machine; returns the bytes read."""
    own = [(here.index(rank), weight) for rank, weight in weights if rank in here]
    used_here = None if used is None else [used[rank] for rank in here]
    if used_here is not None and isinstance(part, Bucket):
        every = all(used_here[place][slot] for place, _ in own for slot in part.slots)
        used_here = None if every else used_here
    stretch = part.flat, part.start, part.stop
    if not own or used_here is not None:
        sums.clear(*stretch, own, used_here)
    return sums.stretch(*stretch, own, used_here) if own else 0
