"""What the offices of a run's machines say to each other, and what a machine's workers say to their office only."""

from __future__ import annotations

import msgspec

from paceline.config import Timeouts


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """Where a machine's office is reached."""

    address: str
    control: int
    bulk: int


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first worker of a machine says to its office how to listen."""

    run: str
    machine: int
    address: str
    key: str | None


class Bound(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An office says where it listens."""

    control: int
    bulk: int


Span = tuple[int, int]
"""Where something begins and ends, in bytes."""


class Charter(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an office must know of a run."""

    run: str
    machine: int
    peers: list[Peer]
    ranks: list[list[int]]
    """By machine, its workers; the first machine is the home of the coordinator."""
    servers: list[int]
    """By server, its machine."""
    room: int
    """How many workers the run has room for."""
    timeouts: Timeouts
    coordinator: str
    """Its address, on its own machine."""
    folder: str | None
    buffer: int
    """Bytes of a version."""
    slot: int
    """Bytes of a worker's gradient, as it is pushed."""
    parameters: list[Span]
    """Where each parameter's gradient lies in that; none if it is compressed."""
    gradients: list[list[Span]]
    """By server, which parts of a worker's gradient it needs."""
    versions: list[list[Span]]
    """By server, which parts of a version it writes."""
    state: list[list[Span]]
    """By server, which parts of the optimizer's state it writes."""
    table: int
    """Bytes of a worker's hyperparameters in the table; flags of used parameters follow after all workers'."""
    flags: int
    """How many there are of those."""
    elastic: bool = False
    """Whether workers that were lost may come again."""


class _Letter(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    pass


# -- short things ----------------------------------------------------------------------------------------------------


class Say(_Letter, frozen=True, gc=False):
    """What a worker (or below 0, a server) says to the coordinator."""

    who: int
    data: bytes
    table: bytes | None = None
    """With a push, the worker's hyperparameters if they have changed."""
    used: bytes | None = None
    """With a push, which parameters have a gradient, if not all have."""


class Tell(_Letter, frozen=True, gc=False):
    """What the coordinator says to a worker or a server."""

    who: int
    data: bytes


class Gone(_Letter, frozen=True, gc=False):
    """The connection of a worker or server to this office has ended."""

    who: int


class Want(_Letter, frozen=True, gc=False):
    """Send me what your servers have written of this version; or of the optimizer's state, if the buffer is -1; or if
    it is -2, what the model has besides."""

    number: int
    buffer: int
    version: int


class Have(_Letter, frozen=True, gc=False):
    """All of a thing has come, and lies where it belongs."""

    what: str
    number: int
    turn: int


class Beat(_Letter, frozen=True, gc=False):
    """I live; at this time of my clock."""

    sent: float
    present: int = 0
    """From home: how many workers there are."""


class Beaten(_Letter, frozen=True, gc=False):
    """The answer, at this time of the other's clock."""

    sent: float
    at: float


class Lines(_Letter, frozen=True, gc=False):
    """More of a stream of events, for the run's folder."""

    name: str
    text: bytes


class Finished(_Letter, frozen=True, gc=False):
    """Nothing more comes from this machine."""


# -- bulk ------------------------------------------------------------------------------------------------------------


class Chunk(_Letter, frozen=True, gc=False):
    """A part of something large; its bytes follow."""

    what: str
    """`gradient`, `version`, `state`, or `loaded` and `placed`: a version and a state that a worker has changed; or
    `rest`: what the model has besides, and `shown`: as a worker shows it to one who joins."""
    number: int
    """Of the worker, or of who asked for it."""
    place: int
    """Where in that it belongs."""
    turn: int
    buffer: int = 0


class End(_Letter, frozen=True, gc=False):
    """That was all of it."""

    what: str
    number: int
    turn: int


Letter = Say | Tell | Gone | Want | Have | Beat | Beaten | Lines | Finished | Chunk | End
