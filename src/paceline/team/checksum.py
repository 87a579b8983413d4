"""A digest of a checkpoint's content: its structure, its numbers and the bytes of its tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.parameters.absent_tensor import AbsentTensor

KEY = "paceline.checksum"
"""The checkpoint's entry with the digest; no keyword argument of `team.save` can have this name."""
_CHUNK = 1 << 24
"""Elements of a tensor that are read at once."""


_SUMMED = 8192
"""Words of eight bytes that one sum is of."""


OnTensor = Callable[[Any, torch.Tensor], object]


def checksum(content: Mapping[str, Any], kind: str = "sha256", on_tensor: OnTensor = lambda _leaf, _value: None) -> str:
    """The digest of a checkpoint, without its entry for one, after the name of its kind and a colon.

    kind: "sha256" of all, or "sums", for snapshots: the SHA-256 of sums of 64 KiB of tensors each, which takes a
    fifteenth of the time and finds what is missing, cut off or overwritten.
    on_tensor: called with each tensor, or what stands for it, and its value.
    """
    digest = _Sums() if kind == "sums" else hashlib.sha256()
    _add(digest, {key: value for key, value in content.items() if key != KEY}, on_tensor)
    return f"{kind}:{digest.hexdigest()}"


def is_whole(content: Mapping[str, Any], told: str) -> bool:
    """True if this is the content whose digest was told."""
    return checksum(content, "sums" if told.startswith("sums:") else "sha256") == told


class _Sums:
    """A digest of sums, where there is much."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def update(self, data: Any) -> None:
        if isinstance(data, bytes):
            self._digest.update(data)
            return
        flat = torch.from_numpy(data)
        whole = flat.numel() // (8 * _SUMMED)
        if whole:
            part = flat[: 8 * _SUMMED * whole]
            aligned = part if part.data_ptr() % 8 == 0 and part.storage_offset() % 8 == 0 else part.clone()
            sums = aligned.view(torch.int64).view(whole, _SUMMED).sum(1)
            self._digest.update(sums.numpy().tobytes())
        self._digest.update(data[8 * _SUMMED * whole :])

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _add(digest: Any, value: Any, on_tensor: OnTensor) -> None:
    if isinstance(value, torch.Tensor | AbsentTensor):
        tensor = value.fetch() if isinstance(value, AbsentTensor) else value
        on_tensor(value, tensor)
        _add_tensor(digest, tensor)
    elif isinstance(value, Mapping):
        _tell(digest, f"dict {len(value)}")
        for key, item in value.items():
            _add(digest, key, on_tensor)
            _add(digest, item, on_tensor)
    elif isinstance(value, list | tuple):
        _tell(digest, f"{'list' if isinstance(value, list) else 'tuple'} {len(value)}")
        for item in value:
            _add(digest, item, on_tensor)
    elif isinstance(value, set | frozenset):
        _tell(digest, f"set {sorted(map(repr, value))}")
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
        _tell(digest, f"{type(value).__name__} {value!r}")
    else:
        _tell(digest, type(value).__qualname__)  # of another kind: its text may differ in another process


def _add_tensor(digest: Any, tensor: torch.Tensor) -> None:
    tensor = tensor.detach()
    _tell(digest, f"tensor {tensor.dtype} {list(tensor.shape)} {tensor.layout}")
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        _add_tensor(digest, tensor.indices())
        _add_tensor(digest, tensor.values())
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].cpu().contiguous()
        digest.update(part.view(torch.uint8).numpy())


def _tell(digest: Any, text: str) -> None:
    """Adds a text with its length, so that no two lists of texts look the same."""
    data = text.encode(errors="surrogatepass")
    digest.update(b"%d:" % len(data) + data)
