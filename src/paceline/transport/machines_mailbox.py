"""One mailbox over two ways: shared memory inside a machine, and the network between machines."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.transport.mailbox import Mailbox, ReceiveTransfer, SendTransfer
from paceline.transport.network_mailbox import NetworkMailbox


class MachinesMailbox:
    """One member's messages to all others, with the surface of `Mailbox`."""

    def __init__(self, local: Mailbox, here: Sequence[int], network: NetworkMailbox) -> None:
        """here: the members on this machine, in the order of the local mailbox."""
        self.rank, self.size = network.rank, network.size
        self.network = network
        self._local = local
        self._place = {member: place for place, member in enumerate(here)}

    @property
    def unsent(self) -> bool:
        return self._local.unsent

    def send(self, peer: int, tensor: torch.Tensor, tag: int = 0) -> SendTransfer:
        if peer in self._place:
            return self._local.send(self._place[peer], tensor, tag)
        return self.network.send(peer, tensor, tag)

    def receive(self, peer: int, tensor: torch.Tensor, tag: int = 0) -> ReceiveTransfer:
        if peer in self._place:
            return self._local.receive(self._place[peer], tensor, tag)
        return self.network.receive(peer, tensor, tag)

    def attend(self) -> None:
        self._local.attend()


class MailboxPart:
    """Some members of a mailbox, renumbered, with the surface of `Mailbox`."""

    def __init__(self, mailbox: MachinesMailbox, ranks: Sequence[int]) -> None:
        self.rank, self.size = ranks.index(mailbox.rank), len(ranks)
        self._mailbox, self._ranks = mailbox, ranks
        self.network = mailbox.network

    @property
    def unsent(self) -> bool:
        return self._mailbox.unsent

    def send(self, peer: int, tensor: torch.Tensor, tag: int = 0) -> SendTransfer:
        return self._mailbox.send(self._ranks[peer], tensor, tag)

    def receive(self, peer: int, tensor: torch.Tensor, tag: int = 0) -> ReceiveTransfer:
        return self._mailbox.receive(self._ranks[peer], tensor, tag)

    def attend(self) -> None:
        self._mailbox.attend()
