"""Messages between the workers of one pipeline."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch

from paceline.events import StageTransfer, Wait
from paceline.events.recorder import Recorder
from paceline.pipeline.stages import StageAssignment
from paceline.transport.call_log import CallLog
from paceline.transport.machines_mailbox import MachinesMailbox, MailboxPart
from paceline.transport.mailbox import Mailbox, ReceiveTransfer, SendTransfer

_HEADER_BYTES = 512
_RESULT = -7
"""Tag of the messages of `ResultExchange`; `ownership` uses those below."""
_NOTABLE = 5e-6
"""Seconds below which a wait is not recorded."""


def memory_order(tensor: torch.Tensor) -> list[int]:
    """A tensor's dimensions from the outermost to the innermost in memory.

    It is kept over the network, since a view that torch allows on one layout it refuses on another.
    """
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: -strides[dim])


def from_memory_order(packed: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Inverse of `tensor.permute(order)`."""
    return packed.permute([order.index(dim) for dim in range(packed.dim())])


class TensorHeader(msgspec.Struct, array_like=True, frozen=True):
    """Description of a value that is sent ahead of its elements."""

    dtype: str
    shape: list[int]
    requires_grad: bool
    number: int | float | bool | None = None
    """The value itself if it is not a tensor."""
    order: list[int] = []
    """Its dimensions in `memory_order`."""

    @classmethod
    def of(cls, value: Any) -> TensorHeader:
        if not isinstance(value, torch.Tensor):
            return cls("", [], False, value)
        dtype = str(value.dtype).removeprefix("torch.")
        return cls(dtype, list(value.shape), value.requires_grad, None, memory_order(value))

    def encode(self) -> torch.Tensor:
        data = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
        payload = msgspec.json.encode(self)
        data[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        return data

    @classmethod
    def decode(cls, data: torch.Tensor) -> TensorHeader:
        return msgspec.json.decode(bytes(data.numpy()).rstrip(b"\0"), type=cls)

    def empty(self) -> torch.Tensor:
        """An uninitialised tensor for the elements, in memory order."""
        return torch.empty([self.shape[dim] for dim in self.order], dtype=getattr(torch, self.dtype))


class StageLinks:
    """One worker's mailbox in its pipeline; waits for other workers are recorded."""

    def __init__(
        self,
        mailbox: Mailbox | MachinesMailbox | MailboxPart,
        recorder: Recorder,
        team_ranks: Sequence[int],
        calls: CallLog,
    ) -> None:
        """team_ranks: ranks in the team, by pipeline rank."""
        self.mailbox, self.recorder, self._calls = mailbox, recorder, calls
        self.call = 0
        """The number of the call of the model whose messages are sent and received."""
        self.rank, self.size = mailbox.rank, mailbox.size
        self._team_ranks = team_ranks
        self._network = None if isinstance(mailbox, Mailbox) else mailbox.network
        if self._network is not None and recorder.on:
            self._network.arrivals = deque()
        self.team_rank = team_ranks[mailbox.rank]

    def record_arrivals(self) -> None:
        """Records the values and gradients that have come from other machines since the last call."""
        arrivals = None if self._network is None else self._network.arrivals
        while arrivals:
            one = arrivals.popleft()
            if one.tag >= 0 and (one.bytes, one.dtype) != (_HEADER_BYTES, torch.uint8):
                event = StageTransfer(self.team_rank, one.sent, one.came - one.sent, one.source, one.bytes)
                self.recorder.add(event)

    def send(self, peer: int, tensor: torch.Tensor, tag: int) -> SendTransfer:
        return self.mailbox.send(peer, tensor, self._of_call(tag))

    def expect(self, peer: int, tensor: torch.Tensor, tag: int) -> ReceiveTransfer:
        """Begins to receive a message."""
        return self.mailbox.receive(peer, tensor, self._of_call(tag))

    def _of_call(self, tag: int) -> int:
        """A tag by which no message of another call is taken for one of this."""
        number = (self.call & 0xFF) << 54
        return tag + number if tag >= 0 else tag - number

    def wait(self, transfer: ReceiveTransfer) -> None:
        start = time.perf_counter()
        self.finish(transfer)
        waited = time.perf_counter() - start
        if waited > _NOTABLE:
            self.recorder.add(Wait(self.team_rank, start, waited, transfer.who))

    def finish(self, transfer: ReceiveTransfer) -> None:
        """Waits for a message, which must be of the same call of the model."""
        try:
            transfer.wait()
        finally:
            self._calls.check()

    def receive(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        self.wait(self.expect(peer, tensor, tag))

    def receive_header(self, peer: int, tag: int) -> TensorHeader:
        data = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        self.receive(peer, data, tag)
        return TensorHeader.decode(data)


class ResultExchange:
    """Collects the results of the last stage on its first worker, the root; sends values from there to all workers."""

    def __init__(self, links: StageLinks, assignment: StageAssignment) -> None:
        self._links = links
        self._root, *self._others = assignment.workers[-1]
        self.is_root = links.rank == self._root

    def gather(self, own: dict[int, list[torch.Tensor]]) -> dict[int, list[torch.Tensor]]:
        """Tensors by microbatch: on the root those of all workers of the last stage, elsewhere `own`."""
        if self._links.rank in self._others:
            counts = [[microbatch, len(values)] for microbatch, values in own.items()]
            self._send([self._root], torch.tensor(counts, dtype=torch.long).view(-1, 2))
            for value in itertools.chain(*own.values()):
                self._send([self._root], value)
        elif self.is_root:
            for other in self._others:
                for microbatch, count in self._receive(other).tolist():
                    own[microbatch] = [self._receive(other) for _ in range(count)]
        return dict(sorted(own.items()))

    def broadcast(self, value: torch.Tensor | None) -> torch.Tensor:
        """The root's tensor, on every worker."""
        if not self.is_root:
            return self._receive(self._root)
        assert value is not None
        return self._send((peer for peer in range(self._links.size) if peer != self._root), value)

    def _send(self, peers: Iterable[int], value: torch.Tensor) -> torch.Tensor:
        """Sends a tensor whose shape the peers do not know; returns a detached tensor of the same values."""
        header = TensorHeader.of(value)
        packed = value.detach().permute(header.order).contiguous()
        parts = (header.encode(), packed)
        for transfer in [self._links.send(peer, part, _RESULT) for peer in peers for part in parts]:
            transfer.wait()
        return from_memory_order(packed, header.order)

    def _receive(self, peer: int) -> torch.Tensor:
        data = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        self._links.finish(self._links.expect(peer, data, _RESULT))
        header = TensorHeader.decode(data)
        packed = header.empty()
        self._links.finish(self._links.expect(peer, packed, _RESULT))
        return from_memory_order(packed, header.order)
