"""Forks in place of Python programs that other programs start: agents of Ray, scripts of a cluster, shells.

`forks.Fork` replaces programs that a test starts itself. Here a program is started as ever, by any process, with the
variables of a `ForkServer` in its environment. Its interpreter runs `fork_client/sitecustomize.py` first, which hands
command line, environment, working directory, network namespace and open files to the server. The server has imported
torch, and forks a process that is the program; the interpreter stays as its proxy. Signals that it gets are passed on,
each of the two dies when the other one does, and it ends with the program's exit status.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import selectors
import signal
import socket
import struct
import tempfile
from pathlib import Path
from typing import Any

from helpers.forks import Fork, fork_programs
from helpers.support import PACELINE, PYTHON, TORCHRUN

_CLIENT = Path(__file__).with_name("fork_client")
_CLONE_NEWNET = 0x40000000
_REQUEST = 1 << 20
_DESCRIPTORS = 64
_LIBC = ctypes.CDLL(None, use_errno=True)


class ForkServer:
    """Forks programs for others, until its context exits; `variables` are for the environment of those programs."""

    def __enter__(self) -> ForkServer:
        self._folder = tempfile.TemporaryDirectory(prefix="f")
        path = str(Path(self._folder.name) / "s")
        self.variables = {"PYTHONPATH": str(_CLIENT), "PACELINE_TEST_FORKS": path}
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(path)
        listener.listen(64)
        self._process = multiprocessing.get_context("fork").Process(target=_serve, args=(listener,), daemon=True)
        self._process.start()
        listener.close()
        return self

    @property
    def words(self) -> list[str]:
        """Options of `paceline run --on ray` by which its workers and servers are such programs."""
        return [word for name, value in self.variables.items() for word in ("--env", f"{name}={value}")]

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._folder.cleanup()


class _Network:
    """The network namespace of a process."""

    def __init__(self, pid: int) -> None:
        self._descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)

    def enter(self) -> None:
        if _LIBC.setns(self._descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "cannot enter the network namespace")

    def close(self) -> None:
        os.close(self._descriptor)


def _serve(listener: socket.socket) -> None:
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    fork_programs()  # those that the programs start
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ, None)
    while True:
        for key, _ in selector.select():
            if key.data is None:
                proxy = listener.accept()[0]
                with contextlib.suppress(OSError, ValueError):  # it was killed before it had asked
                    program = _start(proxy)
                    ended = os.pidfd_open(program.pid)
                    selector.register(proxy, selectors.EVENT_READ, (program, proxy, ended))
                    selector.register(ended, selectors.EVENT_READ, (program, proxy, ended))
                continue
            program, proxy, ended = key.data
            if key.fd not in selector.get_map():
                continue  # it was handled a moment ago
            message = b"" if key.fd == ended else _received(proxy)
            if message:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(program.pid, message[0])
                continue
            if key.fd != ended:
                program.kill()
            code = program.wait()
            with contextlib.suppress(OSError):
                proxy.send(struct.pack("i", code))
            for one in (proxy, ended):
                selector.unregister(one)
            proxy.close()
            os.close(ended)


def _received(proxy: socket.socket) -> bytes:
    try:
        return proxy.recv(1)
    except OSError:
        return b""


def _start(proxy: socket.socket) -> Any:
    content, descriptors, _, _ = socket.recv_fds(proxy, _REQUEST, _DESCRIPTORS)
    asked = json.loads(content)
    pid = struct.unpack("3i", proxy.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    network = _Network(pid)
    given = dict(zip(asked["descriptors"], descriptors, strict=True))
    try:
        return Fork(
            _words(asked["words"]),
            cwd=asked["cwd"],
            env=asked["environment"],
            start_new_session=True,
            host=network,
            stdout=given.pop(1, None),
            stderr=given.pop(2, None),
            descriptors=given,
        )
    finally:
        network.close()
        for descriptor in descriptors:
            os.close(descriptor)


def _words(words: list[str]) -> list[str]:
    """The command line as `Fork` knows it; a worker's bootstrap checks that its parent is the one named there."""
    if words[1] in (TORCHRUN, PACELINE):
        return words[1:]
    if words[1].endswith("cluster/bootstrap.py"):
        words[2] = str(os.getpid())
    return [PYTHON, *words[1:]]
