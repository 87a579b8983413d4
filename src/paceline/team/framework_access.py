"""The team's methods for adapters of frameworks, which a training script does not need."""

from __future__ import annotations

from typing import Any

from paceline.errors import UsageError
from paceline.team.team import Team
from paceline.team.training import Training


class FrameworkAccess:
    """What the adapter of a framework that owns the loop does with a team, beyond its public methods."""

    def __init__(self, team: Team) -> None:
        self._team = team

    @property
    def _training(self) -> Training:
        return self._team._training  # another one after a setup that begins anew

    def leave_snapshots_out(self, framework: str) -> None:
        """The framework counts epochs and batches itself: only its own checkpoints know where it is."""
        if self._team._worker.launch.resume is not None:
            raise UsageError(f"--resume cannot tell {framework} where it was; use {framework}'s own checkpoints")
        self._training.snapshots.turn_off()

    def say(self, message: str) -> None:
        """Prints a line of Paceline's on stderr, on the lead only."""
        self._training.say(message)

    def exchange(self, payload: bytes) -> list[bytes]:
        """All workers' bytes, by rank, on every worker; empty for a worker that was lost. All must call it."""
        return self._training.gather(payload)

    @property
    def part(self) -> float:
        """This worker's share of the samples of the current step, where batches are divided."""
        trainer = self._training.trainer
        own = None if trainer is None else trainer.part
        return self._training.loaders.part if own is None else own

    def refresh(self) -> None:
        """Takes the newest version of the parameters, where a server has it; elsewhere there is no other."""
        with self._training.current().frozen():
            pass

    def restore(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """Takes these states of the model and its optimizer, as plain torch knows them; all workers call it."""
        self._training.current().load(model, optimizer)
