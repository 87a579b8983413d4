"""The processes of Lightning's strategies, of the Trainer's and of Fabric's, as workers of a team."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from paceline.config import Strategy
from paceline.errors import UsageError
from paceline.integrations.framework_team import FrameworkTeam
from paceline.integrations.lightning_environment import place_in_environment, started_by_paceline


class TeamProcesses:
    """What a parallel strategy of either kind needs to know of the team; comes before Lightning's class."""

    launchers: tuple[Any, Any]
    """Lightning's classes that start processes by running the script again, and by forking this process."""
    parallel_devices: Any
    cluster_environment: Any
    local_rank: int
    node_rank: int
    global_rank: int
    _launcher: Any

    def __init__(
        self,
        strategy: str | Strategy | None = None,
        *,
        name: str | None = None,
        on_nan: str = "raise",
        start_method: str | None = None,
        **plugins: Any,
    ) -> None:
        """strategy: as for `paceline.join`; the one of `paceline run --strategy` wins.

        name: the run's folder under `runs/`, where `paceline run` has not named one.
        on_nan: as for `team.setup`.
        start_method: how `devices=N` starts the workers: "popen" runs the script N times, "fork" copies this process,
            which is the default in notebooks.
        plugins: accelerator, parallel_devices, cluster_environment, checkpoint_io and so on, as for Lightning's
            strategies.
        """
        if (own := started_by_paceline()) is not None:
            plugins.setdefault("cluster_environment", own)
            if not torch.accelerator.is_available():  # the launcher's number of workers counts, not `devices`
                plugins.setdefault("parallel_devices", [torch.device("cpu")] * own.local_world_size)
        super().__init__(**plugins)
        self._strategy, self._name, self._on_nan, self._start_method = strategy, name, on_nan, start_method
        self._num_nodes = 1
        self._workers: FrameworkTeam | None = None

    @property
    def workers(self) -> FrameworkTeam:
        if self._workers is None:
            raise UsageError("the strategy has no team yet; it joins one when the processes are launched")
        return self._workers

    @property
    def root_device(self) -> torch.device:
        device: torch.device = self.parallel_devices[self.local_rank]
        return device

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Workers of this machine."""
        return 0 if self.parallel_devices is None else len(self.parallel_devices)

    def _configure_launcher(self) -> None:
        again, forking = self.launchers
        method = self._start_method or ("fork" if _IS_INTERACTIVE else "popen")
        if method == "popen" or self.cluster_environment.creates_processes_externally:
            self._launcher = again(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = forking(self, start_method=method)

    def set_world_ranks(self) -> None:
        environment = self.cluster_environment
        if environment is not None:
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank

    def setup_environment(self) -> None:
        super().setup_environment()  # type: ignore[misc]
        self.set_world_ranks()
        place_in_environment(self.cluster_environment, self.num_processes)
        self._workers = FrameworkTeam("Lightning", self._strategy, self._name)

    # -- collectives -------------------------------------------------------------------------------------------------

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self.workers.decide(decision, by_all=all)

    def barrier(self, name: str | None = None) -> None:
        if self._workers is not None:
            self._workers.barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._workers is None else self._workers.broadcast(obj, src)

    def _stacked(self, tensor: torch.Tensor, sync_grads: bool) -> torch.Tensor:
        """All workers' tensors, along a new first dimension."""
        if sync_grads and tensor.requires_grad:
            raise UsageError("all_gather(sync_grads=True) is not supported: the team weights gradients by itself")
        return torch.stack(self.workers.gather(tensor)).to(tensor.device)
