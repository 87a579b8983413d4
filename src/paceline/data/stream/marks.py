"""Digests of a stream, by which workers that read the same one notice that they do not."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

_VALUES = 16
"""Values of a tensor that its digest looks at."""


class Mark(NamedTuple):
    """The digest of a source up to a sample."""

    source: int
    samples: int
    """Samples read so far."""
    digest: int


def digest_of(sample: Any, before: int = 0) -> int:
    """A cheap digest of a sample, on top of another one."""
    for leaf in tree_leaves(sample):
        before = zlib.crc32(_bytes(leaf), before)
    return before


def _bytes(leaf: Any) -> bytes:
    if isinstance(leaf, torch.Tensor):
        few = leaf.detach().reshape(-1)[:_VALUES].cpu()
        return repr((tuple(leaf.shape), str(leaf.dtype), few.tolist())).encode()
    if hasattr(leaf, "dtype") and hasattr(leaf, "ravel"):
        return repr((leaf.shape, str(leaf.dtype), leaf.ravel()[:_VALUES].tolist())).encode()
    if isinstance(leaf, bytes | bytearray):
        return bytes(leaf[:256])
    return repr(leaf).encode() if isinstance(leaf, str | int | float | bool | complex) else type(leaf).__name__.encode()


class Marker:
    """Looks at one sample in so many, and makes a mark after the first and whenever their number has doubled."""

    def __init__(self, source: int, stride: int) -> None:
        """stride: every so many samples one is looked at; 0 if there is nobody to compare with."""
        self._source, self._stride = source, stride
        self._digest = self._samples = 0
        self._next = 1
        self._made: list[Mark] = []

    def add(self, sample: Any) -> None:
        if not self._stride:
            return
        if self._samples % self._stride == 0:
            self._digest = digest_of(sample, self._digest)
        self._samples += 1
        if self._samples == self._next:
            self._made.append(Mark(self._source, self._samples, self._digest))
            self._next = max(2 * self._next, self._stride)

    def take(self) -> list[Mark]:
        """The marks since the last call."""
        made, self._made = self._made, []
        return made
