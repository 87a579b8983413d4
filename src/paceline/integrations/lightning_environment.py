"""The places of a team's workers as Lightning knows them."""

from __future__ import annotations

import os

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import TorchElasticEnvironment

from paceline.config import Launch, Place


class PacelineEnvironment(TorchElasticEnvironment):
    """Workers that `paceline run` has started: they have the environment variables of torchrun."""

    @staticmethod
    def detect() -> bool:
        return Launch.VARIABLE in os.environ

    @property
    def local_world_size(self) -> int:
        return Place.from_environment().local_world_size

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """The launcher decides how many workers there are."""


def started_by_paceline() -> PacelineEnvironment | None:
    """The environment of a worker that `paceline run` has started; None in any other process."""
    return PacelineEnvironment() if PacelineEnvironment.detect() else None


def place_in_environment(environment: ClusterEnvironment, local_world_size: int) -> None:
    """Tell a team that is joined next the place of this process, as torchrun does."""
    os.environ.update(
        RANK=str(environment.global_rank()),
        LOCAL_RANK=str(environment.local_rank()),
        WORLD_SIZE=str(environment.world_size()),
        LOCAL_WORLD_SIZE=str(local_world_size),
    )
    if environment.world_size() > 1:
        os.environ.update(MASTER_ADDR=environment.main_address, MASTER_PORT=str(environment.main_port))
