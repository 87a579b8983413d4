"""The arguments of collectives as torch gives them: operators, roots and timeouts in options or by themselves."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.distributed import ReduceOp

from paceline.collectives.operation import Op
from paceline.errors import InvalidCall

_SUM = ReduceOp.SUM
_BY_NUMBER = {getattr(ReduceOp.RedOpType, op.name).value: op for op in Op if op is not Op.NONE}
_ZERO = datetime.timedelta(0)


def root_of(name: str, opts: Any, size: int, tensors: int = 1) -> int:
    """The root of an operation, of so many members and tensors."""
    root = int(opts) if isinstance(opts, int) else opts.rootRank if opts is not None else 0
    if not 0 <= root < size:
        raise InvalidCall(f"{name}: invalid root rank: {root}; the ranks of this group are 0 to {size - 1}")
    tensor = root_tensor(opts)
    if not 0 <= tensor < tensors:
        raise InvalidCall(f"{name}: invalid root tensor: {tensor}; there are {tensors}")
    return root


def root_tensor(opts: Any) -> int:
    """Which of several tensors the root sends or gets."""
    return int(getattr(opts, "rootTensor", 0))


def kind_of(op: Any) -> Op:
    return Op.SUM if op == _SUM else _BY_NUMBER[op.op.value]


def operator_of(opts: Any) -> tuple[Op, float | torch.Tensor | None]:
    """The operator, and the factor of a premultiplied sum."""
    if opts is None:
        return Op.SUM, None
    wanted: Any = opts if isinstance(opts, ReduceOp | ReduceOp.RedOpType) else opts.reduceOp
    kind = getattr(wanted, "op", wanted)
    op = _BY_NUMBER[kind.value]
    return op, wanted.factor if op is Op.PREMUL_SUM else None


def seconds_of(opts: Any, timeout: Any = None) -> float | None:
    """The timeout of one operation in seconds; None where it has that of its group, which torch gives as -1 ms."""
    if isinstance(opts, datetime.timedelta):
        timeout = opts
    limit = timeout if timeout is not None else getattr(opts, "timeout", None)
    return limit.total_seconds() if limit is not None and limit > _ZERO else None


def check_alike(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raises unless all tensors of a list have one dtype and shape."""
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        if tensor.dtype != first.dtype:
            raise InvalidCall(
                f"{name}: invalid tensor type at index {index} (expected {first.dtype}, got {tensor.dtype})"
            )
        if tensor.shape != first.shape:
            raise InvalidCall(
                f"{name}: invalid tensor size at index {index} (expected {tuple(first.shape)}, "
                f"got {tuple(tensor.shape)})"
            )


def overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """True if two tensors may share memory."""
    if len(tensors) == 1:
        return False
    spans = sorted(_span(tensor) for tensor in tensors if tensor.numel())
    return any(after[0] < before[1] for before, after in pairwise(spans))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between which a tensor lies."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize
