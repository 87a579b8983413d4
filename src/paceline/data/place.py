"""How far loaders were when a snapshot was taken, so that another run can go on there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader

from paceline.data.keys import pack, unpack


class StreamPlace(msgspec.Struct, frozen=True, array_like=True):
    """How far a stream was that every worker reads as a whole."""

    next: int
    """The next batch, counted from the beginning of the stream."""
    batch: int
    """Samples of a batch."""
    sources: int
    """Processes of the loader that read it, each its part; at least 1."""
    given: int
    """Batches of the current epoch that were trained on."""
    marks: list[tuple[int, int, int]]
    """Source, samples, and the digest of some of these, by which another run knows that it reads the same stream."""


class LoaderPlace(msgspec.Struct, frozen=True):
    """How far one loader was."""

    epoch: int
    """Epochs of training that are over."""
    left: list[Any] | None = None
    """Of the next epoch, the keys that are left, or batches of them; None if it has not begun."""
    batches: bool = False
    """True if these are whole batches."""
    generators: list[torch.Tensor] = []
    """States of the random generators that the loader draws from, beside torch's own."""
    sampler: Any = None
    """The sampler's own state, if it has any."""
    stream: StreamPlace | None = None
    """Of a stream, which has no keys."""

    def content(self) -> dict[str, Any]:
        """As a part of a snapshot: numbers and tensors."""
        left = None
        if self.left is not None:
            left = torch.frombuffer(bytearray(pack(self.left, batches=self.batches)), dtype=torch.uint8)
        own = {"generators": list(self.generators), "sampler": self.sampler, "stream": msgspec.to_builtins(self.stream)}
        return {"epoch": self.epoch, "left": left, "batches": self.batches, **own}

    @classmethod
    def of(cls, content: dict[str, Any]) -> LoaderPlace:
        left = content["left"]
        keys = None if left is None else unpack(left.numpy().tobytes())
        stream = msgspec.convert(content.get("stream"), StreamPlace | None)
        return cls(content["epoch"], keys, content["batches"], content["generators"], content["sampler"], stream)


def generators_of(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The random generators that a loader draws from, beside torch's own."""
    found: dict[int, torch.Generator] = {}
    for holder in _holders(loader):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
    return list(found.values())


def sampler_state(loader: DataLoader[Any]) -> Any:
    """The state of the loader's sampler, if that can say it."""
    for holder in _holders(loader):
        if holder is not loader and hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict"):
            return holder.state_dict()
    return None


def restore_sampler(loader: DataLoader[Any], state: Any) -> None:
    for holder in _holders(loader):
        if state is not None and holder is not loader and hasattr(holder, "load_state_dict"):
            holder.load_state_dict(state)
            return


def own_samplers(loader: DataLoader[Any]) -> bool:
    """True if the loader's order comes from a class that is not torch's, which may count epochs by itself."""
    return any(type(one).__module__ != "torch.utils.data.sampler" for one in _holders(loader) if one is not loader)


def _holders(loader: DataLoader[Any]) -> Iterator[Any]:
    yield loader
    if loader.batch_sampler is not None:
        yield loader.batch_sampler
        if hasattr(loader.batch_sampler, "sampler"):
            yield loader.batch_sampler.sampler
    if loader.sampler is not None:
        yield loader.sampler
