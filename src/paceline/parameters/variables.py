"""Mirrored and per-replica variables, as tf.distribute means them, and sums and means over all workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from paceline.config import one_of
from paceline.errors import Mismatch, UsageError

Gather = Callable[[bytes], list[bytes]]

_COMBINE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda stacked: stacked.mean(0) if stacked.is_floating_point() else stacked.double().mean(0),
    "sum": lambda stacked: stacked.sum(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
    "lead": lambda stacked: stacked[0],
}


class Mirrored:
    """One value, kept equal on every worker: each worker's update is combined with the others' before it counts."""

    def __init__(self, value: torch.Tensor, gather: Gather, aggregation: str) -> None:
        self._aggregation = one_of("aggregation", aggregation, _COMBINE)
        self._gather = gather
        self.value = value.detach().clone()
        self.value = self._combined(self.value, "lead")

    def assign(self, value: Any) -> torch.Tensor:
        """Set it to the workers' combined values; all must call it."""
        self.value = self._combined(self._like(value), self._aggregation)
        return self.value

    def assign_add(self, value: Any) -> torch.Tensor:
        """Add the workers' combined values; all must call it."""
        self.value = self.value + self._combined(self._like(value), self._aggregation)
        return self.value

    def _like(self, value: Any) -> torch.Tensor:
        tensor = torch.as_tensor(value, dtype=self.value.dtype).detach()
        if tensor.shape != self.value.shape:
            raise UsageError(
                f"a mirrored value of shape {tuple(self.value.shape)} was given one of shape {tuple(tensor.shape)}"
            )
        return tensor

    def _combined(self, value: torch.Tensor, how: str) -> torch.Tensor:
        values = gather_tensors(value, self._gather)
        return _COMBINE[how](torch.stack([one for one in values if one is not None])).to(value.dtype)

    def __repr__(self) -> str:
        return f"Mirrored({self.value!r})"


class PerReplica:
    """One value per worker; `values` has them all, by rank, with None for a worker that was lost."""

    def __init__(self, value: Any, rank: int, gather: Gather) -> None:
        self.local = value
        if isinstance(value, torch.Tensor):
            self.values: tuple[Any, ...] = tuple(gather_tensors(value.detach(), gather, same=False))
        else:
            try:
                payload = msgspec.msgpack.encode(value)
            except (TypeError, OverflowError) as error:
                raise UsageError(
                    f"per_replica takes tensors, numbers, strings, and lists or dicts of them: {error}"
                ) from None
            self.values = tuple(msgspec.msgpack.decode(part) if part else None for part in gather(payload))
        self.rank = rank

    def reduce(self, how: str = "mean") -> torch.Tensor:
        """All values as one; needs no further exchange."""
        one_of("how", how, _COMBINE)
        known = [torch.as_tensor(value) for value in self.values if value is not None]
        return _COMBINE[how](torch.stack(known))

    def __getitem__(self, rank: int) -> Any:
        return self.values[rank]

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        return f"PerReplica({dict(enumerate(self.values))!r})"


def total(value: Any, gather: Gather, each: int) -> tuple[Any, int]:
    """The sum of the replicas' values, and their number. each: workers of a replica, which have the same value."""
    if isinstance(value, torch.Tensor):
        tensors = [one for one in gather_tensors(value, gather)[::each] if one is not None]
        return torch.stack(tensors).sum(0).to(value.device), len(tensors)
    try:
        number = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"numbers and tensors can be summed; this is a {type(value).__name__}") from None
    found = gather_tensors(number, gather, same=False)
    for rank, one in enumerate(found):
        if one is not None and (one.dim() or one.dtype not in (torch.float64, torch.int64)):
            raise Mismatch(f"rank {rank} brought a tensor where this worker has a number", [rank])
    numbers = [one.item() for one in found[::each] if one is not None]
    return sum(numbers), len(numbers)


def gather_tensors(value: torch.Tensor, gather: Gather, same: bool = True) -> list[torch.Tensor | None]:
    """All workers' tensors, by rank; None for a lost worker. same: shapes and dtypes must be equal."""
    head = msgspec.msgpack.encode((str(value.dtype).removeprefix("torch."), list(value.shape)))
    flat = value.detach().cpu().contiguous().view(-1)
    body = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    tensors: list[torch.Tensor | None] = []
    for rank, part in enumerate(gather(len(head).to_bytes(4, "little") + head + body)):
        if not part:
            tensors.append(None)
            continue
        length = int.from_bytes(part[:4], "little")
        name, shape = msgspec.msgpack.decode(part[4 : 4 + length])
        dtype = getattr(torch, name)
        if same and (dtype != value.dtype or list(value.shape) != shape):
            raise Mismatch(
                f"rank {rank} brought a {name} tensor of shape {tuple(shape)} where this worker has "
                f"{value.dtype} of shape {tuple(value.shape)}",
                [rank],
            )
        raw = bytearray(part[4 + length :])
        tensor = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        tensors.append(tensor.view(shape))
    return tensors
