"""Processes in which a peer's program runs again in another role. Needs nothing but Python."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

_PR_SET_PDEATHSIG = 1


def start(role: dict[str, Any], stack: contextlib.ExitStack) -> None:
    """Start this program in another role, until the stack unwinds. If it fails before that, this process ends."""
    process = subprocess.Popen([sys.executable, sys.argv[0], json.dumps(role | {"parent": os.getpid()})])
    over = threading.Event()

    def guard() -> None:
        if process.wait() and not over.is_set():
            print(f"A process ended with {process.returncode}: {role}", file=sys.stderr, flush=True)
            os._exit(1)  # The main thread may wait for that process in a call that nothing can interrupt.

    threading.Thread(target=guard, daemon=True).start()
    stack.callback(process.wait)
    stack.callback(process.kill)
    stack.callback(over.set)


def die_with_parent(role: dict[str, Any]) -> bool:
    """Let the kernel end this process with its parent; False if the parent has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == int(role["parent"])
