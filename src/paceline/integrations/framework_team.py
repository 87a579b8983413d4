"""The team as the adapter of a framework uses it: its training loaders, and collectives of plain values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.config import AllReduce, Launch, Strategy
from paceline.data.stream.kinds import is_stream
from paceline.errors import Mismatch, UsageError
from paceline.integrations.training_loader import TrainingLoader, joined_rest
from paceline.parameters.checkpoint_codec import pack, unpack
from paceline.parameters.variables import gather_tensors
from paceline.policies import Policy
from paceline.team import Team, join
from paceline.team.framework_access import FrameworkAccess

_COMBINE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "mean": lambda stacked: (stacked if stacked.is_floating_point() else stacked.float()).mean(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
    "product": lambda stacked: stacked.prod(0),
}


class FrameworkTeam:
    """The team of a framework's processes."""

    def __init__(self, framework: str, strategy: str | Strategy | None = None, name: str | None = None) -> None:
        """framework: its name in messages."""
        self.team: Team = join(strategy, name=name)
        self.access = FrameworkAccess(self.team)
        self.access.leave_snapshots_out(framework)
        launch, chosen = Launch.from_environment(), self.team.strategy
        self.size = self.team.world_size
        if not isinstance(chosen, AllReduce | Policy):
            raise UsageError(
                f"'{chosen}' splits the model over workers, which {framework} cannot do; use all-reduce or a policy of "
                "the parameter server, or a loop of your own with team.setup"
            )
        if launch.elastic or launch.joins is not None:
            raise UsageError(
                f"{framework} counts its workers once, so none can join or leave; leave out --elastic and --restarts"
            )
        self.policy = chosen.for_workers(range(self.size)) if isinstance(chosen, Policy) and self.size > 1 else None
        self.unequal = self.policy is not None and not self.policy.lockstep
        """True if workers take different numbers of steps, since each takes samples when it needs them."""
        self._loaders: list[TrainingLoader] = []
        self._said_rest = False

    def loader(self, loader: DataLoader[Any]) -> TrainingLoader:
        """A training loader whose batch is one worker's, as frameworks mean it."""
        if is_stream(loader):
            raise UsageError(
                "the training loader has no length, and a framework's loop counts the batches of an epoch; use a "
                "dataset with a length, or a loop of your own with team.setup"
            )
        if (rest := 0 if self.unequal else joined_rest(loader, self.size)) and not self._said_rest:
            self._said_rest = True
            self.access.say(
                f"the last {rest} samples of an epoch are fewer than the {self.size} workers, and join the batch "
                "before; drop_last=True leaves them out"
            )
        self._loaders.append(TrainingLoader(loader, self.team, self.size, leased=self.unequal))
        return self._loaders[-1]

    @property
    def inside(self) -> bool:
        """True if this worker is inside an epoch in which workers take different numbers of steps."""
        return self.unequal and any(loader.inside for loader in self._loaders)

    def begin_evaluation(self) -> None:
        """Get ready to evaluate one version of the model with all workers; refused inside an epoch of unequal steps."""
        if self.unequal and not all(loader.ended for loader in self._loaders):
            self.check_outside("an evaluation")
        if self.unequal:
            self.leave_epoch()

    def leave_epoch(self) -> None:
        """End the epoch for this worker, also if there are samples left, and wait until all others have ended it."""
        for loader in self._loaders:
            loader.leave()
        if self.unequal:
            self.catch_up()

    def catch_up(self) -> None:
        """Wait until all workers are here, and take the newest version: others may have trained on."""
        self.team.barrier()
        self.access.refresh()

    # -- collectives -------------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        self.check_outside(f"the barrier {name!r}" if name else "a barrier")
        if self.size > 1:
            self.team.barrier()

    def gather(self, tensor: torch.Tensor, *, same: bool = True) -> list[torch.Tensor]:
        """All workers' tensors, by rank. same: their shapes must be equal."""
        exchange = functools.partial(self._exchange, "all_gather")
        return [one for one in gather_tensors(tensor, exchange, same=same) if one is not None]

    def reduce(self, tensor: torch.Tensor, operation: Any, *, by_samples: bool = False) -> torch.Tensor:
        """All workers' tensors as one.

        operation: its name, or one of torch.distributed's.
        by_samples: a mean is weighted by the numbers of the workers' samples in this step.
        """
        name = _name(operation)
        if name not in _COMBINE:
            raise UsageError(f"workers' values can be combined by {', '.join(_COMBINE)}, not by {name}")
        if by_samples and name == "mean":
            tensor, name = tensor * self.access.part, "sum"
        return _COMBINE[name](torch.stack(self.gather(tensor))).to(tensor.device)

    def all_of(self, value: Any) -> list[Any]:
        """All workers' values, by rank: numbers, texts, tensors, and lists, tuples and dicts of them."""
        return [unpack(payload) for payload in self._exchange("gather", pack(value)) if payload]

    def decide(self, decision: bool, *, by_all: bool) -> bool:
        """True if all workers decide so, or any of them."""
        votes = [payload != b"\0" for payload in self._exchange("decision", bytes([decision])) if payload]
        return all(votes) if by_all else any(votes)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of one worker, of the kinds that `all_of` takes, or a path."""
        if self.size == 1:
            return value
        payload, is_path = b"", isinstance(value, PurePath)
        if self.team.rank == source:
            try:
                payload = pack(["path" if is_path else "", str(value) if is_path else value])
            except UsageError:
                payload = pack(["error", type(value).__name__])
        kind, found = unpack(self._exchange("broadcast", payload)[source])
        if kind == "error":
            raise UsageError(f"a {found} cannot be broadcast; send numbers, texts, tensors, and lists or dicts of them")
        return Path(found) if kind == "path" else found

    def mirror(self, module: torch.nn.Module) -> None:
        """Copy rank 0's parameters and buffers to all workers."""
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            first = self.gather(tensor if self.team.rank == 0 else tensor.new_empty(0), same=False)[0]
            if first.shape != tensor.shape:
                raise Mismatch(f"rank 0's '{name}' has another shape than rank {self.team.rank}'s", [self.team.rank])
            with torch.no_grad():
                tensor.copy_(first)

    def _exchange(self, what: str, payload: bytes) -> list[bytes]:
        """All workers' payloads, by rank; raises Mismatch if they do not do the same."""
        self.check_outside(f"a {what}")
        mark = what.encode() + b":"
        found = self.access.exchange(mark + payload)
        others = [rank for rank, one in enumerate(found) if one and not one.startswith(mark)]
        if others:
            other = found[others[0]].split(b":")[0].decode()
            raise Mismatch(
                f"rank {others[0]} is at a {other} where rank {self.team.rank} is at a {what}: all workers must do the "
                "same",
                others,
            )
        return [one[len(mark) :] for one in found]

    def check_outside(self, what: str) -> None:
        """Refuse what waits for all workers inside an epoch in which they take different numbers of steps."""
        if self.inside:
            raise UsageError(
                f"under '{self.team.strategy}' workers take different numbers of steps, so that {what} inside an epoch "
                "would wait for ever; do it at the end of an epoch, or use all-reduce"
            )


def _name(operation: Any) -> str:
    name = "sum" if operation is None else operation if isinstance(operation, str) else operation.name
    return {"avg": "mean", "prod": "product"}.get(name.lower(), name.lower())
