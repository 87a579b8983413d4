"""Reductions: for each operator and dtype the fastest implementation that this torch has.

Values are always reduced in the order of ranks, so that the same values give the same bits, whatever the size of the
tensor and whichever member reduces it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy
import torch

from paceline.collectives.operation import Op
from paceline.errors import InvalidCall

Combine = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""Takes two operands and the output, which may be the first operand."""

_NAMES = {
    Op.SUM: "add",
    Op.AVG: "add",
    Op.PREMUL_SUM: "add",
    Op.PRODUCT: "multiply",
    Op.MIN: "minimum",
    Op.MAX: "maximum",
    Op.BAND: "bitwise_and",
    Op.BOR: "bitwise_or",
    Op.BXOR: "bitwise_xor",
}
"""The function of each operator, in torch and in numpy."""
FUNCTIONS: dict[Op, Any] = {op: getattr(torch, name) for op, name in _NAMES.items()}
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


class Reducer:
    """One operator on one dtype."""

    def __init__(self, op: Op, dtype: torch.dtype) -> None:
        self.op, self.dtype = op, dtype
        self._combine = _combine(op, dtype)
        plain = dtype not in _UNSIGNED and _wide(dtype) is None and op is not Op.AVG
        self.pair: Callable[..., torch.Tensor] | None = FUNCTIONS[op] if plain else None
        """Torch's function of two tensors, where it is the whole reduction."""

    def merge(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Reduces all parts, in their order; `out` may be the first of them."""
        if not out.is_contiguous():
            # Torch computes these in another order, which can change the sign of a zero. All must get the same bits.
            contiguous = torch.empty(out.shape, dtype=out.dtype)
            self.merge(parts, contiguous)
            out.copy_(contiguous)
            return
        if len(parts) == 1:
            if out is not parts[0]:
                out.copy_(parts[0])
        else:
            self._combine(parts[0], parts[1], out)
            for part in parts[2:]:
                self._combine(out, part, out)
        if self.op is Op.AVG:
            self.divide(out, len(parts))

    def add(self, total: torch.Tensor, part: torch.Tensor) -> None:
        """Adds one part; an average is divided later."""
        self._combine(total, part, total)

    def divide(self, total: torch.Tensor, count: int) -> None:
        """Divides a sum if the operator is an average; whole numbers are rounded towards zero."""
        if self.op is not Op.AVG:
            return
        if self.dtype in _UNSIGNED:
            array = total.numpy()
            numpy.floor_divide(array, array.dtype.type(count), out=array)
        elif self.dtype.is_floating_point or self.dtype.is_complex:
            wide = _wide(self.dtype)
            total.copy_(total.to(wide) / count) if wide else total.div_(count)
        else:
            total.div_(count, rounding_mode="trunc")


@lru_cache(maxsize=1024)
def reducer(op: Op, dtype: torch.dtype) -> Reducer:
    """The reduction of an operator and dtype; raises InvalidCall if there is none."""
    return Reducer(op, dtype)


def _wide(dtype: torch.dtype) -> torch.dtype | None:
    """The dtype to compute in, if torch cannot compute in this one."""
    if dtype is torch.complex32:
        return torch.complex64
    if dtype.is_floating_point and dtype.itemsize == 1:
        return torch.float32
    return None


def _combine(op: Op, dtype: torch.dtype) -> Combine:
    if op is Op.AVG and dtype is torch.bool:
        raise InvalidCall("avg is not defined for bool; sum, product, min, max and the bitwise operators are")
    if dtype in _UNSIGNED:
        ufunc = getattr(numpy, _NAMES[op])
        return lambda first, second, out: ufunc(first.numpy(), second.numpy(), out=out.numpy())
    function, wide = FUNCTIONS[op], _wide(dtype)
    probe = torch.empty(2, dtype=wide or dtype)
    try:
        function(probe, probe, out=probe)
        if wide:
            torch.empty(2, dtype=dtype).copy_(probe)
    except (RuntimeError, TypeError):
        raise InvalidCall(f"{op.spoken} is not defined for {str(dtype).removeprefix('torch.')}") from None
    if wide:
        return lambda first, second, out: out.copy_(function(first.to(wide), second.to(wide)))
    return lambda first, second, out: function(first, second, out=out)


def scaled(tensor: torch.Tensor, factor: float | torch.Tensor | None) -> torch.Tensor:
    """This member's term of a premultiplied sum; of another reduction, which has no factor, the tensor itself."""
    if factor is None:
        return tensor
    wide = _wide(tensor.dtype) or tensor.dtype
    return torch.mul(tensor.to(wide), factor).to(tensor.dtype)
