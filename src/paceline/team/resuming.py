"""Goes on from a snapshot of another run, or of an earlier start of this one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from paceline.data.place import LoaderPlace
from paceline.data.user_loader import UserLoader
from paceline.errors import UsageError
from paceline.parameters.checkpoint_codec import pack, unpack
from paceline.strategies import Trainer
from paceline.team.checkpoints import read
from paceline.team.random_state import RandomState
from paceline.team.scalers import Scalers
from paceline.team.schedulers import Schedulers
from paceline.team.snapshot_files import SECTION, read_newest
from paceline.team.worker import Worker


class Resuming:
    """Restores the state of a snapshot: at `setup`, and once more before the first batch.

    A script that is started again begins with its first epoch. Loaders give nothing in the epochs that are over, and
    in the next one what was left of it. What the script does in between, to schedulers say, was done before already: so
    the state is restored again when the first epoch begins that is not over.
    """

    def __init__(self, worker: Worker, run: Path, say: Callable[[str], None]) -> None:
        """run: the folder with the snapshots; all workers call it."""
        self._worker, self._say = worker, say
        self._content = self._read(run)
        section = self._content[SECTION]
        self.version: int = self._content["version"]
        # Another policy begins anew.
        self.policy: dict[str, Any] = section.get("policy", {}) if section["strategy"] == str(worker.strategy) else {}
        self._loaders: list[dict[str, Any] | None] = section["loaders"]
        self._random = section["random"].get(worker.rank)
        self._schedulers: list[dict[str, Any]] = section["schedulers"]
        self._scaler: dict[str, Any] = section.get("scaler", {})
        self._shared: list[tuple[UserLoader, LoaderPlace]] = []
        self._said_over = False
        self._begun = False
        """True once an epoch has begun that is not over."""
        self._asked = False
        """True once the script has asked for its first batch."""

    def _read(self, run: Path) -> dict[str, Any]:
        """One worker looks for a snapshot that is not damaged; the others read the same, or get it from there."""
        members, source = self._worker.members, self._worker.resumed_by
        content: dict[str, Any] | None = None
        found = ""
        if members.rank == source:
            try:
                path, content, damaged = read_newest(run)
                for sentence in damaged:
                    self._say(f"{sentence}. The run goes on from {path.name}, the snapshot before")
                found = f"={_stamp(path)}"
            except UsageError as error:
                found = str(error)
        found = members.gather(found.encode())[source].decode()
        if not found.startswith("="):
            raise UsageError(found)
        stamp = found[1:]
        self.path = Path(stamp.partition("\0")[0])
        if len(members.machines) > 1:
            # Another machine may have another file at this path.
            here = members.gather(b"1" if content is not None or _stamp(self.path) == stamp else b"0")
            if b"0" in here:
                sent = members.gather(b"" if content is None else pack(content))[source]
                return content if content is not None else dict(unpack(sent))
        return read(self.path) if content is None else content

    def load(self, trainer: Trainer) -> None:
        """Restores model and optimizer; all workers call it."""
        trainer.load(self._content["model"], self._content["optimizer"])
        trainer.version = self.version

    def share(self, number: int, loader: UserLoader) -> None:
        """The script has given the team a loader."""
        if number >= len(self._loaders):
            return
        known = self._loaders[number]
        if known is None:
            raise UsageError(
                f"{self.path} does not say how far the stream of loader {number} was, so the run cannot go on in the "
                "middle of it; team.load(path) restores model and optimizer only"
            )
        place = LoaderPlace.of(known)
        loader.resume(place)
        self._shared.append((loader, place))

    def call_off(self) -> None:
        """The script loads a checkpoint itself: the run goes on from that, with whole epochs."""
        for loader, _ in self._shared:
            loader.resume(LoaderPlace(0))
        self._shared, self._begun, self._asked, self._content = [], True, True, {}
        self._say(f"the script loads a checkpoint itself, so the run goes on from that, and not from {self.path}")

    def begin_epoch(self, trainer: Trainer, optimizer: Optimizer, over: bool) -> None:
        """The script begins an epoch of training; over: that was trained in the run before."""
        if over and not self._said_over:
            self._said_over = True
            done = max(place.epoch for _, place in self._shared)
            self._say(
                f"{done} epoch{'s are' if done > 1 else ' is'} over in the run before: loaders give no batches in "
                f"{'them' if done > 1 else 'it'}"
            )
        if over or self._begun:
            return
        self._begun = True
        self.load(trainer)
        self._content = {}
        if not Schedulers(optimizer).restore(self._schedulers):
            known = ", ".join(one["class"] for one in self._schedulers) or "none"
            self._say(
                f"the script's schedulers of learning rates are not those of the snapshot ({known}); they begin anew"
            )
        if not Scalers().restore(self._scaler):
            self._say("the snapshot has the state of a GradScaler, and the script has none, or several; it begins anew")
        self._restore_random()

    def updated(self) -> None:
        """An update was made."""
        if not self._shared and not self._begun:
            self._begun = True
            self._say(
                f"the run goes on after {self.version} updates, but the script has given the team no loader, so its "
                "loop begins anew"
            )

    def ask(self) -> None:
        """The script asks for its next batch."""
        if self._begun and not self._asked:
            self._asked = True
            # Once more: the loader has drawn a seed for its processes since, as it had before the snapshot.
            self._restore_random()

    def _restore_random(self) -> None:
        for loader, place in self._shared:
            loader.restore(place)
        if self._random is not None:
            RandomState.of(self._random).restore()


def _stamp(path: Path) -> str:
    """The path, size and time of a file, by which another machine knows whether it sees the same one."""
    try:
        known = path.stat()
    except OSError:
        return ""
    return f"{path}\0{known.st_size}\0{known.st_mtime_ns}"
