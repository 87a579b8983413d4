"""Transfers of a stage runner."""

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import WorkerLost
from paceline.pipeline.stage_runner import StageRunner


def test_a_transfer_that_failed_is_an_error_though_it_is_done() -> None:
    runner: Any = StageRunner.__new__(StageRunner)
    runner._sending = [
        SimpleNamespace(done=True, error=None),
        SimpleNamespace(done=True, error=WorkerLost("rank 1 died", [1])),
    ]
    with pytest.raises(WorkerLost, match="rank 1 died"):
        runner._check_sent()
