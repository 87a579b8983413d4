"""The mean gradient of a team on several machines: summed in shared memory on each, then between them.

Every worker owns a shard of its machine's buffers, and exchanges the machine's sum of it with the owners of the same
elements on other machines. The optimizer then updates the shard on every machine, with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.cluster.membership import Members
from paceline.collectives.inter_machine import InterMachineReduce, ReduceSegment, segments
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

        target: the index among them of this worker's replica.
        """
        self._layout, self._gradients, self._members = layout, gradients, members
        self._here = members.machines[members.machine] if sources is None else sources
        self._rank = members.local.rank
        self.inside = SharedReduction(layout, gradients, self._rank, target)
        self.between = InterMachineReduce(members, topology)
        self._segments: list[ReduceSegment] = []
        """The segments of this worker's shard."""
        for number, flat in enumerate(layout.flats):
            bounds = [borders(flat.count, flat.dtype, len(ranks)) for ranks in members.machines]
            found = segments(number, bounds, members.machines)
            self._segments += [segment for segment in found if members.rank in segment.owners]

    def shard(self, weights: Weights, used: list[bytes] | None) -> int:
        own = [(self._here.index(rank), weight) for rank, weight in weights if rank in self._here]
        used_here = None if used is None else [used[rank] for rank in self._here]
        if not own or used_here is not None:
            for number, whole in enumerate(self._layout.flats):
                self.inside.clear(number, *whole.shards[self._rank], own, used_here)
        read = self.inside.shard(own, used_here) if own else 0
        for flat, start, stop, owners in self._segments:
            read += self.between.all_reduce(self._gradients.own[flat][start:stop], owners)
        return read

    def gather(self) -> int:
        return self.inside.gather()

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
