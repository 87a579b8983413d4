"""Records the coordinator's events once, though it may have to do again what they are about."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from paceline.events import Event, Omitted, decode
from paceline.events.recorder import Recorder
from paceline.server.journal import Journal


class JournaledRecorder(Recorder):
    """Passes events on to a recorder, but for those that were written before the coordinator was killed."""

    STATE = ("count", "thinner")
    """Attributes that belong to the coordinator's state."""

    def __init__(self, inner: Recorder, journal: Journal, words: memoryview, written: int = 0) -> None:
        """words: in the run's record; written: events that are in the file already."""
        self._inner, self._journal, self._words = inner, journal, words
        self._skipped = written
        self.count = 0
        """Events so far, over all processes of this coordinator."""
        self.thinner = inner.thinner
        if journal.on:
            inner.on_flush = self._note

    def resume(self) -> None:
        """Goes on from the coordinator's state, which has its `STATE`."""
        self._inner.thinner = self.thinner
        if self.count < self._skipped:
            self.thinner.forget_sums()  # they were written after the state was noted

    def _note(self, size: int) -> None:
        place = 1 - self._words[0]
        self._words[1 + 2 * place], self._words[2 + 2 * place] = self.count, size
        self._words[0] = place

    @property
    def on(self) -> bool:
        return self._inner.on

    def add(self, event: Event) -> None:
        self.count += 1
        if self._journal.replaying:
            event = msgspec.structs.replace(event, start=self._journal.moment(event.start))
            if self.count <= self._skipped:
                if self.thinner.level:  # which has to know the events that later ones refer to
                    self.thinner.add(event)
                    self.thinner.forget_sums()
                return
        self._inner.add(event)

    def flush(self) -> None:
        self._inner.flush()

    def close(self) -> None:
        self._inner.close()


def events_written(folder: Path | None, rank: int, words: memoryview) -> int:
    """The events in the file of a process that was killed; cuts off one that it had not written to its end."""
    place = words[0]
    count, size = words[1 + 2 * place], words[2 + 2 * place]
    if folder is None:
        return count
    with contextlib.suppress(OSError), (folder / "streams" / f"{rank}.jsonl").open("r+b") as file:
        file.seek(size)
        rest = file.read()
        whole = rest.rfind(b"\n") + 1
        for event in map(decode, rest[:whole].splitlines()):
            count += event.events if isinstance(event, Omitted) else 1
        os.ftruncate(file.fileno(), size + whole)
    return count
