"""Events: one typed record of each thing that happens. Reports, figures and test oracles are made from these only.

A record is one JSON object per line, its kind in `event`, times in seconds of the monotonic clock, which counts from
the machine's start and is the same in all its processes; `Join.wall` relates it to Unix time. Names here are stable:
scripts and exports rely on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from paceline.events.kernel import KernelCounts
from paceline.events.omitted import OmittedSums


class _Event(msgspec.Struct, frozen=True, array_like=False, tag_field="event", tag=str.lower, gc=False):
    rank: int
    """The worker, or below 0 the server, -1 being the first."""
    start: float
    """The time at which it began."""


class Join(_Event, frozen=True, gc=False):
    """A worker joined the team."""

    pid: int
    host: str
    device: str
    strategy: str
    wall: float
    """Unix time at `start`."""


class Leave(_Event, frozen=True, gc=False):
    """A worker left the team."""


class Lost(_Event, frozen=True, gc=False):
    """A worker died."""


class Roster(_Event, frozen=True, gc=False):
    """The members of a run changed: a worker has joined or is gone."""

    workers: list[int]
    version: int
    """Version of the parameters at that time."""


class Recovery(_Event, frozen=True, gc=False):
    """A server that was killed is back, where it was."""

    server: int
    """Its number."""
    version: int
    """Version of the parameters at that time."""


class Setup(_Event, frozen=True, gc=False):
    """The lead gave a model to the team."""

    model: str
    """The name of its class."""
    parameters: int
    """Numbers that are trained."""
    optimizer: str
    hyperparameters: dict[str, float | int | bool | str]
    """Of the optimizer's first group; those of others that differ have the group's number behind a slash."""
    batch: int | None
    """Samples of a step of all workers together; None without a loader."""
    world_size: int


class Stages(_Event, frozen=True, gc=False):
    """A model was cut into the stages of a pipeline."""

    operations: list[int]
    """Of each stage."""
    predicted: float
    """Seconds of a step, from its first pass to its last."""
    bytes: list[int]
    """Bytes of a step over the cut before each stage, in each direction."""
    memory: list[int]
    """Predicted bytes of each stage: parameters, gradients, an optimizer's two moments, and activations."""


class Load(_Event, frozen=True, gc=False):
    """A worker loaded its next batch: from the script's request until it had it."""

    seconds: float


class Compute(_Event, frozen=True, gc=False):
    """A worker computed a gradient: from the batch until the gradient was ready."""

    seconds: float
    version: int
    """Version of the parameters that it used."""
    minibatches: int
    """Minibatches in the gradient; more than one if gradients are accumulated."""
    samples: int
    slowed: float = 0.0
    """Seconds at the end that were slowness added with --slow."""
    forward: float = 0.0
    """Seconds until the backward pass began."""
    core: float = 0.0
    """Core seconds, loading included: fewer than it took if others needed the core, too."""
    kernel: KernelCounts | None = None
    """What the kernel counted since the worker was free for this step; None if that is counted in a later one."""


class Pass(_Event, frozen=True, gc=False):
    """A worker ran a microbatch through its part of a split model, forward or backward."""

    seconds: float
    kind: str
    """`F` forward, `B` backward, `W` the gradients of the weights if those are separate."""
    stage: int
    """The stage of the model."""
    chunk: int
    """Its number among the worker's own stages."""
    microbatch: int
    size: int
    """Samples of the microbatch."""
    version: int
    """Version of the parameters that it used."""

    @property
    def forward(self) -> float:
        """Seconds of a forward pass."""
        return self.seconds if self.kind == "F" else 0.0

    @property
    def samples(self) -> int:
        """Samples whose gradient this completes; counted at the first stage, since all stages see the same ones."""
        return self.size if self.kind == "B" and self.stage == 0 else 0

    @property
    def minibatches(self) -> int:
        """Minibatches whose gradient this completes."""
        return int(self.kind == "B" and self.chunk == 0 and self.microbatch == 0)


class Wait(_Event, frozen=True, gc=False):
    """A worker waited for another one: a bubble."""

    seconds: float
    on: int
    """The worker that was waited for: the last one to arrive."""


class Reduce(_Event, frozen=True, gc=False):
    """A worker reduced its shard of the gradient, or gathered the others' shards."""

    seconds: float
    bytes: int
    """Bytes read from other workers' memory."""


class Update(_Event, frozen=True, gc=False):
    """A worker summed its shard of the gradients and wrote its shard of the next version."""

    seconds: float
    version: int
    """The new version."""
    bytes: int = 0
    """Bytes read from other workers' memory."""
    workers: int = 1
    """Gradients in the mean."""
    skipped: bool = False
    """True if the gradients were not finite, so that the parameters stayed as they were."""
    pushes: list[int] = []
    """The tickets of the gradients that a server used."""
    rate: float = 1.0
    """The factor on the learning rate for the staleness of the gradients."""


class Push(_Event, frozen=True, gc=False):
    """A worker's gradient arrived at the server, and the policy decided on it."""

    ticket: int
    version: int
    """The version that it was computed on."""
    staleness: int
    samples: int
    leases: list[int]
    bytes: int
    """Bytes of the push, after compression."""
    saved: int
    """Bytes saved by compression."""
    outcome: str
    """`used` at once, `held` for a later update, `dropped`, or `skipped` because it was not finite."""
    reason: str


class Send(_Event, frozen=True, gc=False):
    """A worker's gradient was sent to other machines: from its first bytes until all had arrived."""

    seconds: float
    bytes: int


class StageTransfer(_Event, frozen=True, gc=False, tag="transfer"):
    """A value or gradient of a pipeline came from another machine: from its sending until all of it was there."""

    seconds: float
    source: int
    """The rank that sent it."""
    bytes: int


class Refused(_Event, frozen=True, gc=False):
    """A machine's relay rejected input from the network, without any effect."""

    machine: int
    why: str
    count: int


class Brought(_Event, frozen=True, gc=False):
    """A worker's part of its replica's gradient is ready for the server to read."""

    replica: int
    push: int
    """The number of the replica's push that it is part of, from 1."""
    version: int
    """The version that it was computed on."""
    parts: int
    """Parameters of the model that are this worker's."""
    of: int
    """All parameters of the model."""


class Pull(_Event, frozen=True, gc=False):
    """A worker pushed its gradient and pulled its next version, without waiting for another worker."""

    seconds: float
    version: int


class Cancel(_Event, frozen=True, gc=False):
    """A worker cancelled a step whose gradient could no longer be used."""

    seconds: float
    """Seconds spent on the step."""
    version: int
    """The version that it computed on."""
    leases: list[int]


class LeaseGiven(_Event, frozen=True, gc=False, tag="lease"):
    """A worker was leased samples to train on."""

    number: int
    loader: int
    epoch: int
    first: int
    """Index of the first sample in the order of the epoch; of a stream, in its source."""
    samples: int
    source: int = -1
    """Of a stream, the number of the iterator or shard that the samples are read from."""


class Ended(_Event, frozen=True, gc=False):
    """A worker found the end of a source of a stream."""

    loader: int
    epoch: int
    source: int
    samples: int
    """Samples of the source; leases beyond them were empty."""


class Return(_Event, frozen=True, gc=False):
    """A worker's samples go to another worker: it was cancelled, its gradient dropped, or it is gone."""

    leases: list[int]
    why: str


class Seen(_Event, frozen=True, gc=False):
    """A worker passed over samples: its script computed no gradient from them."""

    leases: list[int]


class Epoch(_Event, frozen=True, gc=False):
    """An epoch began, or ended for all."""

    loader: int
    epoch: int
    samples: int
    over: bool = False


class Balance(_Event, frozen=True, gc=False):
    """The split of the global batch changes from this round on."""

    round: int
    shares: list[int]


class Switch(_Event, frozen=True, gc=False):
    """The strategy `auto` has chosen a policy."""

    version: int
    """The last version under the previous policy."""
    strategy: str
    reason: str


class Message(_Event, frozen=True, gc=False):
    """A worker sent or received a message of a collective; recorded inside `collectives.observe()`."""

    seconds: float
    """Seconds; of a receive, including the wait."""
    operation: str
    topology: str
    direction: str
    """`send` or `receive`; in shared memory `read` or `write`."""
    peer: int
    bytes: int


class Peers(_Event, frozen=True, gc=False):
    """The workers of a channel: of a process group of torch.distributed, or of its messages in one direction."""

    channel: str
    ranks: list[int]


class Collective(_Event, frozen=True, gc=False):
    """A worker took part in an operation of a process group of torch.distributed, from its call until it was done.

    Recorded of scripts that join no team. A `Wait` and a `Reduce` follow from those of all workers.
    """

    seconds: float
    operation: str
    """As c10d calls it."""
    channel: str
    number: int
    """The number of the operation in its channel, the same at all workers."""
    bytes: int
    blocked: float
    """Seconds at its end in which the worker could only wait; in those before it computed."""


class Metric(_Event, frozen=True, gc=False):
    """Values that the script reported with `team.report`."""

    version: int
    values: dict[str, float | None]
    """None for a value that is not finite, which JSON cannot express."""


class Omitted(_Event, frozen=True, gc=False):
    """Events of one process that are not recorded, since the record has reached its limit: their sums."""

    seconds: float
    """Seconds from the start of the first to the end of the last."""
    events: int
    sums: dict[int, OmittedSums]
    """By the rank of the events."""
    updates: list[tuple[int, int, int]] = []
    """Successive versions with the same number of gradients in their updates: first, last, gradients."""
    updated: float = 0.0
    """Seconds from `start` until the end of the last of these updates."""
    late: int = 0
    """Samples of the gradients that were computed after it."""
    staleness: dict[int, int] = {}
    """Gradients that these updates used, of omitted pushes, by staleness at their use."""
    used: int = 0
    """Samples of those."""
    trained: list[tuple[int, int, int, int, int]] = []
    """Samples of those, or passed over: loader, epoch, source, index of the first and index after the last."""


Event = (
    Join
    | Leave
    | Lost
    | Roster
    | Recovery
    | Setup
    | Stages
    | Load
    | Compute
    | Pass
    | Wait
    | Reduce
    | Update
    | Push
    | Send
    | StageTransfer
    | Refused
    | Brought
    | Pull
    | Cancel
    | LeaseGiven
    | Ended
    | Return
    | Seen
    | Epoch
    | Balance
    | Switch
    | Message
    | Peers
    | Collective
    | Metric
    | Omitted
)

ACTIVITIES: dict[type, str] = {
    Compute: "computing",
    Pass: "computing",
    Load: "loading",
    Reduce: "communicating",
    Pull: "communicating",
    Update: "updating",
    Wait: "waiting",
    Cancel: "cancelled",
}
"""Events that last some time, each with the name of the activity in timelines and exports."""

OBSERVED = "torch.distributed"
"""In place of a strategy, where a script joins no team and its process groups are observed."""

_DECODER = msgspec.json.Decoder(Event)


def decode(line: bytes) -> Event:
    """The event of one line."""
    event: Event = _DECODER.decode(line)
    return event


def read(path: Path) -> Iterator[Event]:
    """The events of a file, in order, without an incomplete last line."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield _DECODER.decode(line)
