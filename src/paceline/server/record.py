"""The record of a run in shared memory, from which a server that is started again goes on where it was killed.

It holds a few words about the run, its spec, the coordinator's journal, and for every shard how far it is, with the
gradients that it has collected. The processes that map it, or hold its descriptor, keep it while the server is gone.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from paceline.cluster.run_state import RunState
from paceline.parameters.layout import Layout
from paceline.parameters.progress import ProgressLog
from paceline.transport import Memory

_HEAD = 4096
_SPEC = 8 << 20
"""Bytes for the run's spec, at most."""
_JOURNAL = 64 << 20
"""Bytes for each half of the journal, at most; the system provides them when they are written."""
_NOTES = 1 << 18
"""Bytes for each of a shard's two notes, at most."""
_SPEC_SIZE, _UNDO = 3, 4
"""Places of the words after those of `RunState`."""


class ShardNote(msgspec.Struct, array_like=True):
    """What a shard must know beside its memory, after an operation."""

    groups: list[dict[str, Any]] | None = None
    """Hyperparameters; None as long as they are those of the spec."""
    has_sum: bool = False
    used_sum: bytes | None = None
    value: float = 0.0
    """The answer to the operation."""


class ShardRecord:
    """How far one shard is: the operations that are done, and its notes."""

    def __init__(self, memory: Memory, start: int, undo: int) -> None:
        self._words = memory.bytes(start, 64).cast("q")
        self._notes = [memory.bytes(start + 64 + number * _NOTES, _NOTES) for number in range(2)]
        self.log = ProgressLog(memory, start + 64 + 2 * _NOTES, undo)
        self._written = self.read()

    @staticmethod
    def memory_size(undo: int) -> int:
        return 64 + 2 * _NOTES + undo

    @property
    def done(self) -> int:
        """Operations that are done."""
        return self._words[0] >> 1

    def finish(self, note: ShardNote) -> None:
        """One more operation is done, after which this is the note."""
        done, place = self._words[0] >> 1, self._words[0] & 1
        if note != self._written:
            place = 1 - place
            text = msgspec.msgpack.encode(note)
            if len(text) + 8 > _NOTES:
                self.incomplete = True
            else:
                self._notes[place][:8] = len(text).to_bytes(8, "little")
                self._notes[place][8 : 8 + len(text)] = text
            self._written = note
        self._words[0] = (done + 1) << 1 | place

    def read(self) -> ShardNote:
        """The note after the last operation."""
        note = self._notes[self._words[0] & 1]
        length = int.from_bytes(note[:8], "little")
        return msgspec.msgpack.decode(bytes(note[8 : 8 + length]), type=ShardNote) if length else ShardNote()

    @property
    def incomplete(self) -> bool:
        """True if the shard has state that is not in shared memory."""
        return self._words[1] == 1

    @incomplete.setter
    def incomplete(self, value: bool) -> None:
        self._words[1] = int(value)


class ServerRecord:
    """The whole record."""

    def __init__(self, memory: Memory, layout: Layout, servers: int) -> None:
        self.state = RunState(memory)
        self._words = memory.bytes(0, 64).cast("q")
        self._spec = memory.bytes(_HEAD, _SPEC)
        at = _HEAD + _SPEC
        self.halves = [memory.bytes(at + number * _JOURNAL, _JOURNAL) for number in range(2)]
        self.head = memory.bytes(64, 64).cast("q")
        """Words of the journal."""
        self.events = memory.bytes(128, 64).cast("q")
        """Words of the recorder."""
        at += 2 * _JOURNAL
        undo = self._words[_UNDO]
        each = ShardRecord.memory_size(undo)
        self.shards = [ShardRecord(memory, at + index * each, undo) for index in range(servers)]
        at += servers * each
        self.sum: list[torch.Tensor] = []
        """The gradients that the shards have collected, a flat tensor per dtype."""
        for flat in layout.flats:
            self.sum.append(memory.tensor(at, flat.count, flat.dtype))
            at += -(-flat.size // 64) * 64

    @staticmethod
    def lay_out(memory: Memory, layout: Layout, largest: int) -> None:
        """Notes what it must have room for, before it is used: parts of updates that overwrite so many bytes."""
        memory.bytes(0, 64).cast("q")[_UNDO] = _undo(largest, layout)

    @staticmethod
    def memory_size(layout: Layout, servers: int, largest: int) -> int:
        each = ShardRecord.memory_size(_undo(largest, layout))
        flats = sum(-(-flat.size // 64) * 64 for flat in layout.flats)
        return _HEAD + _SPEC + 2 * _JOURNAL + servers * each + flats

    def write_spec(self, text: bytes) -> bool:
        """Notes the run's spec; False if it is too long."""
        if len(text) > _SPEC:
            return False
        self._spec[: len(text)] = text
        self._words[_SPEC_SIZE] = len(text)
        return True


def read_spec(memory: Memory) -> bytes:
    """The run's spec, encoded; empty if the run has not begun."""
    size = memory.bytes(0, 64).cast("q")[_SPEC_SIZE]
    return bytes(memory.bytes(_HEAD, size))


def _undo(largest: int, layout: Layout) -> int:
    """Bytes of a shard's log: also for the parts of a collected sum, which may be whole parameters."""
    parameters = [slot.count * flat.dtype.itemsize for flat in layout.flats for slot in flat.slots]
    return ProgressLog.memory_size(max([largest, *parameters]))
