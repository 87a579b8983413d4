"""Engines by name: each starts the processes of a run in its own place. A new engine is one file and one line here."""

from __future__ import annotations

from paceline.cluster.engines.base import Engine
from paceline.cluster.engines.local import LocalEngine
from paceline.cluster.engines.ray import RayEngine
from paceline.cluster.engines.torchrun import TorchrunEngine
from paceline.config.checks import listed
from paceline.errors import UsageError

ENGINES: dict[str, type[Engine]] = {engine.NAME: engine for engine in (LocalEngine, RayEngine, TorchrunEngine)}


def selectors() -> list[str]:
    """Forms of the value of `--on`."""
    return [selector for engine in ENGINES.values() for selector in engine.SELECTORS]


def detected_engine() -> type[Engine] | None:
    """The engine that has started this process as a worker, if there is one."""
    return next((engine for engine in ENGINES.values() if engine.detected()), None)


def find_engine(on: str) -> type[Engine]:
    """The engine that a value of `--on` selects."""
    for engine in ENGINES.values():
        for selector in engine.SELECTORS:
            scheme, separator, _ = selector.partition("://")
            if on == selector or (separator and on.startswith(scheme + separator)):
                return engine
    raise UsageError(f"--on is '{on}'; it must be {listed(selectors())}")
