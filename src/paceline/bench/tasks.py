"""What can be measured, and what comes back. Without torch: it is the workers that load it."""

from __future__ import annotations

import msgspec

from paceline import topologies

MODELS = {"small": 64, "mlp25m": 8, "convnet": 32, "transformer": 8}
"""Each with the batch size, per worker, that it is usually measured at."""
OPTIMIZERS = ("sgd", "momentum", "adamw")
PRECISIONS = ("fp32", "bf16", "fp16")
PEERS = ("ddp", "alone", "alone-keeping", "single")
"""Who else trains, to be compared with."""


class Race(msgspec.Struct, frozen=True, kw_only=True):
    """Contestants who train the same thing in turns."""

    model: str
    contestants: list[str]
    batch: int
    optimizer: str = "sgd"
    precision: str = "fp32"
    rounds: int = 5
    seconds: float = 1.0
    """How long a contestant's turn lasts, about."""
    output: str = ""
    """Where to write the times."""


class Times(msgspec.Struct):
    """Seconds per step of each contestant, one value per round."""

    seconds: dict[str, list[float]]


class Weighing(msgspec.Struct, frozen=True, kw_only=True):
    """One contestant whose memory is looked at."""

    model: str
    contestant: str
    optimizer: str
    output: str = ""
    """Where to write the weight."""


class Weight(msgspec.Struct):
    """Bytes, summed over all workers."""

    parameters_and_state: int
    everything: int
    """Gradients and their buffers too."""


OPERATIONS = {
    "all_reduce": lambda workers: 2 * (workers - 1) / workers,
    "all_gather": lambda workers: (workers - 1) / workers,
    "reduce_scatter": lambda workers: (workers - 1) / workers,
    "all_to_all": lambda workers: (workers - 1) / workers,
    "broadcast": lambda workers: 1.0,
}
"""Collectives, each with the share of the bytes that must cross every member's link: bus over algorithm bandwidth."""
TOPOLOGIES = ("auto", "shared", *topologies.TOPOLOGIES)
RIVALS = ("gloo", "mpi", "none")


class Heat(msgspec.Struct, frozen=True, kw_only=True):
    """Contestants who do the same collective in turns, at several sizes."""

    operation: str
    sizes: list[int]
    contestants: list[str]
    topology: str = "auto"
    rounds: int = 5
    seconds: float = 0.2
    """How long a turn lasts, about."""
    output: str = ""
    """Where to write the times."""


class Laps(msgspec.Struct):
    """Seconds per operation by contestant and size (as text), one value per round."""

    seconds: dict[str, dict[str, list[float]]]
