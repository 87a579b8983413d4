"""Messages between workers, the coordinator and the shards. Gradients and parameters are in shared memory.

One file, though a long one: it is the whole protocol of a parameter server.
"""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.cluster.servers import Dismiss
from paceline.data.epochs import EpochLeft
from paceline.data.ledger import Lease
from paceline.data.stream_epoch import StreamPlan

Left = dict[int, EpochLeft]
"""By loader, the samples of its epoch that are part of no version."""
Notes = dict[int, tuple[int, bytes]]
"""By rank, the number of a snapshot and what the worker adds to it."""


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
    again: bool = False
    """True if the server was killed before, and has been started again."""
    done: int = 0
    """The operations that it has done."""
    value: float = 0.0
    """The answer to the last of them."""


class Resume(_Message, frozen=True, gc=False):
    """Goes on with a worker's session on a new connection, since the server or a relay was killed."""

    rank: int
    pid: int
    received: int
    """Messages of the server that the worker has received; the server sends the others again."""
    attempt: int = 0
    """Counts the worker's attempts, so that no answer is taken for that to another."""


class Resumed(_Message, frozen=True, gc=False):
    """The answer to `Resume`."""

    received: int
    """Messages of the worker that the server has received; the worker sends the others again."""
    attempt: int = 0
    """As in `Resume`."""


class MessagePart(_Message, frozen=True, gc=False):
    """One part of a text that is longer than a message."""

    data: bytes
    more: bool


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
    loader: int = -1
    """The number of that loader."""
    part: float = 1.0
    """Its samples' share of that batch; 1 if that is not known."""
    optimizer: int = 0
    """The number of the optimizer whose step it is, if there are several."""
    way: int = 0
    """The digest of how its losses are computed."""
    averaged: bool = False
    """True if gradients were averaged by samples which the loss does not count alike."""
    undecided: bool = False
    """True if its losses were weighted as means, though they may be sums."""


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
    shards: int = 0
    """Of a stream, the digest of its list of shards."""


class EpochOrder(_Message, frozen=True, gc=False):
    """The order of an epoch, as the server requested it, follows in parts."""

    loader: int
    epoch: int
    sizes: list[int]
    """Of the minibatches, in turns; none if the order is one of whole batches."""
    drop_last: bool
    stream: StreamPlan | None = None
    """How a stream is given out, which has no order."""


class RequestLease(_Message, frozen=True, gc=False):
    """A worker needs samples, or can prefetch some."""

    loader: int
    epoch: int
    ahead: bool
    """True to prefetch."""
    pull: bool
    """True if the worker begins a new gradient, and so can pull a new version."""
    lane: int = 0
    """Of a stream, the process of the worker's loader that would read the samples."""
    most: int = 0
    """Of a stream, the samples that are needed at most; 0 for a whole minibatch."""


class BeginLease(_Message, frozen=True, gc=False):
    """A worker begins a minibatch that it has fetched ahead, if that is still its own, which the reply says."""

    number: int


class StreamRead(_Message, frozen=True, gc=False):
    """What a worker has found while it read a stream. No reply."""

    loader: int
    turn: int
    """How often the stream was begun before."""
    marks: list[tuple[int, int, int]]
    """Source, samples read and their digest, to be compared with other workers'."""
    ends: list[tuple[int, int]]
    """Sources that have ended, with their samples."""
    lost: int = 0
    """Samples that the worker has leased and cannot read any more, as they have gone by."""


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


class MarkVersion(_Message, frozen=True, gc=False):
    """The next version shall be marked for a snapshot, and copied by the update after it. No reply."""


class RequestLeft(_Message, frozen=True, gc=False):
    """Asks which samples were left of all epochs at the version that was marked last."""


class GatherKept(_Message, frozen=True, gc=False):
    """To a relay: fetches the copies that servers of other machines have made of the marked version. No reply."""

    number: int
    """Of the snapshot; it is in `SharedFlags.gathered` when all copies are here."""


class SnapshotNote(_Message, frozen=True, gc=False):
    """What a worker of another machine than the coordinator's adds to a snapshot. No reply."""

    number: int
    data: bytes


class ShareReduced(_Message, frozen=True, gc=False):
    """A worker has summed its part of its group's gradient."""


class LeaveTeam(_Message, frozen=True, gc=False):
    """A worker leaves the team. No reply."""


class WorkerGone(_Message, frozen=True, gc=False):
    """From a relay: this worker has died, or has left. The mere end of a connection to a relay says nothing of it."""

    rank: int
    left: bool


class MachineLost(_Message, frozen=True, gc=False):
    """From a relay: the machine of this worker is lost."""

    why: str
    servers: bool = False
    """True if servers are lost with it."""


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
    note: bytes = b""
    """At the start of an epoch of a stream, what the worker that began it lets the others know."""
    recalled: list[int] = []
    """Leases that the worker had fetched ahead, and that others have got."""


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
    recalled: list[int] = []
    """As in `Proceed`."""


class EpochOver(_Message, frozen=True, gc=False):
    """The epoch is over for all workers."""

    version: int
    buffer: int
    turn: int = 0
    """Of a stream: how often it was begun before."""
    lengths: list[tuple[int, int]] = []
    """Of a stream, the sources that every worker reads and that have ended, with their samples."""


class CopyBuffers(_Message, frozen=True, gc=False):
    """The worker shall copy its model's buffers to shared memory, for one that joins."""


class BarrierDone(_Message, frozen=True, gc=False):
    """All have entered the barrier; their payloads follow in parts, by rank."""


class EpochsLeft(_Message, frozen=True, gc=False):
    """What was left of each loader's epoch, and the notes of workers, follow in parts."""


class ReduceShare(_Message, frozen=True, gc=False):
    """The worker shall sum its part of its group's gradients."""

    ranks: list[int]
    weights: list[float]
    group: int


class Frozen(_Message, frozen=True, gc=False):
    """Updates have stopped at this version."""

    version: int
    buffer: int


class KeepWaiting(_Message, frozen=True, gc=False):
    """The worker shall go on waiting for its reply: those that it waits for have more time."""


class EndWorker(_Message, frozen=True, gc=False):
    """The relay of a worker's machine shall end it: it was silent for too long."""


class Notice(_Message, frozen=True, gc=False):
    """The lead shall print this line about the training script."""

    text: str


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
    optimizer: int = -1
    """Of several optimizers, the number of the one whose parameters are updated."""
    keep: bool = False
    """True if the old version and the optimizer's state are copied for a snapshot, before they are overwritten."""


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


_Ends = LeaveTeam | Dismiss | RunFailed | WorkerGone | MachineLost
_Membership = Hello | Resume | ShardHello | EnterBarrier | BuffersCopied | _Ends
_Samples = BeginLease | BeginEpoch | EpochOrder | RequestLease | StreamRead | LeaseDone | LeaveEpoch
_Gradients = GradientReady | PushGradient | StepCancelled | ShareReduced | Freeze | Thaw
_Snapshots = MarkVersion | RequestLeft | GatherKept | SnapshotNote
FromWorker = MessagePart | _Membership | _Samples | _Gradients | _Snapshots | ShardAnswer
WithVersion = SessionOpened | Proceed | LeaseGranted | EpochOver | Frozen
"""Messages that name the version that a worker goes on with."""
_Requests = CancelStep | DrawOrder | CopyBuffers | ReduceShare
_Notes = EpochsLeft | Notice | RunFailed | KeepWaiting | EndWorker
UNCOUNTED = (Ready, Resumed, RunFailed, KeepWaiting, EndWorker, CancelStep)
"""Messages to a worker that do not count as received: they are not sent again. A worker that a `CancelStep` does not
reach pushes a gradient that is dropped."""
TO_RELAY = (GradientReady, GatherKept)
"""Messages of a worker that its relay keeps to itself."""
CALLS = (PushGradient, StepCancelled, BeginEpoch, RequestLease, BeginLease, EnterBarrier, Freeze, RequestLeft)
"""Messages after which a worker waits for a reply: a further one shows that it has received that of the one before."""
ToWorker = MessagePart | WithVersion | _Requests | Ready | Resumed | BarrierDone | _Notes
ShardRequest = ApplyUpdate | AddGradient | MeasureDistance | ReloadState
ToShard = MessagePart | Ready | ShardRequest
