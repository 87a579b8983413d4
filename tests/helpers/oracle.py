"""What a process group must do, done by one process: values by seed and rank, and how they combine in rank order."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import itertools
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from torch import distributed
from torch.distributed import ReduceOp, distributed_c10d

from helpers.groups import Pool, Work
from paceline.collectives.shared_memory import CHUNK
from paceline.errors import TeamError
from paceline.transport import segments
from paceline.transport.control_block import ControlBlock
from paceline.transport.peer_memory import PeerMemory

# Torch warns of what is new and of what is old; here all of it is wanted.
quiet = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

T = TypeVar("T")
# A case that fails may take its group with it, so that looking for a smaller one takes longer than reading it.
thoroughly = settings(
    deadline=None, derandomize=True, database=None, max_examples=8, phases=[Phase.explicit, Phase.generate]
)
SIZES = [1, 2, 3, 4, 5, 8]
EIGHT_BIT_FLOATS = [getattr(torch, name) for name in sorted(vars(torch)) if name.startswith("float8_")]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, *EIGHT_BIT_FLOATS]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
UNSIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
WHOLE = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, *UNSIGNED]
NUMERIC = [*FLOATS, *COMPLEX, *WHOLE, torch.bool]
MOVABLE = [*NUMERIC, torch.bits8, torch.bits16]
DTYPES = [*MOVABLE, torch.float4_e2m1fn_x2]
"""All that torch can copy; the last only if it lies in one piece."""
_WIDE = {torch.complex32: torch.complex64, **dict.fromkeys(EIGHT_BIT_FLOATS, torch.float32)}
"""Torch stores these, and calculates in others."""

FACTOR = 1.5
_FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "premul_sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
OPERATORS = list(_FUNCTIONS)
_BITWISE = ("band", "bor", "bxor")


def reduce_op(name: str) -> Any:
    """What torch.distributed calls it."""
    if name == "premul_sum":
        return distributed._make_nccl_premul_sum(FACTOR)  # type: ignore[attr-defined]
    return getattr(ReduceOp, name.upper())


def defined(operator: str, dtype: torch.dtype) -> bool:
    """Whether values of this dtype can be combined this way."""
    if dtype.is_complex:
        return operator not in (*_BITWISE, "min", "max")
    if dtype is torch.bool:
        return operator != "avg"
    return not (dtype.is_floating_point and operator in _BITWISE)


# -- values ----------------------------------------------------------------------------------------------------------


def anything(seed: int, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Any bits at all: what is only moved must arrive as it was."""
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    source = torch.Generator().manual_seed(1009 * seed + rank)
    size = count * dtype.itemsize
    words = torch.randint(-(2**63), 2**63 - 1, (-(-size // 8),), generator=source)
    content = words.view(torch.uint8)[:size]
    return (content & 1 if dtype is torch.bool else content).view(dtype).view(tuple(shape))


def numbers(seed: int, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """What can be calculated with: of every bit pattern where that is a number."""
    if not dtype.is_floating_point and not dtype.is_complex:
        return anything(seed, rank, shape, dtype)
    source = torch.Generator().manual_seed(1009 * seed + rank)
    if dtype is torch.float8_e8m0fnu:  # powers of two, and nothing else
        return (torch.rand(tuple(shape), generator=source) * 6 + 0.1).to(dtype)
    drawn = torch.float64 if dtype is torch.float64 else torch.float32
    if dtype.is_complex:
        drawn = torch.complex128 if dtype is torch.complex128 else torch.complex64
    return torch.randn(tuple(shape), generator=source, dtype=drawn).to(dtype)


def fold(operator: str, parts: Sequence[torch.Tensor], real: bool = False) -> torch.Tensor:
    """The values of all ranks as one, from the first to the last.

    real: of complex numbers each part for itself, as torch.distributed has it done in an all_reduce.
    """
    if real and parts[0].is_complex():
        return torch.view_as_complex(fold(operator, [torch.view_as_real(part) for part in parts]))
    if operator == "premul_sum":
        parts = [_scaled(part) for part in parts]
    total = parts[0].clone()
    for part in parts[1:]:
        total = _pair(operator, total, part)
    return _divided(total, len(parts)) if operator == "avg" else total


def _pair(operator: str, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    function, dtype = _FUNCTIONS[operator], first.dtype
    if dtype in UNSIGNED:
        # Torch lacks most of these, but a signed number has the same bits, and the same order once its top bit flips.
        twin = UNSIGNED[dtype]
        flip = torch.iinfo(twin).min if operator in ("min", "max") else 0
        return (function(first.view(twin) ^ flip, second.view(twin) ^ flip) ^ flip).view(dtype)
    wide = _WIDE.get(dtype, dtype)
    return function(first.to(wide), second.to(wide)).to(dtype)


def _divided(total: torch.Tensor, count: int) -> torch.Tensor:
    dtype = total.dtype
    if dtype in UNSIGNED:
        whole = total.reshape(-1).numpy()
        return torch.from_numpy(whole // whole.dtype.type(count)).view(total.shape)
    if dtype.is_floating_point or dtype.is_complex:
        return (total.to(_WIDE.get(dtype, dtype)) / count).to(dtype)
    return torch.div(total, count, rounding_mode="trunc")


def _scaled(part: torch.Tensor) -> torch.Tensor:
    return (part.to(_WIDE.get(part.dtype, part.dtype)) * FACTOR).to(part.dtype)


# -- what members tell -----------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """A tensor, short enough to be sent and shown, and different for any other bits."""

    dtype: str
    shape: tuple[int, ...]
    first: str
    digest: str


def seen(tensor: torch.Tensor) -> Seen:
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    content = plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    digest = hashlib.blake2b(content, digest_size=12).hexdigest()
    return Seen(str(plain.dtype), tuple(plain.shape), content[:16].hex(" ", plain.dtype.itemsize), digest)


# -- how tensors lie in memory ---------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """Where the elements of a tensor are."""

    form: str = "plain"
    """plain, offset, transposed, strided; conj or neg: with the sign still to be changed."""
    shared: bool = False
    """Whether other processes can map its memory."""
    grad: bool = False


PLAIN = Layout()
FORMS = ["plain", "offset", "transposed", "strided"]


@dataclasses.dataclass
class Laid:
    """A tensor of some content in some layout, which knows what lies around it."""

    tensor: torch.Tensor
    base: torch.Tensor
    around: torch.Tensor
    """Which elements of `base` are not of the tensor."""

    def unharmed(self) -> bool:
        """Whether what lies around it is as it was."""
        content = self.base.view(torch.uint8).view(-1, self.base.itemsize)[self.around]
        return bool((content == 1).all())


def lay(content: torch.Tensor, layout: Layout = PLAIN) -> Laid:
    """The same values in another layout."""
    dtype, shape, count = content.dtype, content.shape, content.numel()
    room = {"offset": count + 5, "strided": 2 * count + 1}.get(layout.form, count)
    base = segments.empty(room, dtype=dtype) if layout.shared else torch.empty(room, dtype=dtype)
    base.view(torch.uint8).fill_(1)
    inside = torch.zeros(room, dtype=torch.bool)
    _view(inside, layout.form, shape).fill_(True)
    tensor = _view(base, layout.form, shape)
    if layout.form == "conj":
        tensor = tensor.conj()
    if layout.form == "neg":
        tensor = torch._neg_view(tensor)
    tensor.copy_(content)
    if layout.grad and (dtype.is_floating_point or dtype.is_complex):
        tensor.requires_grad_()
    return Laid(tensor, base, ~inside)


def _view(base: torch.Tensor, form: str, shape: torch.Size) -> torch.Tensor:
    count = shape.numel()
    if form == "offset":
        return base[3 : 3 + count].view(shape)
    if form == "strided":
        return base[1:].view(*shape, 2)[..., 0]
    if form == "transposed":
        return base.view(shape[::-1]).permute(tuple(reversed(range(len(shape)))))
    return base.view(shape)


def turned(items: Sequence[T], by: int) -> list[T]:
    """The same items, beginning with another: so that tests which draw the same numbers draw different ones of them."""
    first = by % len(items)
    return [*items[first:], *items[:first]]


@functools.cache
def layouts(size: int, turn: int) -> st.SearchStrategy[list[Layout]]:
    """For each rank one."""
    forms = st.sampled_from(turned(FORMS, turn))
    return st.lists(st.builds(Layout, forms, st.booleans(), st.booleans()), min_size=size, max_size=size)


@functools.cache
def shapes(dtype: torch.dtype, most: int) -> st.SearchStrategy[tuple[int, ...]]:
    """No dimension, no element, a few; just below, at and just above what a slot holds; several chunks and a bit."""
    slot, chunk = ControlBlock.SLOT // dtype.itemsize, CHUNK // dtype.itemsize
    few = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)
    none = st.sampled_from([(0,), (3, 0), (0, 2, 4)])
    edge = st.integers(-2, 2).map(lambda more: (slot + more,))
    many = st.builds(lambda chunks, more: (chunks * chunk + more,), st.integers(1, 12), st.integers(-70, 70))
    flat = st.builds(lambda rows, columns: (rows, columns), st.integers(3, 9), st.integers(slot // 8, slot // 2))
    fits = st.one_of(edge, many, flat).filter(lambda shape: torch.Size(shape).numel() * dtype.itemsize <= most)
    return st.one_of(st.just(()), none, few, few, fits, fits)


# -- signals beside the group ----------------------------------------------------------------------------------------


def tell(what: str) -> None:
    """Let other members know, by a way that is not the one under test."""
    distributed_c10d._get_default_store().set(what, "1")


def hear(*whats: str) -> None:
    """Wait until all of these have been told."""
    distributed_c10d._get_default_store().wait(list(whats), datetime.timedelta(seconds=10))


_tokens = itertools.count()


def token() -> str:
    """For signals that no other test tells."""
    return f"token {next(_tokens)}"


# -- groups that stay ------------------------------------------------------------------------------------------------


class Pools(contextlib.AbstractContextManager["Pools"]):
    """One pool of members per world size, made when it is first needed."""

    def __init__(self, reaching: bool = True) -> None:
        """reaching: whether members may look into each other's memory; in some containers they may not."""
        self._known: dict[int, Pool] = {}
        self._reaching = reaching

    def run(self, size: int, work: Work, *arguments: Any, timeout: float = 30.0) -> list[Any]:
        """What `work(rank, size, *arguments)` returned on each member."""
        if size not in self._known:
            with pytest.MonkeyPatch.context() as patch:
                if not self._reaching:
                    patch.setattr(PeerMemory, "permit", lambda *_: False)
                self._known[size] = Pool(size, timeout=15.0)
        pool = self._known[size]
        try:
            pool.begin(work, size, *arguments)
            results = pool.finish(timeout)
            failures = [(rank, result) for rank, result in enumerate(results) if isinstance(result, BaseException)]
            # Whoever failed alone is the reason that others waited in vain.
            for rank, failure in sorted(failures, key=lambda item: isinstance(item[1], TeamError)):
                raise AssertionError(f"rank {rank}: {failure.__notes__[0]}") from failure
        except BaseException:
            # Its members may be anywhere by now, and the next test needs some that are not.
            del self._known[size]
            for pid in pool.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            pool.close()
            raise
        return results

    def __exit__(self, *_: object) -> None:
        for pool in self._known.values():
            pool.close()
