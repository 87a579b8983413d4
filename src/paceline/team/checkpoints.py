"""A team's checkpoints as files that plain `torch.load` reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from paceline.cluster.file_sync import newest_checkpoint
from paceline.cluster.membership import Members
from paceline.errors import UsageError
from paceline.parameters.checkpoint_codec import pack, unpack


class Checkpoints:
    """The checkpoints of a run."""

    def __init__(self, members: Members, folder: Path | None) -> None:
        self._members, self._folder = members, folder
        self._found: Path | None = None
        if len(members.machines) > 1:
            # The machines' folders differ; checkpoints are in rank 0's.
            own = None if folder is None else newest_checkpoint(folder)
            found = members.gather(b"" if own is None else str(own).encode())[0].decode()
            self._found = Path(found) if found else None

    def newest(self) -> Path | None:
        """The newest checkpoint of the run; over machines, the newest at its start."""
        if self._folder is None:
            return None
        return newest_checkpoint(self._folder) if len(self._members.machines) == 1 else self._found

    def path(self, path: str | Path | None, version: int) -> Path:
        """Where a checkpoint of this version goes."""
        if path is not None:
            return Path(path)
        if self._folder is None:
            raise UsageError("save needs a path: this run has no folder; start it with paceline run")
        return self._folder / "checkpoints" / f"{version:08d}.pt"

    def read(self, path: Path, *, lead: bool) -> dict[str, Any]:
        """The content of a checkpoint; all workers call it. Machines without the file get it from rank 0."""
        found = [path.is_file()]
        if len(self._members.machines) > 1:
            found = [flag == b"1" for flag in self._members.gather(b"1" if found[0] else b"0")]
        if not found[0]:
            raise UsageError(f"there is no checkpoint at {path}")
        content = _read(path) if all(found) or lead else {}
        if not all(found):
            content = unpack(self._members.gather(pack(content) if lead else b"")[0])
        return content


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes a checkpoint; the file is complete or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(content, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def compact(value: Any) -> Any:
    """A copy whose tensors own just their own memory, so that a file holds nothing else."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone(memory_format=torch.preserve_format)
    if isinstance(value, dict):
        return {key: compact(item) for key, item in value.items()}
    if isinstance(value, list):
        return [compact(item) for item in value]
    return value


def _read(path: Path) -> dict[str, Any]:
    content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or not {"model", "optimizer"} <= content.keys():
        raise UsageError(f"{path} is not a checkpoint of a team: it has no 'model' and 'optimizer'")
    return content
