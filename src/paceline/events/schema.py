"""The schema of events: one JSON object a line, `event` says which kind, times are in seconds of the steady clock.

The steady clock counts from the machine's start and is the same in all its processes; `Join.wall` ties it to the
calendar. Names here are stable: scripts and exports rely on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec


class _Event(msgspec.Struct, frozen=True, array_like=False, tag_field="event", tag=str.lower, gc=False):
    rank: int
    """Who did it."""
    start: float
    """When it began."""


class Join(_Event, frozen=True, gc=False):
    """A worker came to the team."""

    pid: int
    host: str
    device: str
    strategy: str
    wall: float
    """Seconds since 1970 at `start`."""


class Leave(_Event, frozen=True, gc=False):
    """A worker left the team."""


class Compute(_Event, frozen=True, gc=False):
    """A worker computed a gradient: from when it had its batch until the gradient was ready."""

    seconds: float
    version: int
    """Of the parameters that it computed with."""
    minibatches: int
    """How many; more than one when gradients are accumulated."""
    samples: int
    slowed: float = 0.0
    """Of `seconds`, how many were slowness put on with --slow."""


class Wait(_Event, frozen=True, gc=False):
    """A worker idled until another one came: a bubble."""

    seconds: float
    on: int
    """For whom: the last one to come."""


class Reduce(_Event, frozen=True, gc=False):
    """A worker made its shard of the mean gradient, or gathered the others' shards."""

    seconds: float
    bytes: int
    """Read from other workers' memory."""


class Update(_Event, frozen=True, gc=False):
    """A worker summed its shard of the gradients and wrote its shard of the next version."""

    seconds: float
    version: int
    """The version that came of it."""
    bytes: int = 0
    """Read from other workers' memory."""
    workers: int = 1
    """How many gradients are in the mean."""
    skipped: bool = False
    """The gradients were not finite, so the parameters stayed as they were."""


class Balance(_Event, frozen=True, gc=False):
    """The split of the global batch was changed, from a round on."""

    round: int
    shares: list[int]


class Message(_Event, frozen=True, gc=False):
    """A worker sent a part of a collective to another, or received one; recorded inside `collectives.observe()`."""

    seconds: float
    """Of a receive, with the wait for it."""
    operation: str
    topology: str
    direction: str
    """`send` or `receive`; `read` or `write` of the other's memory, where nothing is sent."""
    peer: int
    bytes: int


class Metric(_Event, frozen=True, gc=False):
    """What the script reported with `team.report`."""

    version: int
    values: dict[str, float]


Event = Join | Leave | Compute | Wait | Reduce | Update | Balance | Message | Metric

_DECODER = msgspec.json.Decoder(Event)


def decode(line: bytes) -> Event:
    event: Event = _DECODER.decode(line)
    return event


def read(path: Path) -> Iterator[Event]:
    """The events of a file, in its order; a last line that was cut off by a kill is left out."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield _DECODER.decode(line)
