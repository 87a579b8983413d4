"""The coordinates of workers in a mesh, and random numbers that are equal within a replica."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch

from paceline.cluster.membership import Members
from paceline.collectives.communicator import Communicator, MailChannel
from paceline.collectives.group import Group
from paceline.collectives.hierarchical import HierarchicalCommunicator
from paceline.collectives.machines_group import MachinesGroup
from paceline.config import Mesh, Pipeline, Strategy, Tensor, replicas_by_machine
from paceline.transport import BarrierKind
from paceline.transport.call_log import CallLog


class MeshShape(NamedTuple):
    """The number of replicas, of stages in each, and of workers per stage."""

    data: int
    pipeline: int
    tensor: int

    @classmethod
    def of(cls, strategy: Strategy) -> MeshShape:
        match strategy:
            case Tensor():
                return cls(1, 1, strategy.degree)
            case Pipeline():
                return cls(1, sum(strategy.by_stage), 1)
            case Mesh():
                return cls(strategy.data, strategy.pipeline, strategy.tensor)
        raise AssertionError(f"'{strategy}' does not split the model")

    @property
    def replica(self) -> int:
        """Workers of one replica."""
        return self.pipeline * self.tensor


class MeshCoord(NamedTuple):
    """A worker's place in the mesh; the workers of a replica have consecutive ranks, and so have those of a stage."""

    shape: MeshShape
    rank: int
    here: list[int]
    """The replicas on this worker's machine; none if a replica is on several machines."""

    @classmethod
    def of(cls, strategy: Strategy, members: Members) -> MeshCoord:
        replicas = replicas_by_machine(strategy, members.machines)
        here = [] if replicas is None else replicas[members.machine]
        return cls(MeshShape.of(strategy), members.rank, here)

    @property
    def local_replica(self) -> int:
        """The index of its replica among those of its machine."""
        return self.here.index(self.replica)

    @property
    def replica(self) -> int:
        return self.rank // self.shape.replica

    @property
    def place(self) -> int:
        """In its replica."""
        return self.rank % self.shape.replica

    @property
    def stage(self) -> int:
        return self.place // self.shape.tensor

    @property
    def part(self) -> int:
        """Of its stage's layers."""
        return self.place % self.shape.tensor

    @property
    def lead(self) -> int:
        """The first worker of its replica."""
        return self.rank - self.place

    def replica_ranks(self) -> list[int]:
        return list(range(self.lead, self.lead + self.shape.replica))

    def stage_ranks(self) -> list[int]:
        first = self.rank - self.part
        return list(range(first, first + self.shape.tensor))

    def peer_ranks(self) -> list[int]:
        """The workers with the same part in all replicas."""
        return [replica * self.shape.replica + self.place for replica in range(self.shape.data)]


def join_replica(
    members: Members,
    ranks: list[int],
    say: Callable[[str], None],
    calls: CallLog,
    machines: MachinesGroup | None = None,
) -> Communicator:
    """A communicator of some of the workers; all workers call it at the same time.

    machines: the whole team, if these workers may be on several machines.
    """
    here = [rank for rank in ranks if rank in members.machines[members.machine]]

    def exchange(payload: bytes) -> list[bytes]:
        everybody = members.gather(payload, BarrierKind.ALLOCATE)
        return [everybody[rank] for rank in here]

    group = Group(here.index(members.rank), len(here), exchange, members.barrier.timeouts, say)
    group.control.ranks = [members.barrier.ranks[rank] for rank in here]
    group.control.crowd(members.local.size)
    calls.watch(group.control)
    if machines is not None:
        machines.watch_all(group.control)
    if len(here) == len(ranks):
        return Communicator(group.rank, group.size, MailChannel(group.mailbox), group)
    assert machines is not None
    part = machines.part(ranks)
    place = {rank: number for number, there in enumerate(members.machines) for rank in there}
    return HierarchicalCommunicator(part.rank, MailChannel(part.mailbox), group, [place[rank] for rank in ranks])


class _Random(msgspec.Struct, array_like=True):
    torch: bytes
    python: list[Any]
    numpy: list[Any] | None


def random_state() -> bytes:
    """The state of all random number generators that a script may use."""
    kind, words, gauss = random.getstate()
    numbers = None
    if "numpy" in sys.modules:
        import numpy

        state: Any = numpy.random.get_state(legacy=True)
        numbers = [state[0], state[1].tolist(), *state[2:]]
    return msgspec.msgpack.encode(_Random(bytes(torch.get_rng_state().numpy()), [kind, list(words), gauss], numbers))


def set_random_state(data: bytes) -> None:
    state = msgspec.msgpack.decode(data, type=_Random)
    torch.set_rng_state(torch.frombuffer(bytearray(state.torch), dtype=torch.uint8))
    kind, words, gauss = state.python
    random.setstate((kind, tuple(words), gauss))
    if state.numpy is not None and "numpy" in sys.modules:
        import numpy

        numpy.random.set_state(tuple(state.numpy))
