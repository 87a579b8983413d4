"""Shared parts of the algorithms: chunks, sending without waiting, combining in order, and the order of peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

from paceline.errors import UsageError
from paceline.topologies.chunks import bounds
from paceline.transport.channel import Channel, PendingSend

Combine = Callable[[torch.Tensor, torch.Tensor], object]
"""Combines the second tensor into the first, in place: a sum, a maximum, a product or the like."""


def split(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Chunks of a flat tensor, as views of it, that differ by at most one element."""
    return [tensor[start:stop] for start, stop in pairwise(bounds(tensor.numel(), count))]


@contextmanager
def outgoing(channel: Channel) -> Iterator[Callable[[int, torch.Tensor], None]]:
    """Sends inside the block, and waits for the sends at its end.

    Inside, a send does not block, so two ranks that send to each other do not deadlock. After the block the tensors may
    be changed. They are referenced until then, since a message may still be read from their memory.
    """
    held: list[tuple[PendingSend, torch.Tensor]] = []

    def send(peer: int, tensor: torch.Tensor) -> None:
        held.append((channel.send(peer, tensor), tensor))

    yield send
    for sending, _ in held:
        sending.wait()


def others(channel: Channel) -> list[int]:
    """All other ranks, from the next one on: if all began with rank 0, its port would be the bottleneck."""
    return [(channel.rank + step) % channel.size for step in range(1, channel.size)]


def combine_all(channel: Channel, tensor: torch.Tensor, combine: Combine) -> None:
    """Receives one message from every other rank and combines them all into `tensor`, in the order of ranks.

    Sums of floating point numbers depend on their order. The order of arrival varies, the order of ranks does not, so
    the same tensors always give the same bits.
    """
    if channel.size == 1:
        return
    own, arriving = tensor.clone(), torch.empty_like(tensor)
    for rank in range(channel.size):
        if rank != channel.rank:
            channel.receive(rank, arriving)
        term = own if rank == channel.rank else arriving
        if rank == 0:
            tensor.copy_(term)
        else:
            combine(tensor, term)


def one_each(channel: Channel, tensors: list[torch.Tensor] | None) -> list[torch.Tensor]:
    """Checks that the root of a gather or a scatter has one tensor per rank, and returns them."""
    if tensors is None or len(tensors) != channel.size:
        given = "none" if tensors is None else len(tensors)
        raise UsageError(
            f"rank {channel.rank} is the root, so it needs {channel.size} tensors, one for each rank; it has {given}"
        )
    return tensors
