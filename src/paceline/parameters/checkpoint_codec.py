"""A checkpoint on its way to a machine that cannot read its file: tensors as raw bytes, the rest as msgpack.

No pickle: what comes over a connection must not be able to do anything but be read.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from paceline.errors import UsageError

_TENSOR, _TUPLE = 1, 2
_DTYPES = {str(dtype): dtype for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)}


class _Tensor(msgspec.Struct, array_like=True):
    dtype: str
    shape: list[int]
    data: bytes


def pack(content: Any) -> bytes:
    """Dicts, lists, tuples, numbers, texts and tensors, as bytes."""
    return msgspec.msgpack.encode(_outgoing(content))


def unpack(data: bytes) -> Any:
    return msgspec.msgpack.decode(data, ext_hook=_incoming)


def _outgoing(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8) if value.numel() else value.new_empty(0)
        tensor = _Tensor(str(value.dtype), list(value.shape), flat.numpy().tobytes() if value.numel() else b"")
        return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode(tensor))
    if isinstance(value, dict):
        return {key: _outgoing(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode([_outgoing(item) for item in value]))
    if isinstance(value, list):
        return [_outgoing(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    raise UsageError(
        f"the checkpoint holds a {type(value).__name__}, which cannot be sent to another machine; "
        "put the file where all machines can read it"
    )


def _incoming(code: int, data: memoryview) -> Any:
    if code == _TUPLE:
        return tuple(msgspec.msgpack.decode(data, ext_hook=_incoming))
    tensor = msgspec.msgpack.decode(data, type=_Tensor)
    dtype = _DTYPES[tensor.dtype]
    if not tensor.data:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(bytearray(tensor.data), dtype=dtype).view(tensor.shape)
