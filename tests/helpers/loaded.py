"""Imports what a worker imports once it needs it: here once, instead of in every worker that is forked."""

import importlib
import pkgutil

import torch  # first, so that paceline makes its backend known

import paceline
from helpers.huge_pages import prepare_to_fork

_ELSEWHERE = ("paceline.__main__", "paceline.bench", "paceline.cli", "paceline.report")
"""Of commands, not of workers."""

for module in pkgutil.walk_packages(paceline.__path__, "paceline."):
    if not module.name.startswith(_ELSEWHERE):
        importlib.import_module(module.name)

# The first model to be traced waits for another second's imports.
torch.export.export(torch.nn.Linear(1, 1), (torch.ones(1, 1),), strict=False)
prepare_to_fork()
