"""Large gradients, read where the backward pass left them.

A worker writes the address of each large gradient into a shared table. Its peers copy what they need of it straight
from its memory into their caches (process_vm_readv), so that no gradient is copied to shared memory first. Small
gradients are copied to the shared buffers: a system call costs as much as copying many kilobytes.

A gradient may be changed or freed only when all peers have read it. The barrier at the end of an update, or of a
reduction, is that point: between the two barriers no script runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from paceline.cluster.membership import Members
from paceline.errors import TeamError, WorkerLost
from paceline.parameters.gradients import GRAD, Gradients
from paceline.parameters.layout import Layout, Slot
from paceline.parameters.reduction import Weights, weighted_sum
from paceline.transport import Barrier, BarrierKind
from paceline.transport.huge_pages import HugePages
from paceline.transport.peer_memory import PeerMemory, PrivateView

LARGE = 256 * 1024
"""Bytes from which on a gradient is read where it lies."""
_MAGIC = 0x6772_6164


class _Span(NamedTuple):
    """Consecutive elements of a flat buffer: of one large parameter, or of small ones and the padding between."""

    start: int
    stop: int
    slot: Slot | None
    """The large parameter."""


class GradientPlaces:
    """The table of all workers of a machine, and the reading of their gradients."""

    def __init__(self, gradients: Gradients, members: Members) -> None:
        """members: of this machine; all call it."""
        assert isinstance(members.barrier, Barrier)
        self._layout, self._flats, self._rank = gradients.layout, gradients.flats, members.rank
        self._barrier = members.barrier
        self.least = LARGE
        """Bytes of the smallest gradient that is read where it lies."""
        slots = self._layout.slots
        row = 8 * len(slots)
        memory = members.share(row * members.size)
        self._table = [memory.bytes(row * rank, row).cast("q") for rank in range(members.size)]
        """By rank and parameter, the address of a gradient; 0 if it is in the shared buffer."""
        self._own = self._table[self._rank]
        self._none = memoryview(bytes(row)).cast("q")
        self._pages = HugePages() if members.size > 1 else None
        self._spans: dict[tuple[int, int, int], list[_Span]] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self.own_gradient: Callable[[Slot], torch.Tensor | None] = lambda slot: GRAD.__get__(slot.parameter)
        """This worker's gradient of a parameter."""

    @classmethod
    def of(cls, gradients: Gradients, members: Members) -> GradientPlaces | None:
        """None if there are no large gradients, or if a worker of this machine cannot read another's memory.

        All workers of the machine call it.
        """
        large = any(is_large(slot) for slot in gradients.layout.slots)
        return cls(gradients, members) if large and _permitted(members) else None

    def clear(self) -> None:
        """From now on the others read this worker's gradients in the shared buffer."""
        self._own[:] = self._none

    def publish(self, index: int, gradient: torch.Tensor, view: torch.Tensor) -> bool:
        """Lets the others read a parameter's gradient where it lies; False if they read it in the shared buffer.

        view: its place there.
        """
        if gradient is view or not _fits(gradient, view):
            return False
        self._own[index] = address = gradient.data_ptr()
        if self._pages is not None:
            self._pages.request(index, address, gradient.nbytes)
        return True

    def mix(self, total: torch.Tensor, flat: int, start: int, stop: int, weights: Weights, scale: float = 1.0) -> None:
        """Sums the gradients of these elements by weight, with the same bits as from shared buffers."""
        spans = self._spans.get((flat, start, stop))
        if spans is None:
            spans = self._spans[flat, start, stop] = list(_cut(self._layout, flat, start, stop))
        for first, last, slot in spans:
            part = total[first - start : last - start]
            if slot is None:
                weighted_sum(part, tuple(flats[flat][first:last] for flats in self._flats), weights, scale)
                continue
            (rank, weight), *rest = weights
            if rest and weight * scale == rest[0][1] * scale == 1.0:
                # One of the first two is a peer's, and comes straight into the cache; their order does not matter.
                (other, _), *rest = rest
                rank, other = (other, rank) if rank == self._rank else (rank, other)
                source = self._read(rank, flat, slot, first, last, part)
                torch.add(source, self._read(other, flat, slot, first, last), out=part)
            else:
                torch.mul(self._read(rank, flat, slot, first, last), weight * scale, out=part)
            for rank, weight in rest:
                part.add_(self._read(rank, flat, slot, first, last), alpha=weight * scale)

    def _read(
        self, rank: int, flat: int, slot: Slot, first: int, last: int, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A worker's gradient of these elements, valid until the next call.

        into: where it may be copied to, if it is not in this process's memory.
        """
        address = self._table[rank][slot.index]
        own = self.own_gradient(slot) if rank == self._rank else None
        if not address or (rank == self._rank and own is None):
            return self._flats[rank][flat][first:last]
        first, last = first - slot.offset, last - slot.offset
        if own is not None:
            gradient = own.detach()
            return gradient.as_strided((last - first,), (1,), gradient.storage_offset() + first)
        dtype = slot.parameter.dtype
        into = self._spare(last - first, dtype) if into is None else into
        try:
            return PrivateView(rank, self._barrier.pid(rank), address).read(first * dtype.itemsize, into)
        except TeamError as error:
            raise self._lost(rank) or error from None

    def _spare(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        size = count * dtype.itemsize
        if self._scratch.nbytes < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch[:size].view(dtype)

    def _lost(self, rank: int) -> WorkerLost | None:
        reason, known = self._barrier.gone_soon(rank), self._barrier.ranks[rank]
        return WorkerLost(f"rank {known} {reason} while its gradient was being read", [known]) if reason else None


def is_large(slot: Slot) -> bool:
    return slot.count * slot.parameter.dtype.itemsize >= LARGE


def _fits(gradient: torch.Tensor, view: torch.Tensor) -> bool:
    """True if a gradient's elements lie in memory as they would in the flat buffer."""
    return (
        type(gradient) is torch.Tensor
        and gradient.layout is torch.strided
        and gradient.dtype is view.dtype
        and gradient.is_cpu
        and gradient.shape == view.shape
        and gradient.stride() == view.stride()
        and not gradient.is_neg()
        and not gradient.is_conj()
        and gradient.data_ptr() != 0  # a tensor of zeros may have no memory
    )


def _cut(layout: Layout, number: int, start: int, stop: int) -> list[_Span]:
    """The spans of [start, stop) in one of the flat buffers."""
    spans: list[_Span] = []
    at = start
    for slot in layout.flats[number].slots:
        first, last = max(start, slot.offset), min(stop, slot.offset + slot.count)
        if is_large(slot) and first < last:
            if at < first:
                spans.append(_Span(at, first, None))
            spans.append(_Span(first, last, slot))
            at = last
    if at < stop:
        spans.append(_Span(at, stop, None))
    return spans


def _permitted(members: Members) -> bool:
    """True if every worker of this machine can read the memory of all others; found by reading a number there."""
    if members.size == 1:
        return True
    signature = torch.tensor([_MAGIC + members.rank])
    addresses = members.gather(signature.data_ptr().to_bytes(8, "little"), BarrierKind.ALLOCATE)
    assert isinstance(members.barrier, Barrier)
    peers = PeerMemory([members.barrier.pid(rank) for rank in range(members.size)])
    permitted = peers.permit([int.from_bytes(address, "little") for address in addresses], _MAGIC)
    return all(answer == b"\1" for answer in members.gather(bytes([permitted]), BarrierKind.ALLOCATE))
