"""The random numbers of a process: the state of torch's, Python's and NumPy's generators."""

from __future__ import annotations

import random
import sys
from typing import Any

import msgspec
import torch


class RandomState(msgspec.Struct, frozen=True, array_like=True):
    """Generators of one process."""

    torch: bytes
    python: list[int]
    numpy: tuple[bytes, int, int, float] | None = None
    """Keys, position, and whether there is one more Gaussian number, and which."""

    def content(self) -> dict[str, Any]:
        """As a part of a snapshot: numbers and tensors."""
        numpy = None if self.numpy is None else [_tensor(self.numpy[0]), *self.numpy[1:]]
        return {"torch": _tensor(self.torch), "python": torch.tensor(self.python), "numpy": numpy}

    @classmethod
    def of(cls, content: dict[str, Any]) -> RandomState:
        numpy = content["numpy"]
        known = None if numpy is None else (numpy[0].numpy().tobytes(), *numpy[1:])
        return cls(content["torch"].numpy().tobytes(), content["python"].tolist(), known)

    def restore(self) -> None:
        """Makes these the random numbers of this process."""
        torch.set_rng_state(_tensor(self.torch))
        version, *keys = self.python
        random.setstate((version, tuple(keys), None))
        if self.numpy is not None:
            import numpy

            keys_of, place, has_more, more = self.numpy
            numpy.random.set_state(("MT19937", numpy.frombuffer(keys_of, dtype=numpy.uint32), place, has_more, more))


def random_state() -> RandomState:
    """That of this process, now."""
    version, keys, _ = random.getstate()
    numpy: tuple[bytes, int, int, float] | None = None
    if "numpy" in sys.modules:
        state: Any = sys.modules["numpy"].random.get_state()
        if state[0] == "MT19937":
            numpy = (state[1].tobytes(), int(state[2]), int(state[3]), float(state[4]))
    return RandomState(torch.get_rng_state().numpy().tobytes(), [version, *keys], numpy)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
