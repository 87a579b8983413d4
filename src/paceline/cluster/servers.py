"""Starting servers and relays: servers by the launcher, which then supervises them, or else by the lead itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.config import Launch
from paceline.transport.keys import VARIABLE as KEY

_PACKAGE = Path(__file__).parents[1]
BOOTSTRAP = _PACKAGE / "cluster" / "bootstrap.py"
SERVER = _PACKAGE / "server" / "main.py"
_RELAY = _PACKAGE / "relay" / "main.py"


class StartServers(msgspec.Struct, frozen=True, tag=True):
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
    needs_lead: bool = False
    """True if it cannot when the lead is, which holds parameters itself."""
    first: int = 0
    """The number of the first of the servers."""
    peers: bool = False
    """True if a worker listens at the address: there is no server, and the team has room for its first ranks only."""
    relay_addresses: list[str] = []
    """By machine, the address at which workers join that are started there, if there are several."""

    def arguments(self, index: int, descriptors: Sequence[int] = (), *, keep: bool = False) -> list[str]:
        """Command-line arguments of a server; descriptors: of the run's memory, if it is started again.

        keep: True if it is started for the first time, and again by itself.
        """
        memory = ("keep:" if keep else "") + (",".join(map(str, descriptors)) or "-")
        return [self.address, str(index), str(self.patience), memory, *self.paths]


class EndWorkers(msgspec.Struct, frozen=True, tag=True):
    """The lead's request to the launcher to end workers that were evicted: on their machines no other can do it."""

    ranks: list[int]


LeadRequest = StartServers | EndWorkers
"""What the lead sends to the launcher."""


class Dismiss(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An engine's order to a server to let a worker leave; the worker first pushes the gradient that it computes."""

    rank: int


def start_servers(
    launch: Launch, request: StartServers, descriptors: Sequence[int] = ()
) -> list[subprocess.Popen[bytes]]:
    """Have the servers started by the launcher; without one, start them as children of this process.

    descriptors: of the run's memory, which the launcher keeps, or a process for each server, to start it again.
    """
    if tell_launcher(launch, request, descriptors):
        return []
    started = [sys.executable, str(BOOTSTRAP), str(os.getpid()), os.devnull, str(SERVER)]
    return [
        subprocess.Popen(
            [*started, *request.arguments(index, descriptors, keep=bool(descriptors))],
            stdin=subprocess.DEVNULL,
            env=_environment(),
            pass_fds=descriptors,
        )
        for index in range(request.first, request.first + request.servers)
    ]


def tell_launcher(launch: Launch, request: LeadRequest, descriptors: Sequence[int] = ()) -> bool:
    """Send the launcher a request of the lead; False if there is no launcher that takes any."""
    if launch.starter is None:
        return False
    launcher = socket.socket(fileno=launch.starter)
    try:
        socket.send_fds(launcher, [msgspec.msgpack.encode(request)], list(descriptors))
    finally:
        launcher.detach()  # it stays open; a copy would need one more descriptor
    return True


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
