"""Starts and ends the process that logs a run while it goes on."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from paceline.errors import UsageError
from paceline.events.private import write_private

PATIENCE = 60.0
"""Seconds after the end of a run in which its loggers may take the last values."""
_MORE = 10.0
"""Seconds in which the process must end after that."""
_REQUEST = "loggers.json"


class Logging(msgspec.Struct, frozen=True):
    """What to log a run to."""

    loggers: list[str] = []
    push_metrics: str | None = None
    """The URL of a Prometheus Pushgateway."""

    @property
    def arguments(self) -> list[str]:
        to = ["--to", ",".join(self.loggers)] if self.loggers else []
        return to + (["--push-metrics", self.push_metrics] if self.push_metrics else [])


def request_logging(folder: Path, wanted: Logging) -> None:
    """Asks the launcher of a run to log it; the lead calls it."""
    with contextlib.suppress(OSError):  # where nothing can be written, nothing is recorded either, which is said
        write_private(folder / _REQUEST, msgspec.json.encode(wanted) + b"\n")


class LoggingProcess:
    """A process that follows the records of a run and passes them to loggers."""

    def __init__(self, folder: Path, wanted: Logging) -> None:
        """wanted: what to log to; if that is nothing, what the run's lead asks for."""
        self._folder, self._wanted = folder, wanted
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it if it is known what to log to, and if it is not running."""
        if self._process is not None:
            return
        if not self._wanted.arguments:
            with contextlib.suppress(OSError, msgspec.DecodeError):
                self._wanted = msgspec.json.decode((self._folder / _REQUEST).read_bytes(), type=Logging)
        if self._wanted.arguments:
            command = [sys.executable, "-m", "paceline", "log", str(self._folder), *self._wanted.arguments]
            # Its own session: Ctrl-C is for the run, whose last values are still logged.
            self._process = subprocess.Popen(
                [*command, "--until-over"], stdin=subprocess.DEVNULL, start_new_session=True
            )

    def stop(self) -> None:
        """Wait for it, which ends after the run; end it if it does not."""
        if self._process is None:
            return
        try:
            self._process.wait(PATIENCE + _MORE)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.kill()
            self._process.wait()


def check_gateway(url: str) -> str:
    """The URL of a Pushgateway, if it is one."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--push-metrics is '{url}'; it must be a Pushgateway's address, such as http://gateway:9091")
    return url
