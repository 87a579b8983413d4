"""The team as its loaders see it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.cluster.membership import Members
from paceline.cluster.preemption import leave_if_told
from paceline.data import TeamLoader
from paceline.data.division_watch import DivisionWatch
from paceline.data.stream.kinds import is_stream
from paceline.data.stream.team_stream import TeamStream
from paceline.data.team_view import Measured
from paceline.data.user_loader import UserLoader
from paceline.errors import Mismatch, UsageError, names
from paceline.events import Balance
from paceline.events.recorder import Recorder
from paceline.events.stopwatch import Stopwatch
from paceline.strategies import Trainer
from paceline.transport import BarrierKind

_NUMBER = 4
"""Bytes of a loader's number."""


class LoaderTeam:
    """Shares loaders out among the workers, and passes their events on to the trainer."""

    def __init__(
        self,
        rank: int,
        size: int,
        members: Members,
        recorder: Recorder,
        stopwatch: Stopwatch,
        say: Callable[[str], None],
    ) -> None:
        """say: prints a line, on the lead only."""
        self.rank, self.size = rank, size
        self._members, self._recorder, self._stopwatch, self._say = members, recorder, stopwatch, say
        self._trainer: Trainer | None = None
        self._loaders: list[TeamLoader] = []
        self.shared: list[UserLoader] = []
        """All loaders that the script has given to the team, in this order."""
        self.on_share: Callable[[int, UserLoader], None] = lambda _number, _loader: None
        """Called with the number of a loader that the script gives to the team, and the loader."""
        self.on_epoch: Callable[[bool], None] = lambda _over: None
        """Called when the script begins an epoch of training; with True if that is over already."""
        self.watch = DivisionWatch(self._trained, self._models, self._say_untrained)
        self._round: tuple[Measured, int] | None = None
        """The loader that gave the last batch to train on, and the number of its global batch."""
        self.part = 1.0 / size
        """This worker's share of the samples of the last batch to train on."""

    def attach(self, trainer: Trainer) -> None:
        self._trainer = trainer
        trainer.on_update = self._measure
        trainer.on_lost = self._lose

    def share(
        self,
        loader: DataLoader[Any],
        *,
        global_batch: int | None,
        balance: bool = False,
        per_worker: bool = False,
        steps: int | None = None,
    ) -> UserLoader:
        """This worker's share of a loader.

        steps: after which an epoch of a stream ends.
        """
        shared = self._share(loader, global_batch=global_batch, balance=balance, per_worker=per_worker, steps=steps)
        shared.on_epoch, shared.watch = self._begin_epoch, self.watch
        self.shared.append(shared)
        self.on_share(len(self.shared) - 1, shared)
        return shared

    def _begin_epoch(self, over: bool) -> None:
        self.on_epoch(over)

    def _trained(self) -> object:
        return None if self._trainer is None else (self._trainer.backward_passes, self._trainer.version)

    def _models(self) -> list[torch.nn.Module]:
        return [] if self._trainer is None else self._trainer.models

    def _say_untrained(self) -> None:
        self._say(
            "a loader was iterated over without a backward pass, and each worker has had its part of the samples; "
            "to evaluate all of them on every worker, call model.eval() or enter torch.no_grad() before the loop, or "
            "before next()"
        )

    def _share(
        self,
        loader: DataLoader[Any],
        *,
        global_batch: int | None,
        balance: bool,
        per_worker: bool,
        steps: int | None,
    ) -> UserLoader:
        options: dict[str, Any] = {"global_batch": global_batch, "per_worker": per_worker}
        leased: UserLoader | None = None
        if self._trainer is not None:
            leased = self._trainer.share_loader(loader, **options, steps=steps, say=self._say)
        if leased is not None:
            return leased
        options |= {"balance": balance, "changed": self._record_shares, "number": len(self.shared)}
        if is_stream(loader):
            return self._share_stream(loader, steps=steps, **options)
        shared = TeamLoader(loader, self, **options)
        self._loaders.append(shared)
        return shared

    def _share_stream(self, loader: DataLoader[Any], **options: Any) -> TeamStream:
        if self._trainer is not None and self._trainer.present is not None:
            raise UsageError(
                "an elastic all-reduce cannot give a lost worker's samples to others if their loader has no length; "
                "use a map-style dataset, or a parameter server"
            )
        return TeamStream(loader, self, **options, say=self._say)

    @property
    def lead(self) -> int:
        return 0 if self._trainer is None else self._trainer.lead

    @property
    def replica(self) -> int:
        """The number of this worker's replica; all workers of a replica get the same batches."""
        own = self._trainer.replica if self._trainer is not None else None
        return self.rank if own is None else own[0]

    @property
    def replicas(self) -> int:
        own = self._trainer.replica if self._trainer is not None else None
        return self.size if own is None else own[1]

    @property
    def lockstep(self) -> bool:
        return self._trainer is not None and (self._trainer.lockstep or self._trainer.in_every_round)

    @property
    def evaluates(self) -> bool:
        if self._trainer is None or not self._trainer.evaluates:
            return False
        self._trainer.take_whole_batches()
        return True

    @property
    def steps(self) -> int:
        return 0 if self._trainer is None else self._trainer.version

    def from_lead(self, payload: bytes, loader: int, *, evaluates: bool = False) -> bytes:
        return self.from_all(payload, loader, evaluates=evaluates)[self.lead]

    def from_all(self, payload: bytes, loader: int, *, evaluates: bool = False) -> list[bytes]:
        own = loader.to_bytes(_NUMBER) + payload
        gathered = self._members.gather(own, BarrierKind.EVALUATE if evaluates else BarrierKind.EPOCH)
        others = [rank for rank, one in enumerate(gathered) if one and one[:_NUMBER] != own[:_NUMBER]]
        if others and (self._trainer is None or self._trainer.present is None):  # else others may have had more loaders
            raise Mismatch(
                f"{names(others)} begins an epoch of another loader than rank {self.rank}: all workers must iterate "
                "over the same loaders in the same order; if one has no part of an epoch's last batch, use "
                "drop_last=True",
                others,
            )
        found = [one[_NUMBER:] for one in gathered]
        if self._trainer is not None:
            self._trainer.epoch_drawn()
        return found

    def compare(self, payload: bytes, *, end: bool = False) -> list[bytes]:
        return self._members.gather(payload, BarrierKind.STREAM if end else BarrierKind.GATHER)

    def passes_by(self, loader: TeamLoader) -> bool:
        joining = None if self._trainer is None else self._trainer.joining
        return joining is not None and joining.late and joining.enter(loader)

    def ask_batch(self, loader: TeamLoader | None = None) -> None:
        if self._trainer is None or not self._trainer.within_step:
            leave_if_told()
        if torch.is_grad_enabled():
            joining = None if self._trainer is None else self._trainer.joining
            if joining is not None and joining.wanted and loader is not None:
                joining.admit(loader)
            self._stopwatch.ask()
            if self._trainer is not None:
                self._trainer.on_ask()

    def take_batch(self, samples: int, weight: float, loader: Measured, round_number: int) -> None:
        # A batch that is only evaluated leads to no gradient.
        if self._trainer is not None and torch.is_grad_enabled():
            self._round, self.part = (loader, round_number), weight
            self._trainer.on_batch()
            self._trainer.round = round_number
            self._trainer.round_share = (
                weight if isinstance(loader, TeamLoader) else 1.0
            )  # shards of a stream end unevenly
            self._trainer.take_batch(samples, weight)

    def finish_epoch(self) -> None:
        if self._trainer is not None:
            self._trainer.finish_epoch()
            self._recorder.flush()

    def _lose(self, ranks: set[int], counted: bool, takers: list[int]) -> None:
        """Give the samples of lost workers that are not trained on yet to the others."""
        for loader in self._loaders:
            number = self._round[1] if self._round is not None and self._round[0] is loader else -1
            if self._round is None and self._trainer is not None:  # a worker that has just joined
                number = self._trainer.round
            loader.lose(ranks, number, counted, takers)

    def _measure(self) -> None:
        """After an update, tell the loader the workers' paces."""
        if self._round is not None and self._trainer is not None:
            loader, number = self._round
            loader.measure(self._trainer.paces, number)

    def _record_shares(self, start: int, shares: list[int]) -> None:
        self._recorder.add(Balance(self.rank, time.perf_counter(), start, shares))
