"""Writes a checkpoint of which no machine has all tensors, one tensor after the other.

torch writes the file with room for the tensors, and then each is put into its room as soon as it was fetched: there is
never more than one of them in memory. The file is the one that `torch.save` makes of the whole.
"""

from __future__ import annotations

import secrets
import zipfile
from collections.abc import Mapping
from typing import IO, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from paceline.errors import TeamError
from paceline.parameters.absent_tensor import AbsentTensor
from paceline.team.checksum import KEY, checksum

_HEADER = 30
"""Bytes of the header of a record of a zip file, before its name."""


def save_streamed(content: Mapping[str, Any], file: IO[bytes]) -> None:
    """Writes a checkpoint with its checksum; file: empty, open for writing and reading."""
    rooms = _Rooms()
    told = f"sha256:{secrets.token_hex(32)}"  # until it is known, and as long
    with FakeTensorMode(allow_non_fake_inputs=True), skip_data(materialize_fake_tensors=True):
        torch.save({**{key: rooms.reserve(value) for key, value in content.items()}, KEY: told}, file.name)
    with zipfile.ZipFile(file) as archive:
        records = {record.filename.partition("/")[2]: record for record in archive.infolist()}
    places = {name: (_start(file, record.header_offset), record.file_size) for name, record in records.items()}
    known = {name for name in places if name.startswith("data/")}
    if known != {f"data/{number}" for number in range(len(rooms.leaves))}:
        raise TeamError("the checkpoint cannot be written in parts: torch has stored other tensors than it was given")

    def put(leaf: Any, value: torch.Tensor) -> None:
        start, size = places[f"data/{rooms.number(leaf)}"]
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        if data.numel() != size:
            raise TeamError(f"the checkpoint has room for {size} bytes of a tensor of {data.numel()}")
        file.seek(start)
        file.write(data.numpy().data)

    digest = checksum(content, on_tensor=put).encode()
    start, size = places["data.pkl"]
    file.seek(start)
    at = file.read(size).index(told.encode())
    file.seek(start + at)
    file.write(digest)


def _start(file: IO[bytes], header: int) -> int:
    """Where the data of a record begin."""
    file.seek(header)
    data = file.read(_HEADER)
    return header + _HEADER + int.from_bytes(data[26:28], "little") + int.from_bytes(data[28:30], "little")


class _Rooms:
    """The tensors of a checkpoint in the order in which torch stores them."""

    def __init__(self) -> None:
        self.leaves: dict[int, tuple[int, Any, torch.Tensor]] = {}
        """By its id, its number, itself, and a tensor without values."""

    def reserve(self, value: Any) -> Any:
        """The same value with tensors that have no values."""
        if isinstance(value, torch.Tensor | AbsentTensor):
            if id(value) not in self.leaves:
                room = torch.empty(list(value.shape), dtype=value.dtype)
                self.leaves[id(value)] = (len(self.leaves), value, room)
            return self.leaves[id(value)][2]
        if isinstance(value, dict):
            return {key: self.reserve(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([self.reserve(item) for item in value])
        return value

    def number(self, leaf: Any) -> int:
        return self.leaves[id(leaf)][0]
