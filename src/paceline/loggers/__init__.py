"""Loggers: the values of a run in TensorBoard, Weights & Biases or MLflow, from its events."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from paceline.config.checks import one_of
from paceline.loggers.base import Logger

LOGGERS = {
    "tensorboard": "TensorBoardLogger",
    "wandb": "WandbLogger",
    "mlflow": "MlflowLogger",
}
"""By name, the class in the module of the same name."""


def logger_class(name: str) -> type[Logger]:
    """The class of a logger; what it needs is imported when one is made."""
    found: type[Logger] = getattr(importlib.import_module(f"paceline.loggers.{name}"), LOGGERS[name])
    return found


def parse_loggers(given: str | Iterable[str] | None, option: str = "--log") -> list[str]:
    """Names of loggers, from a list or a text with commas; refuses unknown ones and those that are not installed."""
    words = given.split(",") if isinstance(given, str) else list(given or ())
    names = list(dict.fromkeys(word.strip() for word in words))
    for name in names:
        one_of(option, name, tuple(LOGGERS))
        logger_class(name).check()
    return names


__all__ = ["LOGGERS", "Logger", "logger_class", "parse_loggers"]
