"""Collectives through a hub: one rank is the server, and all messages go to it or come from it.

            1                  push: all send to the hub, which combines in the order of ranks
            │
        2 ──0── 4              pull: the hub sends the result to all
            │
            3

This is a parameter server with one shard. It takes only two steps, but all bytes pass the hub's port, so the time grows
with the number of ranks. Messages between two other ranks, and from or to a root that is not the hub, pass the hub.
"""

from __future__ import annotations

import torch

from paceline.collectives.algorithms.messages import Combine, combine_all, one_each, others, outgoing
from paceline.transport.channel import Channel


def all_reduce(channel: Channel, tensor: torch.Tensor, combine: Combine, hub: int = 0) -> None:
    """Leaves the sum of all ranks' `tensor` in each rank's `tensor`."""
    reduce(channel, tensor, combine, root=hub, hub=hub)
    broadcast(channel, tensor, root=hub, hub=hub)


def reduce(channel: Channel, tensor: torch.Tensor, combine: Combine, root: int, hub: int = 0) -> None:
    """Leaves the sum of all ranks' `tensor` in the root's; the others keep theirs."""
    if channel.rank == hub:
        total = tensor if root == hub else tensor.clone()
        combine_all(channel, total, combine)
        if root != hub:
            channel.send(root, total).wait()
    else:
        channel.send(hub, tensor).wait()
        if channel.rank == root:
            channel.receive(hub, tensor)


def broadcast(channel: Channel, tensor: torch.Tensor, root: int, hub: int = 0) -> None:
    """Copies the root's `tensor` to all."""
    if channel.rank == hub:
        if root != hub:
            channel.receive(root, tensor)
        with outgoing(channel) as send:
            for peer in others(channel):
                if peer != root:
                    send(peer, tensor)
    elif channel.rank == root:
        channel.send(hub, tensor).wait()
    else:
        channel.receive(hub, tensor)


def gather(channel: Channel, tensor: torch.Tensor, outputs: list[torch.Tensor] | None, root: int, hub: int = 0) -> None:
    """Copies the `tensor` of rank i to `outputs[i]` of the root; all are of one length."""
    sources = [rank for rank in range(channel.size) if rank != root]
    if channel.rank == root:
        outputs = one_each(channel, outputs)
        outputs[root].copy_(tensor)
        for source in sources:
            channel.receive(source if root == hub else hub, outputs[source])
    elif channel.rank == hub:
        with outgoing(channel) as send:
            for source in sources:
                part = tensor if source == hub else torch.empty_like(tensor)
                if source != hub:
                    channel.receive(source, part)
                send(root, part)
    else:
        channel.send(hub, tensor).wait()


def scatter(channel: Channel, tensor: torch.Tensor, inputs: list[torch.Tensor] | None, root: int, hub: int = 0) -> None:
    """Copies `inputs[i]` of the root to the `tensor` of rank i; all are of one length."""
    targets = [rank for rank in range(channel.size) if rank != root]
    with outgoing(channel) as send:
        if channel.rank == root:
            inputs = one_each(channel, inputs)
            tensor.copy_(inputs[root])
            for target in targets:
                send(target if root == hub else hub, inputs[target])
        elif channel.rank == hub:
            for target in targets:
                part = tensor if target == hub else torch.empty_like(tensor)
                channel.receive(root, part)
                if target != hub:
                    send(target, part)
        else:
            channel.receive(hub, tensor)


def all_gather(channel: Channel, parts: list[torch.Tensor], hub: int = 0) -> None:
    """Fills in all `parts`, of which each rank has its own."""
    with outgoing(channel) as send:
        if channel.rank == hub:
            for source in others(channel):
                channel.receive(source, parts[source])
            for target in others(channel):
                for source in range(channel.size):
                    if source != target:
                        send(target, parts[source])
        else:
            send(hub, parts[channel.rank])
            for source in range(channel.size):
                if source != channel.rank:
                    channel.receive(hub, parts[source])


def reduce_scatter(channel: Channel, parts: list[torch.Tensor], combine: Combine, hub: int = 0) -> None:
    """Leaves the sum of all ranks' `parts[i]` in `parts[i]` of rank i; the other parts are overwritten."""
    with outgoing(channel) as send:
        if channel.rank == hub:
            for part in parts:
                combine_all(channel, part, combine)
            for target in others(channel):
                send(target, parts[target])
        else:
            for part in parts:
                send(hub, part)
    # After the block, since until then the own part may still be in transit to the hub.
    if channel.rank != hub:
        channel.receive(hub, parts[channel.rank])


def all_to_all(channel: Channel, inputs: list[torch.Tensor], outputs: list[torch.Tensor], hub: int = 0) -> None:
    """Copies `inputs[j]` of rank i to `outputs[i]` of rank j of any length."""
    outputs[channel.rank].copy_(inputs[channel.rank])
    if channel.rank == hub:
        _exchange(channel, inputs, outputs)
        return
    with outgoing(channel) as send:
        # Only the two ends know the length of a message between them, so the hub needs the lengths.
        send(hub, torch.tensor([part.numel() for part in inputs], device=inputs[0].device))
        for target in range(channel.size):
            if target != channel.rank:
                send(hub, inputs[target])
        for source in ((hub + step) % channel.size for step in range(channel.size)):
            if source != channel.rank:
                channel.receive(hub, outputs[source])


def _exchange(channel: Channel, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """The hub's side of all-to-all: sends its own parts, then forwards those between other ranks."""
    hub = channel.rank
    with outgoing(channel) as send:
        for target in others(channel):
            send(target, inputs[target])
        for source in others(channel):
            lengths = torch.empty(channel.size, dtype=torch.int64, device=inputs[0].device)
            channel.receive(source, lengths)
            for target in range(channel.size):
                if target == hub:
                    channel.receive(source, outputs[source])
                elif target != source:
                    passing = inputs[0].new_empty(int(lengths[target]))
                    channel.receive(source, passing)
                    send(target, passing)


def barrier(channel: Channel, hub: int = 0) -> None:
    """Returns when all ranks have arrived."""
    nothing = torch.empty(0)
    if channel.rank == hub:
        for peer in others(channel):
            channel.receive(peer, nothing)
    else:
        channel.send(hub, nothing).wait()
    broadcast(channel, nothing, root=hub, hub=hub)
