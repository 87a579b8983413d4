"""What the relays of a run's machines say to each other, and what a machine's workers say to their relay only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from paceline.config import RunSpec

if TYPE_CHECKING:
    from paceline.parameters.layout import Layout


class RelayAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a machine's relay is reached."""

    address: str
    control: int
    bulk: int


class RelayBind(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first worker of a machine says to its relay how to listen."""

    run: str
    machine: int
    address: str
    key: str | None


class RelayBound(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A relay says where it listens."""

    control: int
    bulk: int


Span = tuple[int, int]
"""Where something begins and ends, in bytes."""


class TransferLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Byte spans of what is sent between machines; computed by a worker, since a relay does not load torch."""

    version: int
    """Bytes of a version."""
    gradient: int
    """Bytes of a worker's gradient, as it is pushed."""
    parameters: list[Span]
    """Each parameter's span in a gradient; none if it is compressed."""
    gradients: list[list[Span]]
    """By server, the spans of a gradient that it reads."""
    versions: list[list[Span]]
    """By server, the spans of a version that it writes."""
    state: list[list[Span]]
    """By server, the spans of the optimizer's state that it writes."""

    @classmethod
    def of(cls, layout: Layout, compressed: int | None, state: list[list[Span]]) -> TransferLayout:
        """compressed: bytes of a compressed gradient; None if gradients are not compressed."""
        parameters: list[Span] = [(0, 0)] * len(layout.slots)
        shards: list[list[Span]] = [[] for _ in state]
        at = 0
        for flat in layout.flats:
            item = flat.dtype.itemsize
            for slot in flat.slots:
                start = at + slot.offset * item
                parameters[slot.index] = (start, start + slot.count * item)
            for spans, (start, stop) in zip(shards, flat.shards, strict=True):
                spans.append((at + start * item, at + stop * item))
            at += flat.size
        return cls(
            version=layout.size,
            gradient=layout.size if compressed is None else compressed,
            parameters=parameters if compressed is None else [],
            gradients=shards if compressed is None else [[(0, compressed)] for _ in state],
            versions=shards,
            state=state,
        )


class RelayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One relay's view of a run."""

    spec: RunSpec
    machine: int
    peers: list[RelayAddress]
    """By machine, the address of its relay."""
    coordinator: str
    """The coordinator's address, on its own machine."""
    layout: TransferLayout


class _RelayMessage(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    pass


# -- short things ----------------------------------------------------------------------------------------------------


class ToCoordinator(_RelayMessage, frozen=True, gc=False):
    """What a worker (or below 0, a server) says to the coordinator."""

    who: int
    data: bytes
    table: bytes | None = None
    """With a push, the worker's hyperparameters if they have changed."""
    used: bytes | None = None
    """With a push, which parameters have a gradient, if not all have."""


class ToMember(_RelayMessage, frozen=True, gc=False):
    """What the coordinator says to a worker or a server."""

    who: int
    data: bytes


class MemberGone(_RelayMessage, frozen=True, gc=False):
    """The connection of a worker or server to this relay has ended."""

    who: int


class Fetch(_RelayMessage, frozen=True, gc=False):
    """Send me what your servers have written of this version; or of the optimizer's state, if the buffer is -1; or if
    it is -2, what the model has besides."""

    number: int
    buffer: int
    version: int


class TransferDone(_RelayMessage, frozen=True, gc=False):
    """All of a thing has come, and lies where it belongs."""

    what: str
    number: int
    turn: int


class Ping(_RelayMessage, frozen=True, gc=False):
    """I live; at this time of my clock."""

    sent: float
    present: int = 0
    """From home: how many workers there are."""


class Pong(_RelayMessage, frozen=True, gc=False):
    """The answer, at this time of the other's clock."""

    sent: float
    at: float


class EventLines(_RelayMessage, frozen=True, gc=False):
    """More of a stream of events, for the run's folder."""

    name: str
    text: bytes


class RelayDone(_RelayMessage, frozen=True, gc=False):
    """Nothing more comes from this machine."""


# -- bulk ------------------------------------------------------------------------------------------------------------


class Chunk(_RelayMessage, frozen=True, gc=False):
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


class TransferEnd(_RelayMessage, frozen=True, gc=False):
    """That was all of it."""

    what: str
    number: int
    turn: int


RelayMessage = (
    ToCoordinator
    | ToMember
    | MemberGone
    | Fetch
    | TransferDone
    | Ping
    | Pong
    | EventLines
    | RelayDone
    | Chunk
    | TransferEnd
)
