"""The channels of algorithms: shared memory inside a machine, torch.distributed otherwise."""

from __future__ import annotations

import torch
from torch import distributed
from torch.distributed import ProcessGroup, Work

from paceline.transport.channel import PendingSend
from paceline.transport.mailbox import Mailbox

_TAG = -21
"""Tag of the messages of algorithms; users' tags are not negative."""


class MailChannel:
    """A channel through a mailbox in shared memory."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.rank, self.size = mailbox.rank, mailbox.size
        self._mailbox = mailbox

    def send(self, peer: int, tensor: torch.Tensor, tag: int = _TAG) -> PendingSend:
        return self._mailbox.send(peer, tensor, tag)

    def receive(self, peer: int, tensor: torch.Tensor, tag: int = _TAG) -> None:
        self._mailbox.receive(peer, tensor, tag).wait()


class DistributedChannel:
    """A channel through any process group of torch.distributed."""

    def __init__(self, group: ProcessGroup, rank: int) -> None:
        self.rank, self.size = rank, group.size()
        self._group = group
        self._sending: list[Work] = []

    def send(self, peer: int, tensor: torch.Tensor, tag: int = _TAG) -> PendingSend:
        work = distributed.isend(tensor, group=self._group, group_dst=peer, tag=_positive(tag))
        assert work is not None
        # Some backends drop a message when its handle is freed.
        self._sending = [other for other in self._sending if not other.is_completed()] + [work]
        return work

    def receive(self, peer: int, tensor: torch.Tensor, tag: int = _TAG) -> None:
        distributed.recv(tensor, group=self._group, group_src=peer, tag=_positive(tag))


def _positive(tag: int) -> int:
    """Other backends have no tags below zero."""
    return tag if tag >= 0 else hash((tag >> 32, tag & 0xFFFF_FFFF)) & 0x3FFF_FFFF | 0x4000_0000
