"""The system, Python and torch that Paceline needs; any Python can read this file."""

from __future__ import annotations

import sys

PYTHON = (3, 11)
TORCH = (2, 13)


def check_requirements() -> None:
    """Raises an ImportError of one sentence if a requirement is not met.

    Torch itself imports Paceline, for its backend, and must not fail for that: a program that uses Paceline is told
    when it imports it.
    """
    problem = unmet()
    if problem is not None and not _torch_is_being_imported():
        raise ImportError(problem)


def unmet() -> str | None:
    """One sentence about a requirement that is not met; None if all are. Torch is looked at once it is imported."""
    if sys.platform != "linux":
        return f"Paceline runs on Linux only, whose memfd and futex it needs; this is {sys.platform}"
    if sys.version_info < PYTHON:
        return f"Paceline needs Python {_shown(PYTHON)} or newer; this is {_shown(sys.version_info[:3])}"
    torch = sys.modules.get("torch")
    return None if torch is None else unmet_by(getattr(torch, "__version__", ""))


def unmet_by(version: str) -> str | None:
    """As `unmet`, for a version of torch, which is older than needed if it is no version at all."""
    numbers = version.split(".")[:2]
    if len(numbers) == 2 and all(map(str.isdecimal, numbers)) and tuple(map(int, numbers)) >= TORCH:
        return None
    found = f"this is {version}" if version else "this one has no version"
    return f"Paceline needs torch {_shown(TORCH)} or newer; {found}: pip install 'torch>={_shown(TORCH)}'"


def _torch_is_being_imported() -> bool:
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _shown(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
