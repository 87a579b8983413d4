"""The gradients of several replicas whose workers are on several machines: each worker's parts, summed by its peers.

No machine has the whole model, so nothing is in shared memory: the workers with the same part of all replicas sum their
gradients over the network, weighted as the losses of the replicas' batches are, and each updates its own part with the
same bits. All replicas make every step together; one without samples gets a copy of another's batch, of weight 0.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.cluster.membership import Members
from paceline.cluster.rendezvous import MemberList
from paceline.collectives.machines_group import MachinesGroup
from paceline.collectives.operation import Op
from paceline.errors import TeamError, adds_to_clipped, check_whole
from paceline.events import Reduce
from paceline.parameters.gradient_state import GradientState, add_loss
from paceline.parameters.gradient_weight import GradientWeight
from paceline.parameters.gradients import GRAD
from paceline.parameters.loss_reader import LossReader
from paceline.strategies.context import TrainerContext
from paceline.strategies.mesh_coord import MeshCoord, join_replica
from paceline.strategies.split_checks import bit_sum
from paceline.strategies.step_notices import StepNotices
from paceline.strategies.step_table import ReplicaStepTable, StepAgreement, changed_unlike
from paceline.transport import BarrierKind
from paceline.transport.call_log import CallLog

_COUNTS = struct.Struct("=dd")
_BUCKET = 1 << 22
"""Elements that are summed at a time."""
Wait = Callable[[BarrierKind, int], object]


class ReplicaMembers(Members):
    """The workers of one replica, by their places in it, on the team's barriers: all replicas make its calls together.

    Machines keep their numbers; one without workers of the replica has none of its ranks.
    """

    def __init__(self, members: Members, coord: MeshCoord) -> None:
        ranks = coord.replica_ranks()
        machines = [[ranks.index(rank) for rank in there if rank in ranks] for there in members.machines]
        super().__init__(
            coord.place,
            len(ranks),
            members.barrier,
            members._liveness,
            members.store,
            roster=MemberList(machines, members.hosts),
            local=members.local,
        )
        self._team, self._first = members, coord.lead

    def gather(self, payload: bytes, intent: BarrierKind = BarrierKind.GATHER) -> list[bytes]:
        return self._team.gather(payload, intent)[self._first : self._first + self.size]


class OwnGradients:
    """The gradients of a worker's own parameters, as `GradientWeight` needs them."""

    def __init__(self, parameters: Callable[[], Sequence[torch.nn.Parameter]]) -> None:
        self._parameters = parameters

    @property
    def any(self) -> bool:
        return any(GRAD.__get__(one) is not None for one in self._parameters())

    def scale(self, factor: float) -> None:
        for one in self._parameters():
            if (gradient := GRAD.__get__(one)) is not None:
                gradient.mul_(factor)

    def fill(self) -> None:
        """A replica without items has no weight, so its gradients need no values."""


class ReplicaExchange:
    """One worker's part in the agreement on an update and in the sum of its gradients."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        context: TrainerContext,
        coord: MeshCoord,
        machines: MachinesGroup,
        calls: CallLog,
        own: Callable[[], Sequence[torch.nn.Parameter]],
        not_finite: Callable[[float, int], TeamError],
        wait: Wait,
    ) -> None:
        """own: the parameters that this worker updates; wait: waits at the team's barrier."""
        self._members, self._coord, self._own, self._wait = context.members, coord, own, wait
        self._strategy, self._recorder = str(context.strategy), context.recorder
        self._numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
        self._table = ReplicaStepTable(context.members, optimizer, len(self._numbers), coord.shape.replica)
        self._peers = join_replica(context.members, coord.peer_ranks(), context.say, calls, machines)
        self.reader = LossReader(context.say, divided=True)
        self.notices = StepNotices(context.say, not_finite)
        gradients: Any = OwnGradients(own)
        weight = GradientWeight(1.0 / coord.shape.data, gradients, self.reader, self._sum_counts)
        self.state = GradientState(gradients, weight)
        self._reduced = False
        """True if `.grad` is the team's gradient already, since it was clipped."""
        self._agreed: StepAgreement | None = None

    def take_batch(self, samples: int, share: float) -> None:
        """The script has a minibatch with this share of the samples of all replicas."""
        self.reader.samples, self.reader.copied = samples, not share
        self.state.take_batch(share)

    def enter_backward(self, loss: Any, weight: float | None) -> bool:
        """A backward pass from this loss begins; returns False if it is a mean over nothing."""
        if self._reduced and self.state.gradients.any:
            raise adds_to_clipped(self._strategy)
        self._reduced = False
        found = self.reader.read(loss, weight)
        add_loss([self.state], found)
        return not found.is_empty

    def _sum_counts(self, before: float, now: float) -> tuple[float, float]:
        """The sums of all replicas' counts of two minibatches."""
        barrier = self._members.barrier
        _COUNTS.pack_into(barrier.note, 0, before, now)
        self._wait(BarrierKind.COUNT, _COUNTS.size)
        counts = [_COUNTS.unpack_from(note) for note in barrier.notes[:: self._coord.shape.replica]]
        return sum(one for one, _ in counts), sum(other for _, other in counts)

    # -- an update ---------------------------------------------------------------------------------------------------

    def agree(
        self, kind: BarrierKind, round_number: int, share: float, loss: float, news: bytes = b""
    ) -> StepAgreement:
        """Waits for all workers of all replicas; returns what they update with.

        share: this replica's share of the loader's batch; news: of this worker for the others.
        """
        weight, reader = self.state.weight, self.reader
        self._table.tail = news
        used = bytearray(len(self._numbers))
        for parameter in self._own():
            used[self._numbers[id(parameter)]] = GRAD.__get__(parameter) is not None
        values = sum(bit_sum(parameter) for parameter in self._own()) & ((1 << 62) - 1)
        position = self.notices.position(round_number, loss)
        size = self._table.write(
            weight.weight,
            weight.loss,
            1.0,
            False,
            bytes(used),
            (0.0, 0),
            values,
            position,
            0,
            reader.digest.value,
            reader.averaged,
            share,
        )
        self._wait(kind, size)
        agreed = self._agreed = self._table.read()
        self.notices.check(agreed, averaged=reader.averaged)
        each = self._coord.shape.replica
        if min(agreed.rounds.values()) >= 0:
            check_whole({rank: part for rank, part in agreed.parts.items() if rank % each == 0})
        others = [rank for rank, digest in agreed.changes.items() if digest != agreed.changes[rank % each]]
        if others:
            raise changed_unlike([], others, 0)
        if agreed.sums:
            reader.settle()
        return agreed

    def reduce(self) -> None:
        """Makes `.grad` of this worker's parameters the team's gradient, as all workers have agreed."""
        assert self._agreed is not None
        if self._reduced:
            return
        start, size = time.perf_counter(), 0
        anywhere = self._agreed.anywhere()
        weight = dict(self._agreed.weights).get(self._coord.replica)
        weight = None if weight is None else weight * self._agreed.scale
        found = []
        for parameter in self._own():
            if anywhere is not None and not anywhere[self._numbers[id(parameter)]]:
                continue
            gradient = GRAD.__get__(parameter)
            if weight is None or gradient is None:
                gradient = torch.zeros_like(parameter)
            elif gradient.is_sparse:
                gradient = gradient.to_dense().mul_(weight)
            else:
                gradient.mul_(weight)
            GRAD.__set__(parameter, gradient)
            found.append(gradient)
        for bucket in _buckets(found):
            # In the order of elements, which need not be the same in memory on all peers.
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            self._peers.all_reduce(flat, Op.SUM)
            size += flat.nbytes
            for gradient, value in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
                gradient.copy_(value.view(gradient.shape))
        self._reduced = True
        self._recorder.add(Reduce(self._members.rank, start, time.perf_counter() - start, size))

    def updated(self) -> None:
        """The update is made."""
        self.reader.digest.value = 0
        self.state.exposed, self.state.pending, self.state.stepped = 0, False, True

    def clear(self) -> None:
        """The script clears its gradients."""
        self._reduced, self.state.pending = False, False

    def close(self) -> None:
        self.reader.close()


def _buckets(gradients: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Gradients of one dtype that are summed together; the same on all peers, which have the same parameters."""
    found: list[list[torch.Tensor]] = []
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        bucket: list[torch.Tensor] = []
        for gradient in (one for one in gradients if one.dtype == dtype):
            if bucket and sum(one.numel() for one in bucket) + gradient.numel() > _BUCKET:
                found.append(bucket)
                bucket = []
            bucket.append(gradient)
        found.append(bucket)
    return found
