"""Writes the events of several files by their start, in little memory."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from paceline.events.private import open_private, write_all

_Numbers = npt.NDArray[np.int64]
_AT_ONCE = 20_000
"""Events that are written at once."""
_APART = 32 << 20
"""Bytes in which the lines of those lie at most, to be read together."""


class Places:
    """Where the events of several files are, in 20 bytes each."""

    def __init__(self) -> None:
        self.starts, self.offsets, self.sizes = array("d"), array("q"), array("i")
        self.counts: list[int] = []
        """Events up to the end of each file."""

    def in_order(self) -> Iterator[tuple[_Numbers, _Numbers, _Numbers]]:
        """File, first and last offset of each event, by its start, some at a time."""
        if not self.starts:
            return
        offsets, sizes = np.frombuffer(self.offsets, np.int64), np.frombuffer(self.sizes, np.int32)
        order = np.argsort(np.frombuffer(self.starts, np.float64), kind="stable")
        for first in range(0, len(order), _AT_ONCE):
            part = order[first : first + _AT_ONCE]
            yield np.searchsorted(self.counts, part, side="right"), offsets[part], offsets[part] + sizes[part]


def write_ordered(target: Path, streams: list[Path], places: Places) -> None:
    """Writes the events of all streams by their start."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(path.open("rb", buffering=0)) for path in streams]
        out = stack.enter_context(open_private(target, "wb"))
        for part in places.in_order():
            write_all(out, b"".join(_lines(files, *part)))


def _lines(files: Sequence[IO[bytes]], numbers: _Numbers, offsets: _Numbers, ends: _Numbers) -> list[bytes]:
    """The lines of some events: of each file its number, first and last offset.

    The events of a file are nearly in order, so those of a short time lie together: one read per file gets them.
    """
    lines = [b""] * len(numbers)
    for number in np.unique(numbers).tolist():
        mine = np.flatnonzero(numbers == number)
        first, last = int(offsets[mine].min()), int(ends[mine].max())
        if last - first > _APART:  # the clock of an earlier start, say
            spans = zip(mine.tolist(), offsets[mine].tolist(), ends[mine].tolist(), strict=True)
            for place, begin, end in spans:
                lines[place] = os.pread(files[number].fileno(), end - begin, begin)
            continue
        data = os.pread(files[number].fileno(), last - first, first)
        begins, stops = (offsets[mine] - first).tolist(), (ends[mine] - first).tolist()
        for place, begin, end in zip(mine.tolist(), begins, stops, strict=True):
            lines[place] = data[begin:end]
    return lines
