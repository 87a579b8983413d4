"""Keys of samples on their way between workers: plain values, with which no code can travel.

A tuple is told from a list, since a dataset may look a key up: `{(scene, frame): …}[key]`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.msgpack import Ext

from paceline.errors import UsageError

_TUPLE = 1
"""Marks a tuple among the extensions of msgpack."""


def pack(drawn: Iterable[Any], *, batches: bool) -> bytes:
    """What a sampler gives; `batches` if each of it is a whole batch of keys."""
    try:
        if batches:
            return msgspec.msgpack.encode([[_plain(key) for key in batch] for batch in drawn])
        return msgspec.msgpack.encode([_plain(key) for key in drawn])
    except (TypeError, OverflowError) as error:
        raise UsageError(
            f"the loader's sampler gives keys that cannot travel between workers ({error}); "
            "they must be numbers, strings, or lists of them"
        ) from None


def restored(keys: list[Any]) -> list[Any]:
    """The same keys as they were before they travelled."""
    return [key if type(key) is int else _restored(key) for key in keys]


def _plain(key: Any) -> Any:
    if type(key) is int:
        return key
    if isinstance(key, tuple):
        return Ext(_TUPLE, msgspec.msgpack.encode([_plain(part) for part in key]))
    if isinstance(key, list):
        return [_plain(part) for part in key]
    if isinstance(key, dict):
        return {name: _plain(part) for name, part in key.items()}
    return key.tolist() if hasattr(key, "tolist") else key  # numbers of NumPy, and tensors


def _restored(key: Any) -> Any:
    if isinstance(key, Ext) and key.code == _TUPLE:
        return tuple(restored(msgspec.msgpack.decode(key.data)))
    if isinstance(key, list):
        return restored(key)
    if isinstance(key, dict):
        return {name: _restored(part) for name, part in key.items()}
    return key
