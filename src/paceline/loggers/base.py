"""A logger: shows the values of a run in another tool, while it goes on or afterwards."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from paceline.errors import UsageError
from paceline.events.scalars import Values


class Logger(ABC):
    """Passes values to another tool. It runs in a thread of a process beside the training; what it raises is said once.

    A new one is a file with a subclass, and a line in the registry.
    """

    NAME: ClassVar[str]
    MODULE: ClassVar[str]
    """The module that it needs."""
    PACKAGE: ClassVar[str]
    """The package that has this module, for pip."""

    @abstractmethod
    def __init__(self, folder: Path) -> None:
        """folder: of the run, whose name it has."""

    @abstractmethod
    def configure(self, config: dict[str, Any]) -> None:
        """Takes the run's configuration; called once, before the first values if it is known by then."""

    @abstractmethod
    def log(self, values: Sequence[Values]) -> None:
        """Takes values, whose step is their version."""

    @abstractmethod
    def close(self) -> None:
        """The run is over; returns when all values have arrived."""

    @classmethod
    def check(cls) -> None:
        """Refuses if what it needs is not installed; does not import it."""
        if importlib.util.find_spec(cls.MODULE) is None:
            raise UsageError(f"the logger {cls.NAME} needs the package {cls.PACKAGE}: pip install {cls.PACKAGE}")
