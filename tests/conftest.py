"""Every session of tests runs under a guard."""

import gc
import os
import sys

import pytest
from helpers import guard, load
from helpers.huge_pages import prepare_to_fork

gc.set_threshold(50_000)
# As the Makefile does: none of the processes that tests start should compile again what another one has compiled.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Threads of a process that forks others spin while they wait: without this a session takes twice as much CPU time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
_module: object = None


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist's workers are children of a session
        guard.start()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Function) -> None:
    global _module
    load.begin_test()
    if item.module is not _module:
        _module = item.module
        if "torch" in sys.modules:  # its tests may fork
            prepare_to_fork()
