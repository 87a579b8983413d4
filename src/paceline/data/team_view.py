"""The team as its loaders see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class TeamView(Protocol):
    """The part of a team that a loader uses."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def lead(self) -> int:
        """The rank that draws the order of an epoch."""

    @property
    def replica(self) -> int:
        """The worker's replica of the model; workers of one replica get the same batches."""

    @property
    def replicas(self) -> int: ...

    @property
    def lockstep(self) -> bool:
        """True if every worker needs a batch in every round, if only one of weight 0."""

    @property
    def evaluates(self) -> bool:
        """True if the script evaluates the model now, instead of training it."""

    @property
    def steps(self) -> int:
        """Steps of the optimizer so far."""

    def ask_batch(self, loader: Any = None) -> None:
        """Notes that the script asks for its next batch, of this loader."""

    def passes_by(self, loader: Any) -> bool:
        """True if the epoch that the script begins is over: this worker has joined the others later."""

    def from_lead(self, payload: bytes, loader: int, *, evaluates: bool = False) -> bytes:
        """The lead's payload, on every worker, at the start of an epoch of this loader."""

    def from_all(self, payload: bytes, loader: int, *, evaluates: bool = False) -> list[bytes]:
        """All workers' payloads at the start of an epoch, by rank.

        loader: its number; evaluates: True if the epoch is only evaluated. Both must be the same on all workers.
        """

    def compare(self, payload: bytes, *, end: bool = False) -> list[bytes]:
        """All workers' payloads, by rank, in the middle of a stream or at its end."""

    def take_batch(self, samples: int, weight: float, loader: Measured, round_number: int) -> None:
        """Notes that a batch goes to the script now."""

    def finish_epoch(self) -> None:
        """Notes that this worker has no more batches in this epoch."""


class Measured(Protocol):
    """A loader whose batches may be split by the workers' paces."""

    def measure(self, paces: Sequence[tuple[float, int]], round_number: int) -> None:
        """Adds each worker's seconds and samples of a round."""
