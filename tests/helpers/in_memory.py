"""Channels between threads: nothing leaves the process, and nobody waits for their clock.

The clock says how long it would have taken on links of a given latency and bandwidth.
"""

from __future__ import annotations

import queue
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import TypeVar

import torch

from paceline.errors import Mismatch
from paceline.topologies import Link
from paceline.transport.channel import PendingSend

T = TypeVar("T")


class _Sent:
    """A message that was copied when it was sent."""

    def wait(self) -> None:
        return


class InMemoryChannel:
    """A channel between threads, with a clock of its own.

    A member sends one message at a time and receives one at a time, each way at full speed: a message of S bytes takes
    `latency` + S / `bandwidth`, and keeps a port busy for S / `bandwidth`. Messages leave in the order in which they
    were sent, and come in when the port is free: one that has arrived does not wait for one that is yet to come, even
    if the member asks for that one first.
    """

    def __init__(self, rank: int, boxes: list[list[queue.SimpleQueue[tuple[torch.Tensor, float]]]], link: Link) -> None:
        self.rank, self.size = rank, len(boxes)
        self.clock = 0.0
        """Seconds that have passed for this member."""
        self._boxes, self._link = boxes, link
        self._out = 0.0
        """When the outgoing port is free again."""
        self._in: list[tuple[float, float]] = []
        """When the incoming port was or will be busy, in the order of time."""

    def send(self, peer: int, tensor: torch.Tensor) -> PendingSend:
        start = max(self.clock, self._out)
        self._out = start + tensor.nbytes / self._link.bandwidth
        self._boxes[self.rank][peer].put((tensor.clone(), start))
        return _Sent()

    def receive(self, peer: int, tensor: torch.Tensor) -> None:
        message, sent = self._boxes[peer][self.rank].get(timeout=60)
        if (message.dtype, message.shape) != (tensor.dtype, tensor.shape):
            raise Mismatch(
                f"rank {peer} has sent {tuple(message.shape)} of {message.dtype}, "
                f"but rank {self.rank} expects {tuple(tensor.shape)} of {tensor.dtype}",
                (peer, self.rank),
            )
        end = self._take(sent + self._link.latency, message.nbytes / self._link.bandwidth)
        self.clock = max(self.clock, end)
        tensor.copy_(message)

    def _take(self, ready: float, duration: float) -> float:
        """Keep the incoming port busy in the first gap after `ready` that is long enough; returns its end."""
        index = bisect_right(self._in, ready, key=itemgetter(1))
        needed = duration * (1 - 1e-9)  # a gap that is too short by a rounding error will do
        while index < len(self._in) and self._in[index][0] < ready + needed:
            ready = max(ready, self._in[index][1])
            index += 1
        if duration:
            self._in.insert(index, (ready, ready + duration))
        return ready + duration


def run_in_memory(size: int, work: Callable[[InMemoryChannel], T], link: Link | None = None) -> tuple[list[T], float]:
    """Let `size` threads do `work`, each with its own channel; what each returned, and the seconds on the clock."""
    boxes: list[list[queue.SimpleQueue[tuple[torch.Tensor, float]]]] = [
        [queue.SimpleQueue() for _ in range(size)] for _ in range(size)
    ]
    members = [InMemoryChannel(rank, boxes, link or Link()) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(work, members))
    return results, max(member.clock for member in members)
