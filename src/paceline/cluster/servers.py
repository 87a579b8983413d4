"""How a team gets its servers: from the launcher, who then looks after them, or else from the lead itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

from paceline.config import Launch

_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
_MAIN = Path(__file__).parent.parent / "server" / "main.py"


class Start(msgspec.Struct, frozen=True):
    """What the lead asks the launcher for."""

    servers: int
    address: str
    patience: float
    paths: list[str]
    """Where the workers find modules."""
    spare: bool
    """Whether the run can go on when a worker is lost."""


class Dismiss(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What a server is told by an engine that wants a worker to leave; it first pushes what it computes."""

    rank: int


def command(start: Start, index: int, parent: int, farewell: Path) -> list[str]:
    """How a server is started that dies with `parent`."""
    return [sys.executable, str(_BOOTSTRAP), str(parent), str(farewell), str(_MAIN), *arguments_of(start, index)]


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
            env={key: value for key, value in os.environ.items() if key != Launch.VARIABLE},
        )
        for index in range(start.servers)
    ]
