"""The checkpoints in a run's folder."""

from __future__ import annotations

from pathlib import Path


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of a run that was written last."""
    found = list((folder / "checkpoints").glob("*.pt"))
    return max(found, key=lambda path: (path.stat().st_mtime_ns, path.name)) if found else None
