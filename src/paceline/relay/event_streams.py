"""The events of a machine away from home: sent home as they are written, with their times by home's clock."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from paceline.events import folder_of

_START = re.compile(rb'"start":(-?[0-9.]+(?:e[-+]?[0-9]+)?)')
_PIECE = 1 << 17
_LEAVE = b'"event":"leave"'


class StreamOffsets(Protocol):
    """Who is where."""

    @property
    def folder(self) -> str | None:
        """Of the run."""

    @property
    def machine(self) -> int: ...

    @property
    def ranks(self) -> Sequence[Sequence[int]]:
        """On each machine."""

    @property
    def peers(self) -> Sequence[object]:
        """One for each machine."""


class EventStreams:
    """Of one machine, or at home of all."""

    def __init__(self, config: StreamOffsets, home: bool, only: Sequence[int] | None = None) -> None:
        """only: the ranks whose streams are sent from here; by default those of all of this machine."""
        self._home, self._only, self._me = home, only, config.machine
        self._folder = None
        if config.folder is not None:
            self._folder = folder_of(Path(config.folder), config.machine) / "streams"
        self._names: list[str] = []
        self._places: dict[str, int] = {}
        self._open = {str(rank) for rank in config.ranks[config.machine]}
        """Workers of this machine who have not written that they leave."""
        self._machine_of = {f"relay-{machine}": machine for machine in range(len(config.peers))}
        self._machine_of |= {str(rank): machine for machine, ranks in enumerate(config.ranks) for rank in ranks}
        if self._folder is None:
            return
        self._names = [name for name, machine in self._machine_of.items() if machine == config.machine]
        if only is not None:
            self._names = [str(rank) for rank in only]

    @property
    def complete(self) -> bool:
        """Whether all workers of this machine have written their last line."""
        return self._home or self._folder is None or not self._open

    def lost(self, rank: int) -> None:
        """This worker writes nothing more."""
        self._open.discard(str(rank))

    def move(self, rank: int, machine: int) -> None:
        """One who joins records on this machine from now on, whoever had its rank before."""
        name = str(rank)
        before = self._machine_of.get(name)
        self._machine_of[name] = machine
        if machine == self._me:
            self._open.add(name)
            if self._folder is not None and name not in self._names:
                self._names.append(name)
        elif before == self._me and name in self._names:
            self._names.remove(name)

    def more(self, ahead: float) -> Iterator[tuple[str, bytes]]:
        """Whole lines that were written since; `ahead` is added to their times."""
        if self._folder is None or self._home:
            return
        for name in self._names:
            path = self._folder / f"{name}.jsonl"
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._places.get(name, 0))
                while text := file.read(_PIECE):
                    whole = text[: text.rfind(b"\n") + 1]
                    if not whole:
                        break
                    self._places[name] = self._places.get(name, 0) + len(whole)
                    file.seek(self._places[name])
                    if _LEAVE in whole:
                        self._open.discard(name)
                    yield name, _START.sub(lambda match: b'"start":%.9f' % (float(match[1]) + ahead), whole)

    def take(self, machine: int, name: str, text: bytes) -> None:
        """At home: more of a stream of another machine."""
        if not self._home or self._machine_of.get(name) != machine:
            raise ValueError("events of another machine")
        if self._folder is not None:
            with (self._folder / f"{name}.jsonl").open("ab") as file:
                file.write(text)

    def remove(self) -> None:
        """What has been sent home need not stay here."""
        if self._folder is None or self._home:
            return
        if self._only is None:
            shutil.rmtree(self._folder.parent, ignore_errors=True)
            return
        for name in self._names:
            (self._folder / f"{name}.jsonl").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # of others, there still is something
            self._folder.rmdir()
            self._folder.parent.rmdir()
