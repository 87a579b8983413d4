"""Forwards the event streams of a machine to the run's folder on rank 0's machine, line by line.

Every process records on its own machine. A `StreamForwarder` reads the lines that were added since the last look,
shifts their times to the clock of rank 0's machine, and there appends them to the same stream. How the lines travel is
the caller's: parameter servers send them through the relays, all-reduce teams on the barrier's connections.

Ray's agents do not use it: their code is sent to the nodes by value, imports nothing of ours, and copies whole files
of any kind (`cluster.file_sync`); the driver's machine and a node share no clock there.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.events.private import open_private, unrecorded, write_all
from paceline.events.recorder import folder_of

FIRST_MACHINE = 0
"""The number of rank 0's machine, where the run's folder is at first."""
_START = re.compile(rb'"start":(-?[0-9.]+(?:e[-+]?[0-9]+)?)')
_PIECE = 1 << 17
"""Bytes of a stream that are read, and sent, at once."""
_LEAVE = b'"event":"leave"'


def _whole_lines(path: Path) -> int:
    """The lines of a file; cuts off one that was not written to its end."""
    with contextlib.suppress(OSError), path.open("r+b") as file:
        text = file.read()
        os.ftruncate(file.fileno(), text.rfind(b"\n") + 1)
        return text.count(b"\n")
    return 0


def shifted(lines: bytes, seconds: float) -> bytes:
    """The same events, so many seconds later."""
    return _START.sub(lambda match: b'"start":%.9f' % (float(match[1]) + seconds), lines)


class StreamForwarder:
    """One machine's end of the forwarding: the sender, or on rank 0's machine the receiver."""

    def __init__(
        self, folder: str | None, machine: int, machines: Sequence[Sequence[int]], only: Sequence[int] | None = None
    ) -> None:
        """folder: of the run, None if nothing is recorded. machines: the ranks on each of them.

        only: the ranks whose streams are sent from here; by default those of all processes of this machine.
        """
        self._machine, self._only = machine, only
        self._folder = None if folder is None else folder_of(Path(folder), machine) / "streams"
        self._full = False
        """True if a line could not be written."""
        self._offsets: dict[str, int] = {}
        """By stream, the bytes that were sent."""
        self._sent: dict[str, int] = {}
        """By stream, the lines that were sent."""
        self._appended: dict[str, int] = {}
        """By stream, the lines of its machine that are in the run's folder."""
        self.bases: dict[str, int] = {}
        """By stream whose worker was on another machine before: how much further its lines are there than here."""
        self.left: dict[str, int] = {}
        """By machine and stream, the lines that came before its worker was on another machine."""
        self._home = FIRST_MACHINE
        """The machine where the run's folder is."""
        self._open = {str(rank) for rank in machines[machine]}
        """Workers of this machine that have not recorded that they leave."""
        self._machine_of = {f"relay-{index}": index for index in range(len(machines))}
        self._machine_of |= {str(rank): index for index, ranks in enumerate(machines) for rank in ranks}
        self._names: list[str] = []
        """Streams that are sent from here."""
        if only is not None:
            self._names = [str(rank) for rank in only]
        elif self._folder is not None:
            self._names = [name for name, index in self._machine_of.items() if index == machine]

    @property
    def _sends(self) -> bool:
        return self._folder is not None and self._machine != self._home

    def move(self, home: int) -> None:
        """The run's folder is on another machine from now on, to which all streams are sent from their beginning."""
        self._home = home
        self.send_again()

    def send_again(self) -> None:
        """Sends all streams from their beginning, as lines may be lost; the receiver skips those that it has."""
        self._offsets, self._sent = {}, {}

    @property
    def complete(self) -> bool:
        """True if all workers of this machine have written their last line."""
        return not self._sends or not self._open

    def worker_lost(self, rank: int) -> None:
        """Expects no more lines from this worker."""
        self._open.discard(str(rank))

    def assign(self, rank: int, machine: int) -> None:
        """Expects a worker that joins to record on this machine, wherever its rank was before."""
        name = str(rank)
        before = self._machine_of.get(name)
        if self._machine == self._home and before not in (None, machine):
            self.left[f"{before} {name}"] = self._have(name)
            started = self.left.get(f"{machine} {name}", 0)
            self.bases[name] = self.bases.get(name, 0) + self._have(name) - started
            self._appended[name] = started
        self.place(rank, machine)

    def place(self, rank: int, machine: int) -> None:
        """A worker records on this machine."""
        name = str(rank)
        before = self._machine_of.get(name)
        self._machine_of[name] = machine
        if machine == self._machine:
            self._open.add(name)
            if self._folder is not None and name not in self._names:
                self._names.append(name)
        elif before == self._machine and name in self._names:
            self._names.remove(name)

    def new_lines(self, ahead: float) -> Iterator[tuple[str, bytes, int]]:
        """Whole lines added since the last call, by stream, and how many there were before them.

        ahead: seconds that are added to their times.
        """
        if self._folder is None or not self._sends:
            return
        for name in self._names:
            path = self._folder / f"{name}.jsonl"
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._offsets.get(name, 0))
                while text := file.read(_PIECE):
                    whole = text[: text.rfind(b"\n") + 1]
                    if not whole:
                        break
                    self._offsets[name] = self._offsets.get(name, 0) + len(whole)
                    file.seek(self._offsets[name])
                    if _LEAVE in whole:
                        self._open.discard(name)
                    before = self._sent.get(name, 0)
                    self._sent[name] = before + whole.count(b"\n")
                    yield name, shifted(whole, ahead), before

    def append(self, machine: int, name: str, text: bytes, *, again: bool = False, before: int | None = None) -> None:
        """Appends lines from another machine to their stream; ValueError if they are not that machine's.

        again: they are the first ones, and replace those that have come before; before: how many lines the stream has
        before them, of which those that are here already are skipped.
        """
        if self._machine != self._home or self._machine_of.get(name) != machine:
            raise ValueError("events of another machine")
        if before is not None:
            text = self._unseen(name, text, before)
        if self._folder is not None and not self._full:
            try:
                with open_private(self._folder / f"{name}.jsonl", "wb" if again else "ab") as file:
                    write_all(file, text)
            except OSError as error:
                self._full = True
                print(f"paceline: {unrecorded(self._folder.parent, error)}", file=sys.stderr, flush=True)

    def _unseen(self, name: str, text: bytes, before: int) -> bytes:
        """The lines that are not here yet."""
        have, lines = self._have(name), text.splitlines(keepends=True)
        if before > have:
            raise ValueError("lines after others that have not come")
        self._appended[name] = max(have, before + len(lines))
        return b"".join(lines[have - before :])

    def _have(self, name: str) -> int:
        """The lines of a stream's machine that are in the run's folder."""
        if name not in self._appended or self._machine_of[name] == self._machine:
            here = 0 if self._folder is None else _whole_lines(self._folder / f"{name}.jsonl")
            self._appended[name] = here - self.bases.get(name, 0)
        return self._appended[name]

    def remove(self) -> None:
        """Removes from this machine the streams that have been sent."""
        if self._folder is None or not self._sends:
            return
        if self._only is None:
            shutil.rmtree(self._folder.parent, ignore_errors=True)
            return
        for name in self._names:
            (self._folder / f"{name}.jsonl").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other workers' streams are still there
            self._folder.rmdir()
            self._folder.parent.rmdir()
