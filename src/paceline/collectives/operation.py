"""A collective operation as a number that members compare, and as text for messages."""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import torch

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
"""Every dtype that this torch has, in the same order in every process."""
NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}


class OpKind(IntEnum):
    """The collective operations."""

    BARRIER = 1
    BROADCAST = 2
    ALL_REDUCE = 3
    REDUCE = 4
    ALL_GATHER = 5
    GATHER = 6
    SCATTER = 7
    REDUCE_SCATTER = 8
    ALL_TO_ALL = 9

    @property
    def spoken(self) -> str:
        return self.name.lower()


class Op(IntEnum):
    """The operators of reductions."""

    NONE = 0
    SUM = 1
    AVG = 2
    PRODUCT = 3
    MIN = 4
    MAX = 5
    BAND = 6
    BOR = 7
    BXOR = 8
    PREMUL_SUM = 9

    @property
    def spoken(self) -> str:
        return self.name.lower()


class CollectiveCall(NamedTuple):
    """One member's call of a collective; all members' calls must be equal."""

    kind: OpKind
    dtype: torch.dtype = torch.uint8
    length: int = 0
    """Elements, where all members must have the same number; 0 where they may differ."""
    op: Op = Op.NONE
    root: int = 0

    @property
    def signature(self) -> int:
        """The call in 64 bits."""
        dtype = NUMBERS[self.dtype]
        return self.kind | self.op << 5 | dtype << 9 | self.root << 16 | self.length << 28

    @classmethod
    def of(cls, signature: int) -> CollectiveCall | None:
        """The call of a signature; None if it is not one."""
        kind, op, dtype = signature & 31, signature >> 5 & 15, signature >> 9 & 127
        if kind not in set(OpKind) or op not in set(Op) or dtype >= len(DTYPES):
            return None
        return cls(OpKind(kind), DTYPES[dtype], signature >> 28, Op(op), signature >> 16 & 4095)

    @property
    def spoken(self) -> str:
        if self.kind is OpKind.BARRIER:
            return "barrier"
        words = [self.kind.spoken, "of"]
        words += [f"{self.length} x {_short(self.dtype)}"] if self.length else [_short(self.dtype)]
        if self.op is not Op.NONE:
            words.append(f"({self.op.spoken})")
        if self.kind in (OpKind.BROADCAST, OpKind.REDUCE, OpKind.GATHER, OpKind.SCATTER):
            words.append(f"with root {self.root}")
        return " ".join(words)


@lru_cache(maxsize=4096)
def operation(
    kind: OpKind, dtype: torch.dtype, count: int, op: Op = Op.NONE, root: int = 0
) -> tuple[CollectiveCall, int]:
    """A call and its signature, cached."""
    made = CollectiveCall(kind, dtype, count, op, root)
    return made, made.signature


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
