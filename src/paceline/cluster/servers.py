"""How a team gets its servers: from the launcher, who then looks after them, or else from the lead itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

from paceline.config import Launch
from paceline.transport.keys import VARIABLE as KEY

_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
_PACKAGE = Path(__file__).parents[1]
_MAIN = _PACKAGE / "server" / "main.py"
_RELAY = _PACKAGE / "relay" / "main.py"


class Start(msgspec.Struct, frozen=True):
    """What the lead asks the launcher for."""

    servers: int
    address: str
    patience: float
    paths: list[str]
    """Where the workers find modules."""
    spare: bool
    """Whether the run can go on when a worker is lost."""
    first: int = 0
    """The number of the first of them."""
    relay_addresses: list[str] = []
    """By machine, the address at which workers join that are started there, if there are several."""


class Dismiss(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What a server is told by an engine that wants a worker to leave; it first pushes what it computes."""

    rank: int


def command(start: Start, index: int, parent: int, exit_report: Path) -> list[str]:
    """How a server is started that dies with `parent`."""
    return [sys.executable, str(_BOOTSTRAP), str(parent), str(exit_report), str(_MAIN), *arguments_of(start, index)]


def arguments_of(start: Start, index: int) -> list[str]:
    """What a server is told on its command line."""
    return [start.address, str(index), str(start.patience), *start.paths]


def start_servers(launch: Launch, start: Start) -> list[subprocess.Popen[bytes]]:
    """Have the servers started; by this process itself if no launcher of ours is there to do it."""
    if launch.starter is not None:
        with socket.socket(fileno=os.dup(launch.starter)) as launcher:
            launcher.send(msgspec.msgpack.encode(start))
        return []
    return [
        subprocess.Popen(
            command(start, index, os.getpid(), Path(os.devnull)),
            stdin=subprocess.DEVNULL,
            env=_environment(),
        )
        for index in range(start.first, start.first + start.servers)
    ]


def start_relay(address: str, patience: float) -> subprocess.Popen[bytes]:
    """Start the relay of this machine. It belongs to no worker, and ends when all have left it."""
    return subprocess.Popen(
        [sys.executable, str(_RELAY), address, str(patience)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=_environment(),
        start_new_session=True,
    )


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in (Launch.VARIABLE, KEY)}
