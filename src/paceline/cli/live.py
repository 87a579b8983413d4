"""`paceline live`: a web page that shows a run while it goes on."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from paceline.errors import UsageError

PORT = 8642
_PATIENCE = 4.0
"""Seconds that the page's process has to end."""


def live(
    run: Annotated[Path, typer.Argument(help="The folder of the run.", show_default=False)],
    host: Annotated[
        str, typer.Option(help="The address to serve on; other addresses than loopback need a token.")
    ] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help=f"The port to serve on. [default: {PORT}, or a free one]")] = None,
    token: Annotated[
        str | None,
        typer.Option(
            help="A secret that readers must give. [default: $PACELINE_TOKEN, or a random one where it is needed]"
        ),
    ] = None,
    until_over: Annotated[bool, typer.Option("--until-over", help="End when the run does.")] = False,
    descriptor: Annotated[int | None, typer.Option(hidden=True, help="Of the socket to serve on.")] = None,
) -> None:
    """Show a run while it goes on, as a web page that cannot change it.

    The page has the report's figures and a table of the workers; `/metrics` is for Prometheus.

    Example: `paceline live runs/first --port 8700`
    """
    # Imported here: `paceline run` only starts the page in another process.
    from paceline.report.live import LIMIT, is_loopback, serve
    from paceline.report.source import RunSource

    token = token or os.environ.get("PACELINE_TOKEN") or None
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(18)
    source = RunSource(run, LIMIT)
    if descriptor is None:
        listener = _listen(host, port)
        _announce(host, listener, token)
    else:
        listener = socket.socket(fileno=descriptor)
    with listener:
        serve(source, listener, host, token, until_over=until_over)


class LivePage:
    """The live page of a run, in another process so that it takes no time of the launcher."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        token = os.environ.get("PACELINE_TOKEN") or None
        with _listen("127.0.0.1", None) as listener:
            _announce("127.0.0.1", listener, token)
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


def _announce(host: str, listener: socket.socket, token: str | None) -> None:
    shown = f"[{host}]" if ":" in host else socket.gethostname() if host in ("0.0.0.0", "::") else host
    query = "" if token is None else f"?token={quote(token)}"
    print(f"paceline: live at http://{shown}:{listener.getsockname()[1]}/{query}", file=sys.stderr, flush=True)


def _listen(host: str, port: int | None) -> socket.socket:
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
