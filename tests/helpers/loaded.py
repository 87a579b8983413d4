"""Imports what a worker imports once it needs it: here once, instead of in every worker that is forked."""

import importlib
import pkgutil

import torch  # noqa: F401  (first, so that paceline makes its backend known)

import paceline
from helpers.huge_pages import prepare_to_fork
from helpers.split_models import MODELS, made
from paceline.graph.trace.exporting import exported

_ELSEWHERE = ("paceline.__main__", "paceline.bench", "paceline.cli", "paceline.integrations", "paceline.report")
"""Of commands, not of workers."""

for module in pkgutil.walk_packages(paceline.__path__, "paceline."):
    if not module.name.startswith(_ELSEWHERE):
        importlib.import_module(module.name)

# The first model to be traced waits for another second's imports, and the first call of every operator for its rules.
for kind in ("transformer", "convnet"):
    exported(made(kind), (MODELS[kind][1]()[:16][0],), {})
prepare_to_fork()
