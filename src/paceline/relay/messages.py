"""Messages between the relays of a run's machines, and from a machine's first worker to its relay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from paceline.config import RunSpec

if TYPE_CHECKING:
    from paceline.parameters.layout import Layout


class RelayAddress(msgspec.Struct, frozen=True, array_like=True):
    """The address and ports of a machine's relay."""

    address: str
    control: int
    bulk: int


class RelayBind(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Tells a relay on which address to listen; sent by the first worker of its machine."""

    run: str
    machine: int
    address: str
    key: str | None
    door: int | None = None
    """The port at which machines ask to join; None if none may."""


class RelayBound(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The ports on which a relay listens; its answer."""

    control: int
    bulk: int
    trouble: str = ""
    """Why it does not listen; then the run cannot begin."""


Span = tuple[int, int]
"""Start and stop, in bytes."""


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
    kept: list[list[Span]]
    """By server, the spans of the copy for a snapshot that it writes."""

    @classmethod
    def of(
        cls, layout: Layout, compressed: int | None, state: list[list[Span]], kept: list[list[Span]]
    ) -> TransferLayout:
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
            kept=kept,
        )


class RelayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One relay's view of a run."""

    spec: RunSpec
    machine: int
    peers: list[RelayAddress]
    """By machine, the address of its relay; an empty one for a machine that has not joined yet."""
    coordinator: str
    """The coordinator's address, on its own machine."""
    layout: TransferLayout
    late: bool = False
    """True if this machine has joined a run that had begun."""


class _RelayMessage(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    pass


# -- on the control link ---------------------------------------------------------------------------------------------


class ToCoordinator(_RelayMessage, frozen=True, gc=False):
    """A message of a worker (or below 0, a server) to the coordinator."""

    who: int
    data: bytes
    table: bytes | None = None
    """With a push, the worker's hyperparameters if they have changed."""
    used: bytes | None = None
    """With a push, which parameters have a gradient, if not all have."""


class ToMember(_RelayMessage, frozen=True, gc=False):
    """A message of the coordinator to a worker or a server."""

    who: int
    data: bytes
    marked: int = 0
    """As `SharedFlags.marked`."""


class MemberGone(_RelayMessage, frozen=True, gc=False):
    """The connection of a worker or server to this relay has ended, or to the coordinator."""

    who: int
    left: bool = False
    """True if it has left on purpose."""


class Fetch(_RelayMessage, frozen=True, gc=False):
    """Requests the receiver's part of a version; of the optimizer's state if the buffer is -1; of the model's other
    tensors if it is -2; of the copy for a snapshot if it is -3."""

    number: int
    buffer: int
    version: int
    parameters: tuple[int, ...] | None = None
    """Of a version, the parameters that are needed; None for all."""


class TransferDone(_RelayMessage, frozen=True, gc=False):
    """A transfer has arrived completely."""

    what: str
    number: int
    turn: int


class Ping(_RelayMessage, frozen=True, gc=False):
    """A sign of life, at this time of the sender's clock."""

    sent: float
    present: int = 0
    """From the coordinator's machine: the number of workers."""


class Pong(_RelayMessage, frozen=True, gc=False):
    """The answer to a ping, at this time of its sender's clock."""

    sent: float
    at: float


class EventLines(_RelayMessage, frozen=True, gc=False):
    """New lines of an event stream, for the run's folder."""

    name: str
    text: bytes
    before: int
    """Lines of the stream before these."""


class MachineJoined(_RelayMessage, frozen=True, gc=False):
    """A machine has joined the run; from the coordinator's machine."""

    machine: int
    relay: RelayAddress


class RelayDone(_RelayMessage, frozen=True, gc=False):
    """The last message of a machine."""


# -- on the bulk link ------------------------------------------------------------------------------------------------


class Chunk(_RelayMessage, frozen=True, gc=False):
    """A chunk of a transfer; its bytes are the payload."""

    what: str
    """`gradient`, `version`, `state`; `kept`: the copy for a snapshot; `loaded` and `placed`: version and state that a
    worker has loaded; `rest`: the model's other tensors, and `shown`: these as a worker has written them for one that
    joins."""
    number: int
    """The worker's rank, or the number of the fetch; for a part of a replica's gradient, the run's capacity and the
    rank in the team of the worker whose part it is."""
    place: int
    """Its first byte in what is transferred."""
    turn: int
    buffer: int = 0


class TransferEnd(_RelayMessage, frozen=True, gc=False):
    """The end of a transfer."""

    what: str
    number: int
    turn: int


_ControlMessage = (
    ToCoordinator | ToMember | MemberGone | Fetch | TransferDone | Ping | Pong | EventLines | MachineJoined | RelayDone
)
RelayMessage = _ControlMessage | Chunk | TransferEnd
