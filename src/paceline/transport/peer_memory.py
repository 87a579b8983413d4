"""Reading and writing the memory of another process of this machine, without a copy in between.

Linux lets a process copy straight from and to the memory of another one of the same user (process_vm_readv). Some
containers forbid it; and what lies in a shared segment is better mapped. A `View` hides which of the two it is.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence

import torch

from paceline.errors import TeamError, WorkerLost
from paceline.transport import segments


class _Span(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("size", ctypes.c_size_t))


_library = ctypes.CDLL(None, use_errno=True)  # gives the interpreter lock away while it copies


class PrivateView:
    """Memory that only its owner has mapped."""

    def __init__(self, rank: int, pid: int, address: int) -> None:
        self._rank, self._pid, self._address = rank, pid, address

    def read(self, offset: int, into: torch.Tensor) -> torch.Tensor:
        """Reads as many bytes as `into` has: returns `into`, or a view of them where they lie, if they are mapped."""
        self._move(_library.process_vm_readv, offset, into)
        return into

    def copy(self, offset: int, into: torch.Tensor) -> None:
        """Copies as many bytes as `into` has into it."""
        self._move(_library.process_vm_readv, offset, into)

    def write(self, offset: int, source: torch.Tensor) -> None:
        self._move(_library.process_vm_writev, offset, source)

    def _move(self, call: ctypes._NamedFuncPointer, offset: int, tensor: torch.Tensor) -> None:
        size = tensor.nbytes
        done = 0
        while done < size:
            here = _Span(tensor.data_ptr() + done, size - done)
            there = _Span(self._address + offset + done, size - done)
            moved = call(self._pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            if moved <= 0:
                rank, number = self._rank, ctypes.get_errno()
                if number == errno.ESRCH:
                    raise WorkerLost(f"rank {rank} died while its tensor was being read", [rank])
                raise TeamError(f"the memory of rank {rank} cannot be reached any more: {os.strerror(number)}", [rank])
            done += moved


class MappedView:
    """Memory that this process has mapped too."""

    def __init__(self, content: torch.Tensor, start: int) -> None:
        self._content, self._start = content, start

    def read(self, offset: int, into: torch.Tensor) -> torch.Tensor:
        start = self._start + offset
        part = self._content[start : start + into.nbytes]
        if start % into.itemsize == 0:
            return part.view(into.dtype)
        return into.copy_(part.clone().view(into.dtype))  # bytes at an odd place have no view as elements

    def copy(self, offset: int, into: torch.Tensor) -> None:
        start = self._start + offset
        bytes_of(into).copy_(self._content[start : start + into.nbytes])

    def write(self, offset: int, source: torch.Tensor) -> None:
        start = self._start + offset
        self._content[start : start + source.nbytes].copy_(bytes_of(source))


View = PrivateView | MappedView
"""The bytes of a tensor that another process has exposed."""


class PeerMemory:
    """One member's access to the memory of the others."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._mapped = segments.Mapped()
        self.private = False
        """True if private memory may be exposed: all members can reach it."""
        self._spare: list[torch.Tensor] = []
        self._used: list[torch.Tensor] = []

    def permit(self, addresses: list[int], magic: int) -> bool:
        """Reads a number that every member has put at an address; True if that worked for all."""
        try:
            for rank, (pid, address) in enumerate(zip(self._pids, addresses, strict=True)):
                seen = PrivateView(rank, pid, address).read(0, torch.empty(1, dtype=torch.int64))
                if int(seen) != magic + rank:
                    return False
        except (TeamError, AttributeError):
            return False
        return True

    def expose(self, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """Makes a contiguous tensor reachable; returns the tensor that the others see, and its place.

        Where private memory cannot be reached that is a copy in shared memory; the caller copies back what it needs,
        and then calls `release`.
        """
        segment = segments.find(tensor)
        if segment is None and self.private:
            return tensor, (0, 0, tensor.data_ptr())
        if segment is None:
            copied = self._scratch(tensor.nbytes)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            tensor, segment = copied.copy_(tensor), segments.find(copied)
            assert segment is not None
        return tensor, (segment.number, segment.descriptor, tensor.data_ptr() - segment.start)

    def release(self) -> None:
        """Releases what was exposed, once no other member reads it."""
        if self._used:
            self._spare, self._used = self._used, []  # memory that was not used this time is freed

    def _scratch(self, size: int) -> torch.Tensor:
        for box in self._spare:
            if box.nbytes >= size:
                self._spare.remove(box)
                break
        else:
            box = segments.empty(size, dtype=torch.uint8)
        self._used.append(box)
        return box

    def view(self, rank: int, where: Sequence[int]) -> View:
        """The bytes that `rank` has exposed there."""
        number, descriptor, place = where
        if number == 0:
            return PrivateView(rank, self._pids[rank], place)
        try:
            return MappedView(self._mapped.tensor(self._pids[rank], number, descriptor), place)
        except OSError as error:
            raise TeamError(f"the memory of rank {rank} cannot be mapped: {error.strerror}", [rank]) from None


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same contiguous memory as a flat tensor of bytes."""
    # One element counts as contiguous whatever its stride, but then has no view as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
