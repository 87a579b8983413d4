"""What can be measured, and what comes back. Without torch: it is the workers that load it."""

from __future__ import annotations

import msgspec

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
