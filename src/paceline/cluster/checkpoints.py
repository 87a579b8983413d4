"""Where a run's checkpoints are."""

from __future__ import annotations

from pathlib import Path


def newest_checkpoint(folder: Path) -> Path | None:
    """The one that was written last of those in a run's folder."""
    found = list((folder / "checkpoints").glob("*.pt"))
    return max(found, key=lambda path: (path.stat().st_mtime_ns, path.name)) if found else None
