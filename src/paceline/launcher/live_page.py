"""The live page of a run that this process launches."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

from paceline.errors import UsageError

PORT = 8642
_PATIENCE = 4.0
"""Seconds that the page's process has to end."""


class LivePage:
    """The live page of a run, in another process so that it takes no time of the launcher."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        token = os.environ.get("PACELINE_TOKEN") or None
        with listen("127.0.0.1", None) as listener:
            announce("127.0.0.1", listener, token)
            command = [sys.executable, "-m", "paceline", "live", str(self._folder), "--until-over"]
            command += ["--descriptor", str(listener.fileno())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[listener.fileno()]
            )

    def stop(self) -> None:
        """Wait for the page's process, which ends after the run; end it if it does not."""
        if self._process is None:
            return
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            try:
                self._process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def announce(host: str, listener: socket.socket, token: str | None) -> None:
    """Print the address of a page."""
    shown = f"[{host}]" if ":" in host else socket.gethostname() if host in ("0.0.0.0", "::") else host
    query = "" if token is None else f"?token={quote(token)}"
    print(f"paceline: live at http://{shown}:{listener.getsockname()[1]}/{query}", file=sys.stderr, flush=True)


def listen(host: str, port: int | None) -> socket.socket:
    """A listening socket, so that the address is known before anything is served."""
    for number in (PORT, 0) if port is None else (port,):
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, number), family=family)
        except OSError as error:
            if port is not None or number == 0:
                raise UsageError(f"cannot serve on {host} port {number}: {error.strerror or error}") from None
        except OverflowError:
            raise UsageError(f"--port is {port}; it must be from 0 to 65535") from None
    raise AssertionError
