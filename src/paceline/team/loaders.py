"""The team as its loaders see it."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.cluster.membership import Members
from paceline.data import TeamLoader
from paceline.data.leased_loader import LeasedLoader
from paceline.events import Balance
from paceline.events.recorder import Recorder
from paceline.events.stopwatch import Stopwatch
from paceline.strategies import Trainer
from paceline.transport import BarrierKind


class LoaderTeam:
    """Shares loaders out among the workers, and passes their events on to the trainer."""

    def __init__(self, rank: int, size: int, members: Members, recorder: Recorder, stopwatch: Stopwatch) -> None:
        self.rank, self.size = rank, size
        self._members, self._recorder, self._stopwatch = members, recorder, stopwatch
        self._trainer: Trainer | None = None
        self._loaders: list[TeamLoader] = []
        self._round: tuple[TeamLoader, int] | None = None
        """The loader that gave the last batch to train on, and the number of its global batch."""

    def attach(self, trainer: Trainer) -> None:
        self._trainer = trainer
        trainer.on_update = self._measure
        trainer.on_lost = self._lose

    def share(self, loader: DataLoader[Any], global_batch: int | None, balance: bool) -> TeamLoader | LeasedLoader:
        """This worker's share of a loader."""
        leased: LeasedLoader | None = self._trainer.share_loader(loader, global_batch) if self._trainer else None
        if leased is not None:
            return leased
        shared = TeamLoader(loader, self, global_batch=global_batch, balance=balance, changed=self._record_shares)
        self._loaders.append(shared)
        return shared

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
        return self._trainer is not None and self._trainer.lockstep

    @property
    def evaluates(self) -> bool:
        if self._trainer is None or not self._trainer.evaluates:
            return False
        self._trainer.take_whole_batches()
        return True

    @property
    def steps(self) -> int:
        return 0 if self._trainer is None else self._trainer.version

    def from_lead(self, payload: bytes) -> bytes:
        found = self._members.gather(payload, BarrierKind.EPOCH)[self.lead]
        if self._trainer is not None:
            self._trainer.epoch_drawn()
        return found

    def ask_batch(self) -> None:
        if torch.is_grad_enabled():
            self._stopwatch.ask()

    def take_batch(self, samples: int, weight: float, loader: TeamLoader, round_number: int) -> None:
        # A batch that is only evaluated leads to no gradient.
        if self._trainer is not None and torch.is_grad_enabled():
            self._round = (loader, round_number)
            self._trainer.round = round_number
            self._trainer.take_batch(samples, weight)

    def finish_epoch(self) -> None:
        if self._trainer is not None:
            self._trainer.finish_epoch()
            self._recorder.flush()

    def _lose(self, ranks: set[int], counted: bool, takers: list[int]) -> None:
        """Give the samples of lost workers that are not trained on yet to the others."""
        for loader in self._loaders:
            number = self._round[1] if self._round is not None and self._round[0] is loader else -1
            loader.lose(ranks, number, counted, takers)

    def _measure(self) -> None:
        """After an update, tell the loader the workers' paces."""
        if self._round is not None and self._trainer is not None:
            loader, number = self._round
            loader.measure(self._trainer.paces, number)

    def _record_shares(self, start: int, shares: list[int]) -> None:
        self._recorder.add(Balance(self.rank, time.perf_counter(), start, shares))
