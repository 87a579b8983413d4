"""torchrun as the engine: it has started this process, one of many, and looks after it. Only the script is missing."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from paceline.config import Launch


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def become(script: Path, arguments: Sequence[str], launch: Launch) -> NoReturn:
    """Run the script in place of this program, as torchrun itself would have: unbuffered, with the same process id."""
    os.execve(
        sys.executable, [sys.executable, "-u", str(script), *arguments], {**os.environ, **launch.to_environment()}
    )
