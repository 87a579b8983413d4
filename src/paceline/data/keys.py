"""Encodes the keys of samples for other workers, as plain values that cannot carry code.

Tuples and lists stay distinct, since a dataset may look a key up: `{(scene, frame): …}[key]`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.msgpack import Ext

from paceline.errors import UsageError

_TUPLE = 1
"""The msgpack extension code of a tuple."""


def pack(drawn: Iterable[Any], *, batches: bool) -> bytes:
    """Encodes the output of a sampler; `batches` if each item is a whole batch of keys."""
    try:
        if batches:
            return msgspec.msgpack.encode([_all_plain(batch) for batch in drawn])
        return msgspec.msgpack.encode(_all_plain(drawn))
    except (TypeError, OverflowError) as error:
        raise UsageError(
            f"the loader's sampler gives keys that cannot be sent to other workers ({error}); "
            "they must be numbers, strings, or lists of them"
        ) from None


def pack_for_all(drawn: Iterable[Any], *, batches: bool) -> bytes:
    """As `pack`; if that fails, the error, which `unpack` raises on all workers."""
    try:
        return pack(drawn, batches=batches)
    except UsageError as error:
        return msgspec.msgpack.encode({"error": str(error)})


def unpack(order: bytes) -> list[Any]:
    """The original keys, or batches of them."""
    keys = msgspec.msgpack.decode(order)
    if isinstance(keys, dict):
        raise UsageError(keys["error"])
    return restored(keys)


def restored(keys: list[Any]) -> list[Any]:
    """The original keys, from decoded ones."""
    return keys if are_indices(keys) else [_restored(key) for key in keys]


def are_indices(keys: list[Any]) -> bool:
    """True if all keys are plain integers, which need no encoding: nearly always, so nothing is done for each."""
    return set(map(type, keys)) == {int}


def _all_plain(drawn: Iterable[Any]) -> list[Any]:
    keys = list(drawn)
    return keys if are_indices(keys) else [_plain(key) for key in keys]


def _plain(key: Any) -> Any:
    if isinstance(key, tuple):
        return Ext(_TUPLE, msgspec.msgpack.encode([_plain(part) for part in key]))
    if isinstance(key, list):
        return [_plain(part) for part in key]
    if isinstance(key, dict):
        return {name: _plain(part) for name, part in key.items()}
    return key.tolist() if hasattr(key, "tolist") else key  # NumPy numbers, and tensors


def _restored(key: Any) -> Any:
    if isinstance(key, Ext) and key.code == _TUPLE:
        return tuple(restored(msgspec.msgpack.decode(key.data)))
    if isinstance(key, list):
        return restored(key)
    if isinstance(key, dict):
        return {name: _restored(part) for name, part in key.items()}
    return key
