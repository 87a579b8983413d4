"""The communicator of a group, and of the default group where none is given."""

from __future__ import annotations

import atexit
import weakref

import torch
from torch import distributed
from torch.distributed import ProcessGroup, Work, distributed_c10d

from paceline.cluster import membership
from paceline.cluster.membership import Members
from paceline.collectives.communicator import TAG, Communicator, MailChannel
from paceline.collectives.group import Group
from paceline.collectives.process_group import PacelineProcessGroup, say
from paceline.config import Launch, Place
from paceline.errors import UsageError
from paceline.transport.channel import PendingSend

GroupLike = ProcessGroup | Communicator | None
"""A process group of torch.distributed; None for its default group, or else for all workers of the team."""

_by_group: weakref.WeakKeyDictionary[ProcessGroup, Communicator] = weakref.WeakKeyDictionary()
_of_team: tuple[Members, Communicator] | None = None


class DistributedChannel:
    """A channel through any process group of torch.distributed."""

    def __init__(self, group: ProcessGroup, rank: int) -> None:
        self.rank, self.size = rank, group.size()
        self._group = group
        self._sending: list[Work] = []

    def send(self, peer: int, tensor: torch.Tensor, tag: int = TAG) -> PendingSend:
        work = distributed.isend(tensor, group=self._group, group_dst=peer, tag=_positive(tag))
        assert work is not None
        # Some backends drop a message when its handle is freed.
        self._sending = [other for other in self._sending if not other.is_completed()] + [work]
        return work

    def receive(self, peer: int, tensor: torch.Tensor, tag: int = TAG) -> None:
        distributed.recv(tensor, group=self._group, group_src=peer, tag=_positive(tag))


def _positive(tag: int) -> int:
    """Other backends have no tags below zero."""
    return tag if tag >= 0 else hash((tag >> 32, tag & 0xFFFF_FFFF)) & 0x3FFF_FFFF | 0x4000_0000


def communicator(group: GroupLike = None) -> Communicator:
    """This process's communicator in a group."""
    if isinstance(group, Communicator):
        return group
    if group is None:
        group = distributed_c10d._world.default_pg
        if group is None:
            return _team_communicator()
    if isinstance(group, PacelineProcessGroup):
        own: Communicator = group.communicator or _wrap(group)
        group.communicator = own
        return own
    if not isinstance(group, ProcessGroup):
        raise UsageError(f"group is {group!r}; it must be a process group of torch.distributed that this process is in")
    known = _by_group.get(group)
    if known is None:
        known = _by_group[group] = _wrap(group)
    return known


def _wrap(group: ProcessGroup) -> Communicator:
    if isinstance(group, PacelineProcessGroup) and group.on_one_machine:
        inner = group.group
        return Communicator(inner.rank, inner.size, MailChannel(inner.mailbox), inner)
    rank = distributed.get_rank(group)
    return Communicator(rank, group.size(), DistributedChannel(group, rank), None)


def _team_communicator() -> Communicator:
    """The communicator of the team's workers; joins the team if that has not happened yet."""
    global _of_team
    members = membership.current()
    if members is None:
        launch = Launch.from_environment()
        members = membership.join_team(Place.from_environment(), launch, launch.timeouts, say)
        atexit.register(members.leave)
    if len(members.machines) > 1:
        raise UsageError(
            f"this team is on {len(members.machines)} machines, where its collectives need a process group: call "
            "torch.distributed.init_process_group('paceline') first"
        )
    if _of_team is None or _of_team[0] is not members:
        group = Group(members.rank, members.size, members.gather, members.barrier.timeouts, say)
        _of_team = members, Communicator(group.rank, group.size, MailChannel(group.mailbox), group)
    return _of_team[1]
