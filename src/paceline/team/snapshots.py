"""Snapshots: the whole state of a run at a version, written in the background while the training goes on.

1. When one is due, the lead marks the next version. Every worker that gets it notes its random numbers, and again each
   time that its script asks for a batch, until it gets one: the snapshot is of the moment before that batch.
2. The update after it copies values and optimizer state, chunk by chunk, just before they are overwritten. Where
   updates do not do that, the lead copies them before the next batch.
3. The lead completes the state, and a thread of it writes the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from paceline import failpoints
from paceline.data.place import LoaderPlace
from paceline.errors import UsageError
from paceline.parameters.joint import compact, models_of, parts_of
from paceline.strategies import Trainer
from paceline.strategies.snapshot_board import Kept, SnapshotBoard
from paceline.team.checkpoints import write
from paceline.team.loaders import LoaderTeam
from paceline.team.random_state import RandomState, random_state
from paceline.team.scalers import Scalers
from paceline.team.schedulers import Schedulers
from paceline.team.snapshot_files import SECTION, SnapshotFiles
from paceline.team.worker import Worker

_PATIENCE = 5.0
"""Seconds to wait for the random numbers of a worker that has no samples, and so has not asked for a batch."""
_OFFSETS = 32
"""The most updates of one batch of which snapshots can be taken."""
_SHARE = 0.05
"""Part of the time that may pass with writing: snapshots of a large model are rarer than asked for."""


@dataclasses.dataclass(slots=True)
class _Captured:
    """The lead's part of a snapshot, as it was before the next batch."""

    number: int
    version: int
    models: list[dict[str, Any]]
    """Values that updates do not change; for the others, the `id` of the parameter."""
    groups: list[list[dict[str, Any]]]
    """Hyperparameters of each optimizer."""
    schedulers: list[dict[str, Any]]
    scaler: dict[str, Any]
    places: list[LoaderPlace | None]
    draws: list[dict[str, Any]]
    """What each loader draws its orders from."""
    whole: dict[str, Any] | None
    """Model and optimizer, if updates do not copy them."""
    since: float
    asked: bool
    """True if it was noted when the script asked for a batch."""


class _Trained(msgspec.Struct, frozen=True):
    parameter: int


class Snapshots:
    """A worker's part in the snapshots of its run."""

    def __init__(self, worker: Worker, loaders: LoaderTeam) -> None:
        self._worker, self._loaders = worker, loaders
        self._interval = worker.launch.snapshot if worker.folder is not None else None
        self._several = len(worker.members.machines) > 1
        self._trainer: Trainer | None = None
        self._board: SnapshotBoard | None = None
        self._due = time.monotonic() + (self._interval or 0.0)
        self._asked: list[tuple[Path, dict[str, Any]]] = []
        """Path and further content of checkpoints that the script wants to be written in the background."""
        self._served: list[tuple[Path, dict[str, Any]]] = []
        """Those that the snapshot which is being taken is for."""
        self._number = 0
        """Of the snapshot that this worker has last seen to be marked."""
        self._open = False
        """True until the script gets its first batch, or makes the next update, after the marked version."""
        self._requested = False
        self._offset = self._countdown = 0
        """Updates to wait before a version is marked, so that it is the last one of a batch; how many are left."""
        self._captured: _Captured | None = None
        self._files = None if worker.folder is None else SnapshotFiles(worker.folder)
        self._copying = 0.0
        """Seconds that the lead has spent on copying the state that is to be written."""
        self._writer: threading.Thread | None = None
        self._failure = ""

    def attach(self, trainer: Trainer, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Takes snapshots of what this trainer trains; all workers call it."""
        why = f"of '{self._worker.strategy}' on several machines" if self._several and not trainer.spans else ""
        why = "that has begun" if self._worker.launch.joins is not None else why or trainer.no_snapshots
        if why:
            self._explain(trainer, why)
            return
        self._board = self._board or SnapshotBoard(self._worker.members)
        self._trainer, self._model, self._optimizer = trainer, model, optimizer
        self._schedulers, self._scalers = Schedulers(optimizer), Scalers()
        # A snapshot that was begun with another trainer, before parameters were added, is left out.
        self._captured, self._requested, self._open, self._number = None, False, False, trainer.marked
        trainer.board = self._board
        measure = trainer.on_update

        def updated() -> None:
            measure()
            self._updated()

        trainer.on_update, trainer.on_batch = updated, self._begin_batch

    def _explain(self, trainer: Trainer, why: str) -> None:
        if self._interval is not None and self._worker.launch.joins is None and self._worker.rank == trainer.lead:
            self._worker.say(f"no snapshots are written: a run {why} has none yet; call team.save() now and then")
        self._interval = None

    def turn_off(self) -> None:
        """Takes no snapshots by time."""
        self._interval = None

    def abandon(self) -> None:
        """The script has failed: leaves out what is not being written yet."""
        self._asked, self._served = [], []

    @property
    def possible(self) -> bool:
        return self._trainer is not None

    # -- moments of a run --------------------------------------------------------------------------------------------

    def _updated(self) -> None:
        """An update was made, or the server has answered a push."""
        asked = self._captured is not None and self._captured.asked
        if self._open and not asked and self._loaders.shared:
            # A batch makes several updates, and the marked version is inside one: another is marked the next time.
            self._captured, self._requested = None, False
            self._offset = (self._offset + 1) % _OFFSETS
        self._open = False
        self._look()
        if self._countdown and self._trainer is not None:
            self._countdown -= 1
            if not self._countdown:
                self._trainer.mark_next()
        if not self._loaders.shared:  # then nobody asks for batches
            self._lead()

    def ask(self) -> None:
        """The script asks for its next batch."""
        if self._trainer is None:
            return
        self._look()
        if self._open:
            self._capture(asked=True)
        self._lead()

    def _begin_batch(self) -> None:
        """The script has got a batch."""
        self._open = False

    def _look(self) -> None:
        """Notes this worker's part of a snapshot if a version was marked that it has now."""
        trainer = self._trainer
        if trainer is not None and trainer.marked not in (0, self._number):
            self._number, self._open = trainer.marked, True
            self._capture(asked=False)

    # -- the state ---------------------------------------------------------------------------------------------------

    def _capture(self, *, asked: bool) -> None:
        """Notes what belongs to the marked version and is not copied by updates.

        asked: True if the script asks for a batch, and so has done everything that belongs to the last one.
        """
        trainer, board = self._trainer, self._board
        assert trainer is not None and board is not None
        board.write(self._worker.rank, self._number, msgspec.msgpack.encode(random_state()))
        leads = self._worker.rank == trainer.lead
        if not trainer.keeps and not asked and self._loaders.shared:
            return
        if leads or (trainer.lockstep and not trainer.keeps):
            captured = self._describe(trainer, asked=asked)
            self._captured = captured if leads else None

    def _describe(self, trainer: Trainer, *, asked: bool) -> _Captured:
        whole = None
        models: list[dict[str, Any]] = []
        if trainer.keeps:
            trained = {id(one) for group in self._optimizer.param_groups for one in group["params"]}
            for model in models_of(self._model):
                values = model.state_dict(keep_vars=True).items()
                models.append({key: _Trained(id(one)) if id(one) in trained else compact(one) for key, one in values})
        else:
            start = time.monotonic()
            whole = trainer.whole_state(self._model)
            self._copying = time.monotonic() - start
        return _Captured(
            number=self._number,
            version=trainer.version_of(self._number),
            models=models,
            groups=[[_hyperparameters(group) for group in part.param_groups] for part in parts_of(self._optimizer)],
            schedulers=self._schedulers.state(),
            scaler=self._scalers.state(),
            places=[loader.place(None) for loader in self._loaders.shared],
            draws=[loader.draws() for loader in self._loaders.shared],
            whole=whole,
            since=time.monotonic(),
            asked=asked,
        )

    def _content(self, captured: _Captured, kept: Kept | None) -> dict[str, Any]:
        """The content of the file; its tensors are views of memory that stays as it is."""
        content = captured.whole
        places = captured.places
        if content is None:
            assert kept is not None
            models = [
                {key: kept.values[one.parameter] if isinstance(one, _Trained) else one for key, one in model.items()}
                for model in captured.models
            ]
            for state, groups in zip(kept.optimizers, captured.groups, strict=True):
                for known, values in zip(state["param_groups"], groups, strict=True):
                    known.update(values)
            several = len(models) > 1 or len(models_of(self._model)) > 1
            content = {
                "model": models if several else models[0],
                "optimizer": kept.optimizers if len(kept.optimizers) > 1 else kept.optimizers[0],
            }
            if kept.left is not None:
                left = kept.left
                places = [loader.place(left.get(number)) for number, loader in enumerate(self._loaders.shared)]
        told = [
            None if place is None else msgspec.structs.replace(place, **draws).content()
            for place, draws in zip(places, captured.draws, strict=False)
        ]
        return {
            **content,
            "version": captured.version,
            SECTION: {
                "format": 1,
                "strategy": str(self._worker.strategy),
                "workers": self._worker.size,
                "loaders": told,
                "schedulers": captured.schedulers,
                "scaler": captured.scaler,
                "policy": {} if kept is None else kept.policy,
                "random": self._random(captured.number),
            },
        }

    def _random(self, number: int) -> dict[int, Any]:
        """By rank, the random numbers of the workers; the last known ones of a worker that has been silent since."""
        assert self._board is not None
        found = {}
        for rank in range(self._worker.size):
            noted, data = self._board.read(rank)
            if noted:
                found[rank] = msgspec.msgpack.decode(data, type=RandomState).content()
        return found

    # -- the lead ----------------------------------------------------------------------------------------------------

    def request(self, path: Path, extra: dict[str, Any]) -> None:
        """Lets a checkpoint of the next version be written in the background."""
        self._asked.append((path, extra))

    def _lead(self) -> None:
        """If this is the lead, begins a snapshot that is due, and writes one that is complete."""
        trainer = self._trainer
        if trainer is None or self._worker.rank != trainer.lead:
            return
        if self._writer is not None and not self._writer.is_alive():
            self._writer = None
            if self._failure:
                self._worker.say(f"{self._failure}; no more snapshots are written, and the training goes on")
                self._interval, self._failure = None, ""
        if self._writer is not None:
            return
        if self._captured is not None and not self._open:
            self._complete(trainer, self._captured)
        elif not self._requested and self._is_due() and all(loader.has_place for loader in self._loaders.shared):
            self._requested = True
            self._served, self._asked = [*self._served, *self._asked], []
            self._countdown = self._offset
            if not self._countdown:
                trainer.mark_next()

    def _is_due(self) -> bool:
        return bool(self._asked) or (self._interval is not None and time.monotonic() >= self._due)

    def _complete(self, trainer: Trainer, captured: _Captured) -> None:
        assert self._board is not None
        waits = trainer.together and time.monotonic() - captured.since < _PATIENCE
        if waits and not self._several and self._board.missing(captured.number):
            return
        kept = None if captured.whole is not None else trainer.kept(captured.number)
        if captured.whole is None and kept is None:
            return
        if waits and self._board.missing(captured.number):  # other machines' notes may come with the copy
            return
        self._captured, self._requested = None, False
        content = self._content(captured, kept)
        served, self._served = self._served, []
        self._writer = threading.Thread(target=self._write, args=(content, served), name="paceline snapshot")
        self._writer.start()

    def _write(self, content: dict[str, Any], served: list[tuple[Path, dict[str, Any]]]) -> None:
        """Writes a snapshot, or the checkpoints that the script has asked for."""
        with contextlib.suppress(OSError):  # it must not take time from the training
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        failpoints.hit("snapshot.write")
        start = time.monotonic()
        try:
            for path, extra in served:
                write(path, {**extra, **content}, sums=True)
            if self._files is not None and not served:
                self._files.write(content, content["version"])
        except UsageError as error:
            self._failure = str(error)
        except Exception as error:
            self._failure = f"the snapshot cannot be written: {type(error).__name__}: {error}"
        if not served and self._interval:
            took = time.monotonic() - start + self._copying
            self._due = start + max(self._interval, took / _SHARE)

    def finish(self) -> list[tuple[Path, dict[str, Any]]]:
        """Waits until the file that is being written is complete; returns checkpoints that the script still wants."""
        if self._writer is not None:
            self._writer.join()
        if self._failure:
            self._worker.say(self._failure)
        if self._files is not None:
            self._files.close()
        asked = self._served + self._asked
        self._served, self._asked, self._interval = [], [], None
        return asked


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: compact(value) for key, value in group.items() if key != "params"}
