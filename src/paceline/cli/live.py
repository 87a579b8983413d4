"""`paceline live`: a web page that shows a run while it goes on."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import Annotated

import typer

from paceline.launcher.live_page import PORT, announce, listen


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
    # Imported here: the list of all verbs does without them.
    from paceline.report.live import LIMIT, is_loopback, serve
    from paceline.report.source import RunSource

    token = token or os.environ.get("PACELINE_TOKEN") or None
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(18)
    source = RunSource(run, LIMIT)
    if descriptor is None:
        listener = listen(host, port)
        announce(host, listener, token)
    else:
        listener = socket.socket(fileno=descriptor)
    with listener:
        serve(source, listener, host, token, until_over=until_over)
