"""A real Jupyter kernel, whose cells a test runs one by one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import paceline
from helpers.fork_server import ForkServer
from helpers.load import allowed
from helpers.support import environment

_SOURCE = Path(paceline.__file__).parents[1]
_MARK = "PACELINE_TEST_KERNEL"
"""Names the kernel's folder in the environment of all processes that come from it."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Cell:
    """The outputs of a cell that has run."""

    def __init__(self, outputs: list[Any]) -> None:
        self.outputs = outputs

    def text(self, stream: str = "stdout") -> str:
        """What it has printed."""
        return "".join(one["text"] for one in self.outputs if one["output_type"] == "stream" and one["name"] == stream)

    def shown(self, kind: str) -> list[str]:
        """Its displays of this MIME type."""
        found = [one.get("data", {}).get(kind) for one in self.outputs]
        return ["".join(one) for one in found if one is not None]

    @property
    def error(self) -> str:
        """The traceback that the notebook shows, without colours; empty if there is none."""
        found = [one for one in self.outputs if one["output_type"] == "error"]
        return _COLOURS.sub("", "\n".join(line for one in found for line in one["traceback"]))


class Kernel:
    """A kernel in a folder of its own; the workers that its cells launch start at once, as forks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._client = NotebookClient(
            nbformat.v4.new_notebook(), timeout=int(allowed(120.0)), kernel_name="python3", allow_errors=True
        )
        self._count = 0

    def __enter__(self) -> Kernel:
        server = self._stack.enter_context(ForkServer())
        paths = os.pathsep.join([server.variables["PYTHONPATH"], str(_SOURCE)])
        variables = environment(**{**server.variables, "PYTHONPATH": paths, _MARK: str(self._folder)})
        self._stack.enter_context(self._client.setup_kernel(env=variables, cwd=str(self._folder)))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, source: str, meanwhile: Callable[[], None] | None = None) -> Cell:
        """Run a cell to its end, and call `meanwhile` in another thread while it runs."""
        cell = nbformat.v4.new_code_cell(source)
        self._client.nb.cells.append(cell)
        other = None if meanwhile is None else threading.Thread(target=meanwhile)
        if other is not None:
            other.start()
        with contextlib.suppress(CellExecutionError):  # it is among the outputs
            self._client.execute_cell(cell, self._count)
        if other is not None:
            other.join()
        self._count += 1
        return Cell(cell["outputs"])

    def interrupt(self) -> None:
        """As the button of a notebook does it: to all processes of the kernel's group."""
        os.killpg(os.getpgid(self.pid), signal.SIGINT)

    @property
    def pid(self) -> int:
        manager: Any = self._client.km
        return int(manager.provisioner.pid)

    def processes(self) -> list[int]:
        """All that live of the programs that its cells have started, except for the kernel itself."""
        mark, found = f"{_MARK}={self._folder}".encode(), []
        for path in Path("/proc").iterdir():
            if path.name.isdecimal() and int(path.name) != self.pid:
                with contextlib.suppress(OSError):
                    if mark in (path / "environ").read_bytes().split(b"\0"):
                        found.append(int(path.name))
        return found
