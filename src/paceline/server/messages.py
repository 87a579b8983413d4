"""Messages between workers, the coordinator and the shards. Gradients and parameters are in shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

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
    """Admits a worker to a run that has begun. The memory comes with this message, the `RunSpec` follows in parts."""

    version: int
    buffer: int


class ShardHello(_Message, frozen=True, gc=False):
    """Opens the connection of a server other than the first."""

    index: int
    pid: int


class MessagePart(_Message, frozen=True, gc=False):
    """One part of a text that is longer than a message."""

    data: bytes
    more: bool


_PIECE = 1 << 16


class _Sender(Protocol):
    def send(self, message: msgspec.Struct) -> None: ...


def send_parts(connection: _Sender, data: bytes) -> None:
    """Sends a text that may be longer than a message."""
    for start in range(0, max(1, len(data)), _PIECE):
        connection.send(MessagePart(data[start : start + _PIECE], start + _PIECE < len(data)))


def receive_parts(connection: UnixConnection[Any], seconds: float) -> bytes | None:
    """Receives such a text; None if another message came, or none in time."""
    data = bytearray()
    while isinstance(part := connection.receive_within(seconds), MessagePart):
        data += part.data
        if not part.more:
            return bytes(data)
    return None


class Ready(_Message, frozen=True, gc=False):
    """The run begins, with version 0 in buffer 0."""


# -- from workers ----------------------------------------------------------------------------------------------------


class GradientReady(_Message, frozen=True, gc=False):
    """The backward pass has computed the gradients of these parameters. Only a relay needs to know; no reply."""

    parameters: list[int]


class PushGradient(_Message, frozen=True, gc=False):
    """A worker's gradient is in its buffer."""

    version: int
    samples: int
    leases: list[int]
    hyperparameters: int
    """The number of their state in the worker table."""
    complete: bool
    """True if every parameter has a gradient; if not, the worker table says which have."""
    factor: float = 1.0
    """To multiply the gradient by, which undoes the scale of the loss."""
    bytes: int = 0
    """Of the gradient as it was written."""
    loss: float | None = None
    clip: tuple[float, float] | None = None
    """The limit, and the order of the norm."""
    skip: bool = False
    """True if the gradient is not finite and must not be used."""
    next_loader: int | None = None
    """The loader from which the next lease is requested with the push."""
    kind: int = 0
    """How its loss follows from its items, as `LossWeight.kind`."""
    items: float = 0.0
    """The items that the loss is a mean over."""
    batch: int = -1
    """The loader's batch that its samples are a part of, counted over all epochs; -1 if that is not known."""


class StepCancelled(_Message, frozen=True, gc=False):
    """A worker has left a step that was cancelled."""

    leases: list[int]
    next_loader: int | None = None


class BeginEpoch(_Message, frozen=True, gc=False):
    """A worker begins an epoch."""

    loader: int
    epoch: int
    pull: bool
    """True if the worker can pull a new version: it is not in the middle of a gradient."""


class EpochOrder(_Message, frozen=True, gc=False):
    """The order of an epoch, as the server requested it, follows in parts."""

    loader: int
    epoch: int
    sizes: list[int]
    """Of the minibatches, in turns; none if the order is one of whole batches."""
    drop_last: bool


class RequestLease(_Message, frozen=True, gc=False):
    """A worker needs samples, or can prefetch some."""

    loader: int
    epoch: int
    ahead: bool
    """True to prefetch."""
    pull: bool
    """True if the worker begins a new gradient, and so can pull a new version."""


class LeaseDone(_Message, frozen=True, gc=False):
    """A worker has passed over the samples of these leases: they lead to no gradient. No reply."""

    leases: list[int]


class EnterBarrier(_Message, frozen=True, gc=False):
    """A worker enters a barrier; its payload follows in parts."""

    kind: int
    """Number of the `BarrierKind`."""


class BuffersCopied(_Message, frozen=True, gc=False):
    """A worker has copied its model's buffers, as requested."""


class LeaveEpoch(_Message, frozen=True, gc=False):
    """A worker leaves an epoch before its end. No reply."""

    loader: int
    epoch: int


class Freeze(_Message, frozen=True, gc=False):
    """Stops all updates until `Thaw`."""

    pull: bool = True
    """True if the worker goes on with the newest version; if not, it only reads it."""


class Thaw(_Message, frozen=True, gc=False):
    """Ends a `Freeze`. No reply."""

    reload: bool
    """True if the worker has changed the parameters and the optimizer's state."""


class ShareReduced(_Message, frozen=True, gc=False):
    """A worker has summed its part of its group's gradient."""


class LeaveTeam(_Message, frozen=True, gc=False):
    """A worker leaves the team. No reply."""


class MachineLost(_Message, frozen=True, gc=False):
    """From a relay: the machine of this worker is lost."""

    why: str


# -- to workers ------------------------------------------------------------------------------------------------------


class Proceed(_Message, frozen=True, gc=False):
    """A worker goes on, with this version."""

    version: int
    buffer: int
    outcome: str = ""
    """Of a push: `used`, `held` or `dropped`."""
    waited_for: int = -1
    """The rank whose push ended the wait of this worker; -1 if it did not wait for another."""
    lease: Lease | None = None


class CancelStep(_Message, frozen=True, gc=False):
    """To a relay: cancels its worker's step if that computes on a version older than this one."""

    version: int


class DrawOrder(_Message, frozen=True, gc=False):
    """The worker shall draw the order of the epoch, and send it."""


class LeaseGranted(_Message, frozen=True, gc=False):
    """A lease; None if there is nothing to prefetch now."""

    lease: Lease | None
    version: int
    buffer: int


class EpochOver(_Message, frozen=True, gc=False):
    """The epoch is over for all workers."""

    version: int
    buffer: int


class CopyBuffers(_Message, frozen=True, gc=False):
    """The worker shall copy its model's buffers to shared memory, for one that joins."""


class BarrierDone(_Message, frozen=True, gc=False):
    """All have entered the barrier; their payloads follow in parts, by rank."""


class ReduceShare(_Message, frozen=True, gc=False):
    """The worker shall sum its part of its group's gradients."""

    ranks: list[int]
    weights: list[float]
    group: int


class Frozen(_Message, frozen=True, gc=False):
    """Updates have stopped at this version."""

    version: int
    buffer: int


class RunFailed(_Message, frozen=True, gc=False):
    """The run has failed."""

    kind: str
    """Name of a class in `paceline.errors`."""
    message: str
    ranks: list[int]


# -- between the server and further shards ---------------------------------------------------------------------------


class GradientRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A gradient, as an update uses it."""

    buffer: int
    """Number of the worker's buffer, or after those, of the group's."""
    weight: float
    base: int = -1
    """The buffer of the version that it was computed on, where a correction needs it."""
    used: bytes | None = None
    """Per parameter, 1 if it has a gradient; None if all have."""
    factor: float = 1.0
    """The part of the weight that undoes the scale of the loss."""


class ApplyUpdate(_Message, frozen=True, gc=False):
    """Writes the next version of a shard. With a norm, only sums the gradients, and replies with its norm."""

    sources: list[GradientRef]
    old: int
    new: int
    groups: list[dict[str, Any]] | None
    """Hyperparameters, if they have changed."""
    scale: float = 1.0
    norm: float | None = None


class AddGradient(_Message, frozen=True, gc=False):
    """Adds a gradient to the sum that the next update uses."""

    source: GradientRef
    old: int


class MeasureDistance(_Message, frozen=True, gc=False):
    """Asks for the squared distance of two versions."""

    first: int
    second: int


class ReloadState(_Message, frozen=True, gc=False):
    """The optimizer's state was changed in shared memory."""


class ShardAnswer(_Message, frozen=True, gc=False):
    """A shard's reply to any of these."""

    value: float = 0.0


_Membership = Hello | ShardHello | EnterBarrier | BuffersCopied | LeaveTeam | Dismiss | RunFailed | MachineLost
_Samples = BeginEpoch | EpochOrder | RequestLease | LeaseDone | LeaveEpoch
_Gradients = GradientReady | PushGradient | StepCancelled | ShareReduced | Freeze | Thaw
FromWorker = MessagePart | _Membership | _Samples | _Gradients | ShardAnswer
WithVersion = SessionOpened | Proceed | LeaseGranted | EpochOver | Frozen
"""Messages that name the version that a worker goes on with."""
_Requests = CancelStep | DrawOrder | CopyBuffers | ReduceShare
ToWorker = MessagePart | WithVersion | _Requests | Ready | BarrierDone | RunFailed
ShardRequest = ApplyUpdate | AddGradient | MeasureDistance | ReloadState
ToShard = MessagePart | Ready | ShardRequest
