"""Who tells a launcher to stop is heard, whatever it does at that moment."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from paceline.cluster.engines.base import EngineCallbacks, Job
from paceline.cluster.engines.local import LocalEngine
from paceline.cluster.supervision import Interrupted
from paceline.config import Launch


class Struck:
    """Is told to stop where Python prints exceptions and forgets them."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_in_a_finalizer_of_the_launcher_is_not_lost(tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text("import time; time.sleep(20)")

    def tick() -> None:
        Struck()

    engine = LocalEngine(Job(script=script, workers=1))
    with pytest.raises(Interrupted, match="SIGINT"):
        engine.run(Launch(folder=str(tmp_path)), EngineCallbacks(tick=tick))
