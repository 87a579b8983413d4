"""Where the progress line of a run is shown: on a terminal, in a notebook's cell, or now and then among the output."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text


class LineDisplay:
    """Shows nothing; the base of those that do."""

    interval = 0.5
    """Seconds between two lines."""

    def start(self) -> None:
        """The run starts."""

    def show(self, line: str) -> None:
        """Replace the line."""

    def hide(self) -> None:
        """Other output follows."""

    def stop(self) -> None:
        """The run is over."""


class PlainLine(LineDisplay):
    """Prints a line now and then."""

    interval = 10.0

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def show(self, line: str) -> None:
        self._write(line)


class TerminalLine(LineDisplay):
    """Rewrites the last line of a terminal."""

    def __init__(self, console: Console) -> None:
        self._live = Live(Text(""), console=console, auto_refresh=False, transient=True)

    def start(self) -> None:
        self._live.start()

    def show(self, line: str) -> None:
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis", style="dim"), refresh=True)

    def hide(self) -> None:
        if self._live.is_started:
            self._live.update(Text(""), refresh=True)

    def stop(self) -> None:
        self._live.stop()


class NotebookLine(LineDisplay):
    """Rewrites one output of a notebook's cell, which a report may take the place of."""

    def __init__(self) -> None:
        self._output: Any = None

    def show(self, line: str) -> None:
        self.replace({"text/plain": line}, raw=True)

    def replace(self, content: Any, *, raw: bool = False) -> None:
        """Show this instead; raw: it is a dictionary of MIME types."""
        from IPython.display import display  # it is there, or this would be no notebook

        if self._output is None:
            self._output = display(content, raw=raw, display_id=True)
        else:
            self._output.update(content, raw=raw)


def in_notebook() -> bool:
    """True if this process is the kernel of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


def line_display(write: Callable[[str], None]) -> LineDisplay:
    """The display for where this process runs; `write` prints a line among the output."""
    if in_notebook():
        return NotebookLine()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    return TerminalLine(console) if console.is_terminal else PlainLine(write)
