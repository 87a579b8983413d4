"""What a launcher hands to its workers."""

from __future__ import annotations

import os
from typing import ClassVar

import msgspec

from paceline.config.slowness import Slowness
from paceline.config.timeouts import Timeouts
from paceline.errors import UsageError


class Profiling(msgspec.Struct, frozen=True, kw_only=True):
    """That a script is to be run only until its model is known, and what each of its operations costs."""

    path: str
    """Where to write it."""
    microbatches: int
    norm: str = "batch"


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What `paceline run` tells each worker, in one environment variable."""

    VARIABLE: ClassVar[str] = "PACELINE_LAUNCH"

    strategy: str | None = None
    """The strategy asked for on the command line; it wins over the script's."""
    timeouts: Timeouts = Timeouts()
    slow: dict[int, Slowness] = {}
    seed: int = 0
    """Seeds the slowness that is drawn."""
    folder: str | None = None
    """Where the run leaves its events, checkpoints and summary."""
    name: str | None = None
    """Of the folder under `runs/`, where the workers make it themselves; it wins over the script's."""
    record: bool = True
    """Whether events are recorded."""
    control: int | None = None
    """Descriptor of the shared memory in which the workers meet."""
    starter: int | None = None
    """Descriptor of the socket at which the launcher is asked to start servers."""
    servers: str | None = None
    """Where the parameters are held: how many processes, or `lead`, or `all`."""
    corrections: list[str] = []
    compress: str | None = None
    key: str | None = None
    """The secret of this run, which whoever is not of its machines does not know."""
    elastic: bool = False
    """Whether the run goes on, under any strategy, when a worker is lost."""
    joins: str | None = None
    """This worker joins a run that goes on already: the address of its server, or of its machine's relay."""
    machine: int = 0
    """The number of the machine on which it joins."""
    profiling: Profiling | None = None

    def to_environment(self) -> dict[str, str]:
        return {self.VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def from_environment(cls) -> Launch:
        text = os.environ.get(cls.VARIABLE)
        return msgspec.json.decode(text, type=cls) if text else cls()


def capacity(workers: int) -> int:
    """How many workers a run has room for that begins with so many. Memory is taken when it is used, not before."""
    return max(2 * workers, workers + 4)


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where this process stands in its team, as torchrun says it in the environment."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> Place:
        def number(name: str, default: int) -> int:
            value = os.environ.get(name, str(default))
            if not value.isdecimal():
                raise UsageError(f"{name} is '{value}' in the environment; it must be a whole number")
            return int(value)

        world_size = number("WORLD_SIZE", 1)
        rank = number("RANK", 0)
        place = cls(
            rank=rank,
            local_rank=number("LOCAL_RANK", rank),
            world_size=world_size,
            local_world_size=number("LOCAL_WORLD_SIZE", world_size),
        )
        if not (world_size >= 1 and rank < world_size):
            raise UsageError(f"RANK is {rank} and WORLD_SIZE {world_size}; RANK must be below WORLD_SIZE")
        return place
