"""Starting servers and relays: servers by the launcher, which then supervises them, or else by the lead itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

from paceline.config import Launch
from paceline.transport.keys import VARIABLE as KEY

_PACKAGE = Path(__file__).parents[1]
BOOTSTRAP = _PACKAGE / "cluster" / "bootstrap.py"
SERVER = _PACKAGE / "server" / "main.py"
_RELAY = _PACKAGE / "relay" / "main.py"


class StartServers(msgspec.Struct, frozen=True):
    """The lead's request to the launcher."""

    servers: int
    address: str
    """At which the first server will listen; empty if there will be none, and nothing to join."""
    patience: float
    """Seconds for which a server waits for its workers."""
    paths: list[str]
    """The workers' module search path."""
    tolerates_loss: bool
    """True if the run can go on when a worker is lost."""
    first: int = 0
    """The number of the first of the servers."""
    relay_addresses: list[str] = []
    """By machine, the address at which workers join that are started there, if there are several."""

    def arguments(self, index: int) -> list[str]:
        """Command-line arguments of a server."""
        return [self.address, str(index), str(self.patience), *self.paths]


class Dismiss(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An engine's order to a server to let a worker leave; the worker first pushes the gradient that it computes."""

    rank: int


def start_servers(launch: Launch, request: StartServers) -> list[subprocess.Popen[bytes]]:
    """Have the servers started by the launcher; without one, start them as children of this process."""
    if launch.starter is not None:
        with socket.socket(fileno=os.dup(launch.starter)) as launcher:
            launcher.send(msgspec.msgpack.encode(request))
        return []
    return [
        subprocess.Popen(
            [sys.executable, str(BOOTSTRAP), str(os.getpid()), os.devnull, str(SERVER), *request.arguments(index)],
            stdin=subprocess.DEVNULL,
            env=_environment(),
        )
        for index in range(request.first, request.first + request.servers)
    ]


def start_relay(address: str, patience: float) -> subprocess.Popen[bytes]:
    """Start the relay of this machine. It outlives the worker that starts it, and ends when all have left it."""
    return subprocess.Popen(
        [sys.executable, str(_RELAY), address, str(patience)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=_environment(),
        start_new_session=True,
    )


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in (Launch.VARIABLE, KEY)}
