"""A digest of a checkpoint's content: its structure, its numbers and the bytes of its tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

KEY = "paceline.checksum"
"""The checkpoint's entry with the digest; no keyword argument of `team.save` can have this name."""
_CHUNK = 1 << 24
"""Elements of a tensor that are read at once."""


def checksum(content: Mapping[str, Any]) -> str:
    """The digest of a checkpoint, without its entry for one."""
    digest = hashlib.sha256()
    _add(digest, {key: value for key, value in content.items() if key != KEY})
    return f"sha256:{digest.hexdigest()}"


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        _add_tensor(digest, value)
    elif isinstance(value, Mapping):
        _tell(digest, f"dict {len(value)}")
        for key, item in value.items():
            _add(digest, key)
            _add(digest, item)
    elif isinstance(value, list | tuple):
        _tell(digest, f"{'list' if isinstance(value, list) else 'tuple'} {len(value)}")
        for item in value:
            _add(digest, item)
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
