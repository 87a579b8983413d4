"""A team's checkpoints as files that plain `torch.load` reads."""

from __future__ import annotations

import errno
import glob
import os
import re
import socket
from pathlib import Path
from typing import IO, Any

import torch
from torch.utils.serialization import config

from paceline.cluster.file_sync import newest_checkpoint
from paceline.cluster.membership import Members
from paceline.errors import UsageError
from paceline.events.private import make_private
from paceline.parameters.checkpoint_codec import pack, unpack
from paceline.team.checksum import KEY, checksum, is_whole
from paceline.team.streamed_checkpoint import save_streamed

_TORCH_CONFIG: Any = config  # its methods are added at run time
_HOST = socket.gethostname()
_OTHER = "load another checkpoint, one that team.save has written"


class Checkpoints:
    """The checkpoints of a run."""

    def __init__(self, members: Members, folder: Path | None) -> None:
        self._members, self._folder = members, folder
        self._found: Path | None = None
        if folder is not None and members.rank == 0:
            _remove_partial(folder / "checkpoints")
            _remove_partial(folder / "snapshots")
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

    def read(self, path: Path, *, lead: bool, mapped: bool = False) -> dict[str, Any]:
        """The content of a checkpoint; all workers call it. Machines without the file get it from rank 0.

        mapped: tensors stay in the file until they are read.
        """
        found = [path.is_file()]
        if len(self._members.machines) > 1:
            found = [flag == b"1" for flag in self._members.gather(b"1" if found[0] else b"0")]
        if not found[0]:
            raise UsageError(f"there is no checkpoint at {path}")
        if all(found):
            return read(path, mapped=mapped)
        answer = unpack(self._members.gather(_packed(path) if lead else b"")[0])
        if isinstance(answer, str):
            raise UsageError(answer)
        content: dict[str, Any] = answer
        return content


def _packed(path: Path) -> bytes:
    """A checkpoint's content for the other machines, or the sentence that tells why there is none."""
    try:
        return pack(read(path))
    except UsageError as error:
        return pack(str(error))


def write(
    path: Path,
    content: dict[str, Any],
    *,
    private: bool = False,
    sums: bool = False,
    over: Path | None = None,
    streamed: bool = False,
) -> None:
    """Writes a checkpoint; the file is complete or not there, and nothing else is left if the process is killed.

    private: only this user can read it; sums: with a checksum that is fast to compute, and written to the disk; over: a
    file that is overwritten and renamed, which takes a tenth of the time of a new one, as it has its memory already;
    streamed: tensors of other workers are fetched one after the other.
    """
    try:
        if private:
            make_private(path.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_partial(path.parent, path.name)
        if streamed:
            _write(content, path, 0o600 if private else 0o666, streamed=True)
            return
        told = checksum(content, "sums" if sums else "sha256")
        whole = {**content, KEY: told}
        if over is not None:
            _overwrite(whole, path, over)
        else:
            _write(whole, path, 0o600 if private else 0o666, sync=sums)
    except OSError as error:
        raise UsageError(f"the checkpoint {path} cannot be written: {error.strerror or error}") from None


def _write(content: dict[str, Any], path: Path, mode: int, *, sync: bool = False, streamed: bool = False) -> None:
    partial = partial_name(path)
    try:
        descriptor = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY, mode)
        nameless = True
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        descriptor = os.open(partial, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, mode)  # a file system without such files
        nameless = False
    try:
        with os.fdopen(descriptor, "wb") as file:
            if streamed:
                with Path(f"/proc/self/fd/{descriptor}").open("r+b") as parts:
                    save_streamed(content, parts)
            else:
                _save(content, file, crc=not sync)
            file.flush()
            if sync:
                os.fdatasync(descriptor)
            if nameless and _link(descriptor, path):
                return
            if nameless:
                _link(descriptor, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _overwrite(content: dict[str, Any], path: Path, over: Path) -> None:
    try:
        with over.open("r+b") as file:
            _save(content, file, crc=False)
            file.truncate()
            file.flush()
            os.fdatasync(file.fileno())
        over.replace(path)
    finally:
        over.unlink(missing_ok=True)


def partial_name(path: Path) -> Path:
    """Where a file is written that gets this name; if this process is killed, the next run of the folder removes it."""
    return path.with_name(f".{path.name}.{_HOST}.{os.getpid()}")


def _link(descriptor: int, path: Path) -> bool:
    """Gives a file without a name this one; False if there is a file of that name."""
    try:
        # Only with a descriptor of a folder, which an absolute path does not need, Python follows the link in /proc.
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)
    except FileExistsError:
        return False
    return True


def _save(content: dict[str, Any], file: IO[bytes], *, crc: bool) -> None:
    """crc: with torch's own sum of every record, which `torch.load` ignores, and which takes two thirds of the time."""
    try:
        with _TORCH_CONFIG.patch("save.compute_crc32", crc):  # in this thread only
            torch.save(content, file)
    except RuntimeError as error:  # torch's, about the error of the file
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def _remove_partial(folder: Path, name: str | None = None) -> None:
    """Removes files that dead processes of this machine have left of checkpoints of this name, or of any."""
    for partial in folder.glob(f".{'*' if name is None else glob.escape(name)}.{glob.escape(_HOST)}.*"):
        pid = partial.name.rpartition(".")[2]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            partial.unlink(missing_ok=True)


def read(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """The content of a checkpoint, without its checksum; mapped: tensors stay in the file until they are read."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError as error:
        raise UsageError(f"the checkpoint {path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # of many kinds, also of Python's own where the pickle in it is damaged
        raise UsageError(f"{path} is damaged or is not a checkpoint of a team{_reason(error)}; {_OTHER}") from None
    if not isinstance(content, dict) or not {"model", "optimizer"} <= content.keys():
        raise UsageError(f"{path} is not a checkpoint of a team: it has no 'model' and 'optimizer'; {_OTHER}")
    told = content.pop(KEY, None)
    if told is not None and not is_whole(content, told):  # without one it is of an earlier version, or the script's own
        raise UsageError(f"{path} is damaged: its content is not what was saved; {_OTHER}")
    return content


def _reason(error: Exception) -> str:
    """What torch refuses to unpickle, if that is the reason."""
    found = re.search(r"Unsupported (?:global: GLOBAL|class) (\S+)", str(error))
    return f": it holds a {found[1]}, which is not loaded, since it could run code" if found else ""
