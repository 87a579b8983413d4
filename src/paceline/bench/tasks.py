"""Tasks of `paceline bench`, and their results. Does not import torch, which only the workers load."""

from __future__ import annotations

import msgspec

from paceline import topologies

MODELS = {"small": 64, "mlp25m": 8, "convnet": 32, "transformer": 8}
"""Models, each with its default batch size per worker."""
OPTIMIZERS = ("sgd", "momentum", "adamw")
PRECISIONS = ("fp32", "bf16", "fp16")
PEERS = ("ddp", "alone", "alone-keeping", "single")
"""Contestants to compare a team with."""


class TrainTask(msgspec.Struct, frozen=True, kw_only=True):
    """Contestants that train the same model in turns."""

    model: str
    contestants: list[str]
    batch: int
    optimizer: str = "sgd"
    precision: str = "fp32"
    loader: bool = False
    """True if each step takes its batch from a shuffling DataLoader, else all steps have the same one."""
    rounds: int = 5
    seconds: float = 1.0
    """Approximate duration of a contestant's turn."""
    output: str = ""
    """Path for the times."""


TrainTimes = dict[str, list[float]]
"""Seconds per step of each contestant, one value per round."""


class MemoryTask(msgspec.Struct, frozen=True, kw_only=True):
    """One contestant whose use of memory is measured."""

    model: str
    contestant: str
    optimizer: str
    output: str = ""
    """Path for the result."""


class MemoryUse(msgspec.Struct):
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


class CollectiveTask(msgspec.Struct, frozen=True, kw_only=True):
    """Contestants that run the same collective in turns, at several sizes."""

    operation: str
    sizes: list[int]
    contestants: list[str]
    topology: str = "auto"
    rounds: int = 5
    seconds: float = 0.2
    """Approximate duration of a turn."""
    output: str = ""
    """Path for the times."""


CollectiveTimes = dict[str, dict[str, list[float]]]
"""Seconds per operation by contestant and size (as text), one value per round."""
