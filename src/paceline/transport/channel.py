"""Channels, on which one member sends tensors to each of the others: all that collective algorithms know.

Between two members messages arrive in the order in which they were sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from paceline.topologies import Traffic

if TYPE_CHECKING:
    import torch


class PendingSend(Protocol):
    """A message that is being sent."""

    def wait(self) -> object:
        """Waits until the tensor may be changed again."""


class Channel(Protocol):
    """One member among `size`, able to send flat, contiguous tensors to any other."""

    rank: int
    size: int

    def send(self, peer: int, tensor: torch.Tensor) -> PendingSend:
        """Begins to send; does not wait for the peer."""

    def receive(self, peer: int, tensor: torch.Tensor) -> None:
        """Receives the next message from `peer` into `tensor`."""


class CountingChannel:
    """A channel that counts its messages; `told` is called for each, once it is sent or received."""

    def __init__(self, channel: Channel, told: Callable[[str, int, int, float], None] | None = None) -> None:
        self.rank, self.size = channel.rank, channel.size
        self.traffic = Traffic()
        self._channel, self._told = channel, told

    def send(self, peer: int, tensor: torch.Tensor, *tag: int) -> PendingSend:
        start = time.perf_counter()
        sending = self._channel.send(peer, tensor, *tag)
        self.traffic.sent += 1
        self.traffic.bytes_sent += tensor.nbytes
        if self._told:
            self._told("send", peer, tensor.nbytes, start)
        return sending

    def receive(self, peer: int, tensor: torch.Tensor, *tag: int) -> None:
        start = time.perf_counter()
        self._channel.receive(peer, tensor, *tag)
        self.traffic.received += 1
        self.traffic.bytes_received += tensor.nbytes
        if self._told:
            self._told("receive", peer, tensor.nbytes, start)
