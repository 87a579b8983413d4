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
    """Who did it: a worker, or below 0 a server, -1 being the first."""
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


class Lost(_Event, frozen=True, gc=False):
    """A worker died."""


class Roster(_Event, frozen=True, gc=False):
    """Who takes part from here on: somebody has joined a run that goes on, or is gone."""

    workers: list[int]
    version: int
    """Of the parameters at that moment."""


class Load(_Event, frozen=True, gc=False):
    """A worker got its next batch: from when its script asked for it until it had it."""

    seconds: float


class Compute(_Event, frozen=True, gc=False):
    """A worker computed a gradient: from when it had its batch until the gradient was ready."""

    seconds: float
    version: int
    """Of the parameters that it computed with."""
    minibatches: int
    """How many; more than one when gradients are accumulated."""
    samples: int
    slowed: float = 0.0
    """Of `seconds`, how many at their end were slowness put on with --slow."""
    forward: float = 0.0
    """Of `seconds`, how many until the backward pass began."""
    core: float = 0.0
    """Seconds that it kept a core busy, loading included: fewer than it took where others needed the core, too."""


class Pass(_Event, frozen=True, gc=False):
    """A worker ran a microbatch through its part of a split model, forward or backward."""

    seconds: float
    kind: str
    """`F` forward, `B` backward, `W` the gradients of weights where they are made apart."""
    stage: int
    """Which part of the model."""
    chunk: int
    """Which of the worker's own parts that is."""
    microbatch: int
    size: int
    """Samples of the microbatch."""
    version: int
    """Of the parameters that it computed with."""

    @property
    def forward(self) -> float:
        """Of `seconds`, how many were a forward pass."""
        return self.seconds if self.kind == "F" else 0.0

    @property
    def samples(self) -> int:
        """That have got their gradient by this: all stages see the same ones, so they count at the first."""
        return self.size if self.kind == "B" and self.stage == 0 else 0

    @property
    def minibatches(self) -> int:
        """That the worker has made a gradient of."""
        return int(self.kind == "B" and self.chunk == 0 and self.microbatch == 0)


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
    pushes: list[int] = []
    """A server's: the tickets of the gradients that it used."""
    rate: float = 1.0
    """What the learning rate was multiplied with, because the gradients were stale."""


class Push(_Event, frozen=True, gc=False):
    """A worker's gradient came to the server, which decided what to do with it."""

    ticket: int
    version: int
    """That it was computed on."""
    staleness: int
    samples: int
    leases: list[int]
    bytes: int
    """That it took to push it; fewer than it has when it is compressed."""
    saved: int
    """How many more it would have taken without compression."""
    outcome: str
    """`used` at once, `held` for a later update, `dropped`, or `skipped` because it was not finite."""
    reason: str


class Send(_Event, frozen=True, gc=False):
    """A worker's gradient was sent to other machines: from its first bytes until all had come."""

    seconds: float
    bytes: int


class Refused(_Event, frozen=True, gc=False):
    """A machine's relay refused what came over the network, and changed nothing for it."""

    machine: int
    why: str
    count: int


class Brought(_Event, frozen=True, gc=False):
    """A worker's part of its replica's gradient is where the server will read it."""

    replica: int
    push: int
    """Which of the replica's pushes it is a part of, counted from 1."""
    version: int
    """That it was computed on."""
    parts: int
    """Of the model's parameters, how many are this worker's."""
    of: int
    """How many there are."""


class Pull(_Event, frozen=True, gc=False):
    """A worker pushed its gradient and got its next version, without having to wait for another worker."""

    seconds: float
    version: int


class Cancel(_Event, frozen=True, gc=False):
    """A worker left a step whose gradient could no longer be used."""

    seconds: float
    """That it had spent on it."""
    version: int
    """That it computed on."""
    leases: list[int]


class LeaseGiven(_Event, frozen=True, gc=False, tag="lease"):
    """A worker was given samples to train on."""

    number: int
    loader: int
    epoch: int
    first: int
    """Place of the first of them in the order of the epoch."""
    samples: int


class Return(_Event, frozen=True, gc=False):
    """A worker's samples go to somebody else: it was cancelled, its gradient dropped, or it is gone."""

    leases: list[int]
    why: str


class Seen(_Event, frozen=True, gc=False):
    """A worker has used samples without a gradient: to evaluate, say."""

    leases: list[int]


class Epoch(_Event, frozen=True, gc=False):
    """An epoch began, or was over for all."""

    loader: int
    epoch: int
    samples: int
    over: bool = False


class Balance(_Event, frozen=True, gc=False):
    """The split of the global batch was changed, from a round on."""

    round: int
    shares: list[int]


class Switch(_Event, frozen=True, gc=False):
    """A server that was to choose its policy itself has chosen."""

    version: int
    """The last one that was made under the policy before."""
    strategy: str
    reason: str


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
    values: dict[str, float | None]
    """None where it was not finite, which JSON cannot say."""


Event = (
    Join
    | Leave
    | Lost
    | Roster
    | Load
    | Compute
    | Pass
    | Wait
    | Reduce
    | Update
    | Push
    | Send
    | Refused
    | Brought
    | Pull
    | Cancel
    | LeaseGiven
    | Return
    | Seen
    | Epoch
    | Balance
    | Switch
    | Message
    | Metric
)

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
