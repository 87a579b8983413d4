"""What workers, the server and its shards say to each other. Gradients and parameters never travel here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from paceline.cluster.servers import Dismiss
from paceline.data.ledger import Lease

if TYPE_CHECKING:
    from paceline.transport.unix_connection import UnixConnection


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    pass


# -- at the start ----------------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True, gc=False):
    """Opens a worker's session."""

    rank: int
    pid: int
    spec: bool = False
    """True if the `RunSpec` follows in parts; the lead sends it, with the run's memory."""
    pids: list[int] = []
    """From the lead: the workers' processes on the coordinator's machine, by rank; 0 for the others."""
    host: str = ""
    """The address of the worker's machine, if that is not the coordinator's."""
    joins: bool = False
    """True if the worker joins a run that has begun."""


class SessionOpened(_Message, frozen=True, gc=False):
    """To one who joins: begin with this version. All memory comes with this message, and the plan follows in parts."""

    version: int
    buffer: int


class ShardHello(_Message, frozen=True, gc=False):
    """A process that holds a further shard has come."""

    index: int
    pid: int


class MessagePart(_Message, frozen=True, gc=False):
    """A part of something that is longer than a message."""

    data: bytes
    more: bool


_PIECE = 1 << 16


def send_parts(connection: UnixConnection[Any], data: bytes) -> None:
    """Send something that may be longer than a message."""
    for start in range(0, max(1, len(data)), _PIECE):
        connection.send(MessagePart(data[start : start + _PIECE], start + _PIECE < len(data)))


def receive_parts(connection: UnixConnection[Any], seconds: float) -> bytes | None:
    """What was sent so; None if something else came, or nothing in time."""
    data = bytearray()
    while isinstance(part := connection.receive_within(seconds), MessagePart):
        data += part.data
        if not part.more:
            return bytes(data)
    return None


class Ready(_Message, frozen=True, gc=False):
    """All are here: the training can begin, on version 0 in buffer 0."""


# -- from workers ----------------------------------------------------------------------------------------------------


class GradientReady(_Message, frozen=True, gc=False):
    """My backward pass has made the gradients of these parameters. To the relay only; needs no answer."""

    parameters: list[int]


class PushGradient(_Message, frozen=True, gc=False):
    """My gradient lies in my buffer."""

    version: int
    samples: int
    leases: list[int]
    hyperparameters: int
    """The number of their state."""
    complete: bool
    """Whether every parameter has a gradient; if not, the table says which have."""
    factor: float = 1.0
    """To multiply it with."""
    bytes: int = 0
    loss: float | None = None
    clip: tuple[float, float] | None = None
    """The limit, and which norm."""
    skip: bool = False
    """It is not finite, and must not be used."""
    want: int | None = None
    """The loader of which the next samples are wanted, too."""


class StepCancelled(_Message, frozen=True, gc=False):
    """I have left a step, as I was told."""

    leases: list[int]
    want: int | None = None


class BeginEpoch(_Message, frozen=True, gc=False):
    """I begin an epoch."""

    loader: int
    epoch: int
    renew: bool
    """I can take a new version: I am not in the middle of a gradient."""
    training: bool = True
    """I will train on it, and not only evaluate."""


class EpochOrder(_Message, frozen=True, gc=False):
    """The order of the epoch follows in parts, as I was told to draw it."""

    loader: int
    epoch: int
    sizes: list[int]
    """Of the minibatches, in turns; none if the order is one of whole batches."""
    drop_last: bool
    training: bool
    """Not only evaluating."""


class RequestLease(_Message, frozen=True, gc=False):
    """I need samples; or I could fetch some ahead."""

    loader: int
    epoch: int
    ahead: bool
    renew: bool
    """I begin a new gradient, so I can take a new version; if not, what I hold will be part of a later gradient."""


class LeaseDone(_Message, frozen=True, gc=False):
    """I have used these without a gradient. Needs no answer."""

    leases: list[int]


class EnterBarrier(_Message, frozen=True, gc=False):
    """I bring something that all shall know, in parts; what for is the number of an intent."""

    intent: int


class BuffersCopied(_Message, frozen=True, gc=False):
    """I have done as you said."""


class LeaveEpoch(_Message, frozen=True, gc=False):
    """I leave this epoch before its end. Needs no answer."""

    loader: int
    epoch: int


class Freeze(_Message, frozen=True, gc=False):
    """Change nothing until I say so."""

    renew: bool = True
    """I go on with the newest version then; if not, I only look at it."""


class Thaw(_Message, frozen=True, gc=False):
    """Go on; `reload` if the parameters and the state of the optimizer are others now. Needs no answer."""

    reload: bool


class ShareReduced(_Message, frozen=True, gc=False):
    """I have summed my part of the group's gradient."""


class LeaveTeam(_Message, frozen=True, gc=False):
    """I leave the team. Needs no answer."""


class MachineLost(_Message, frozen=True, gc=False):
    """From a relay: the machine of this worker is lost."""

    why: str


# -- to workers ------------------------------------------------------------------------------------------------------


class Proceed(_Message, frozen=True, gc=False):
    """Go on, with this version."""

    version: int
    buffer: int
    outcome: str = ""
    """Of a push: `used`, `held` or `dropped`."""
    on: int = -1
    """Whose push it was that let this worker go on, if it had to wait for another's."""
    lease: Lease | None = None


class CancelStep(_Message, frozen=True, gc=False):
    """To a relay: what its worker computes can no longer be used, if it is older than this version."""

    version: int


class DrawOrder(_Message, frozen=True, gc=False):
    """Let your sampler draw the order of the epoch, and tell me."""


class LeaseGranted(_Message, frozen=True, gc=False):
    """Samples for you; none for now, if you wanted to fetch ahead."""

    lease: Lease | None
    version: int
    buffer: int


class EpochOver(_Message, frozen=True, gc=False):
    """The epoch is over for all."""

    version: int
    buffer: int


class CopyBuffers(_Message, frozen=True, gc=False):
    """Somebody joins: write what your model has besides trained parameters where it can read them."""


class BarrierDone(_Message, frozen=True, gc=False):
    """What all have brought follows in parts, by rank."""


class ReduceShare(_Message, frozen=True, gc=False):
    """Sum your part of the gradients of your group."""

    ranks: list[int]
    weights: list[float]
    group: int


class Frozen(_Message, frozen=True, gc=False):
    version: int
    buffer: int


class RunFailed(_Message, frozen=True, gc=False):
    """The run can not go on."""

    kind: str
    message: str
    ranks: list[int]


# -- between the server and further shards ---------------------------------------------------------------------------


class GradientRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A gradient, as an update uses it."""

    buffer: int
    """Of which worker, or after those of which group."""
    weight: float
    base: int = -1
    """The buffer with the version that it was computed on, where a correction needs it."""
    used: bytes | None = None
    """Per parameter, whether it has a gradient; None if all have."""
    factor: float = 1.0
    """Of the weight, what undoes the scale of the loss."""


class ApplyUpdate(_Message, frozen=True, gc=False):
    """Write the next version of the shard. With a norm, only sum up the gradients, and answer with their norm."""

    sources: list[GradientRef]
    old: int
    new: int
    groups: list[dict[str, Any]] | None
    """Hyperparameters, if they have changed."""
    scale: float = 1.0
    norm: float | None = None


class AddGradient(_Message, frozen=True, gc=False):
    """Add a gradient to what the next update will use."""

    source: GradientRef
    old: int


class MeasureDistance(_Message, frozen=True, gc=False):
    """How far are these versions apart, squared?"""

    first: int
    second: int


class ReloadState(_Message, frozen=True, gc=False):
    """The optimizer's state was changed."""


class ShardAnswer(_Message, frozen=True, gc=False):
    value: float = 0.0


FromWorker = (
    Hello
    | ShardHello
    | MessagePart
    | GradientReady
    | PushGradient
    | StepCancelled
    | BeginEpoch
    | EpochOrder
    | RequestLease
    | LeaseDone
    | LeaveEpoch
    | EnterBarrier
    | BuffersCopied
    | Freeze
    | Thaw
    | ShareReduced
    | LeaveTeam
    | Dismiss
    | ShardAnswer
    | RunFailed
    | MachineLost
)
ToWorker = (
    Ready
    | SessionOpened
    | MessagePart
    | Proceed
    | CancelStep
    | DrawOrder
    | LeaseGranted
    | EpochOver
    | CopyBuffers
    | BarrierDone
    | ReduceShare
    | Frozen
    | RunFailed
)
ToShard = MessagePart | Ready | ApplyUpdate | AddGradient | MeasureDistance | ReloadState
