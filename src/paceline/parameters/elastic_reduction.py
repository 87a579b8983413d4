"""The mean gradient of an elastic team on several machines, whose owners of shards change when workers are lost.

On every machine all shards have an owner among the workers that are left there. The sums of an update are written
beside the gradients, not over them: if a worker is lost during an exchange, the others repeat it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from torch.distributed import DistError

from paceline.cluster.membership import Members
from paceline.collectives.inter_machine import InterMachineReduce, ReduceSegment
from paceline.errors import TeamError
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
        self._between = None  # closes the connections, so that no worker waits on them
        left = [[rank for rank in ranks if rank not in gone] for ranks in members.machines]
        self._alive = [machine for machine, ranks in enumerate(left) if ranks]
        machines = [left[machine] for machine in self._alive]
        self._segments = [] if members.rank in gone else self._cut(machines)
        self.broken = False
        if len(machines) == 1:
            return
        order = self._order and [self._alive.index(machine) for machine in self._order if machine in self._alive]
        try:
            self._between = between = InterMachineReduce(members, self._topology, machines, order)
            self._order = [self._alive[machine] for machine in between.order]
        except (TeamError, DistError, RuntimeError) as error:
            self._fail(str(error))

    def _cut(self, machines: Sequence[Sequence[int]]) -> list[ReduceSegment]:
        """Segments of whole shards with the same owner on each machine, of which this worker is one."""
        owners = [[shard_owner(ranks, shard, self._shards) for ranks in machines] for shard in range(self._shards)]
        found = []
        for own, run in itertools.groupby(range(self._shards), lambda shard: owners[shard]):
            shards = list(run)
            if self._members.rank in own:
                for number, flat in enumerate(self._layout.flats):
                    start, stop = flat.shards[shards[0]][0], flat.shards[shards[-1]][1]
                    found += [ReduceSegment(number, start, stop, own)] if start < stop else []
        return found

    def sum(self, weights: Weights, used: list[bytes] | None) -> int:
        """Makes this worker's part of the sums; returns the bytes received. Check `broken` afterwards."""
        here = [(self._here.index(rank), weight) for rank, weight in weights if rank in self._here]
        used_here = None if used is None else [used[rank] for rank in self._here]
        read = 0
        for flat, start, stop, owners in self._segments:
            if not here or used_here is not None:
                self._sums.clear(flat, start, stop, here, used_here)
            if here:
                read += self._sums.stretch(flat, start, stop, here, used_here)
            if self._between is not None and not self.broken:
                try:
                    read += self._between.all_reduce(self._gradients.flats[self.place][flat][start:stop], owners)
                except TeamError as error:
                    self._fail(str(error))
        return read

    def _fail(self, why: str) -> None:
        """Closes this worker's connections, so that no other waits for it."""
        self.broken, self.trouble = True, why
        self._between = None
