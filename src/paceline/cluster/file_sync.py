"""Files of a run's folder: sends them from a node to the driver. Plain Python, for the same reason as `ray_agent`."""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
from typing import Any

_LOOK = 0.4
"""Seconds between two searches for new files."""


class FileSync:
    """Finds the file contents that the driver does not have yet. Streams grow; other files are complete once named."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._sent: dict[str, int] = {}
        """By path: of a stream, the number of bytes; of another file, its time of modification."""
        self._open: tuple[str, Any, int] | None = None
        """Name and file of the file that is being sent, and the number of bytes sent so far."""
        self._next = 0.0

    def mark_sent(self, path: str) -> None:
        """Record that the driver has this file, because it came from there."""
        self._sent[path] = (self._folder / path).stat().st_mtime_ns

    def updates(self, most: int, at_once: bool = False) -> list[tuple[Any, ...]]:
        """The next file contents, of up to `most` bytes: ("grown", name, offset, data) or ("file", …, last)."""
        if not at_once and self._open is None and time.monotonic() < self._next:
            return []
        self._next = time.monotonic() + _LOOK
        updates: list[tuple[Any, ...]] = []
        for path in sorted((self._folder / "streams").glob("*.jsonl")):
            name = f"streams/{path.name}"
            sent = self._sent.get(name, 0)
            data = b""
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                file.seek(sent)
                data = file.read(most)
            if data:
                updates.append(("grown", name, sent, data))
                self._sent[name] = sent + len(data)
                most -= len(data)
        while most > 0 and (part := self._part(most)) is not None:
            updates.append(part)
            most -= len(part[3])
        return updates

    def _part(self, most: int) -> tuple[Any, ...] | None:
        if self._open is None:
            self._open = self._new_file()
        if self._open is None:
            return None
        name, file, start = self._open
        data = file.read(most)
        last = file.tell() == os.fstat(file.fileno()).st_size
        self._open = None if last else (name, file, start + len(data))
        if last:
            file.close()
        return ("file", name, start, data, last)

    def _new_file(self) -> tuple[str, Any, int] | None:
        for inside in self._files():
            try:
                file = (self._folder / inside).open("rb")
            except FileNotFoundError:
                continue
            written = os.fstat(file.fileno()).st_mtime_ns
            if self._sent.get(str(inside)) != written:
                self._sent[str(inside)] = written
                return str(inside), file, 0
            file.close()
        return None

    def _files(self) -> list[pathlib.Path]:
        """Paths of the run's files except streams. Any may have been removed when it is opened: workers write there."""
        found = []
        for folder, inner, names in os.walk(self._folder):
            inside = pathlib.Path(folder).relative_to(self._folder)
            unwanted = ("streams", "exit_reports") if inside == pathlib.Path() else ()
            inner[:] = [name for name in inner if not name.startswith(".") and name not in unwanted]
            found += [inside / name for name in names if not name.startswith(".")]
        return sorted(path for path in found if (self._folder / path).is_file())

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()


def newest_snapshot(folder: pathlib.Path) -> pathlib.Path | None:
    """The newest snapshot of a run, by its version."""
    return max((folder / "snapshots").glob("[0-9]*.pt"), key=lambda path: path.name, default=None)


def newest_checkpoint(folder: pathlib.Path) -> pathlib.Path | None:
    """The checkpoint of a run that was written last."""
    found = list((folder / "checkpoints").glob("*.pt"))
    return max(found, key=lambda path: (path.stat().st_mtime_ns, path.name)) if found else None
