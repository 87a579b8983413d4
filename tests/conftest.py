"""Every session of tests runs under a guard."""

import pytest
from helpers import guard, load


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist's workers are children of a session
        guard.start()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    load.begin_test()
