"""Imports what a worker imports once it needs it: here once, instead of in every worker that is forked."""

import importlib
import pkgutil

import torch  # noqa: F401  (first, so that paceline makes its backend known)

import paceline

_ELSEWHERE = ("paceline.__main__", "paceline.bench", "paceline.cli", "paceline.report")
"""Of commands, not of workers."""

for module in pkgutil.walk_packages(paceline.__path__, "paceline."):
    if not module.name.startswith(_ELSEWHERE):
        importlib.import_module(module.name)
