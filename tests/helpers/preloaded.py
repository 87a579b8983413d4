"""A process that has imported modules which take seconds, from which the calls of tests are forked.

The test's own process does not import them: it forks the workers of other tests, too.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from helpers.huge_pages import prepare_to_fork
from helpers.support import answered


class Preloaded:
    """Calls functions of modules in forks of a process that has imported `modules`, until its context exits."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules

    def __enter__(self) -> Preloaded:
        self._end, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(
            target=_serve, args=(theirs, self._end, self._modules), daemon=False
        )
        self._process.start()
        theirs.close()
        return self

    def call(self, function: Callable[..., Any], *arguments: Any, timeout: float = 120.0) -> Any:
        """What the function returns; its error is raised here."""
        self._end.send_bytes(pickle.dumps((function, arguments)))
        assert answered(self._end, timeout), f"{function.__name__} took more than {timeout} s"
        fine, value = pickle.loads(self._end.recv_bytes())
        if not fine:
            raise AssertionError(value)
        return value

    def __exit__(self, *_: object) -> None:
        self._end.close()
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(end: Connection, other: Connection, modules: tuple[str, ...]) -> None:
    other.close()  # or its end would not be noticed
    for module in modules:
        importlib.import_module(module)
    prepare_to_fork()
    while True:
        try:
            request = end.recv_bytes()
        except EOFError:
            return
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                end.send_bytes(_called(request))
                code = 0
            finally:
                os._exit(code)
        os.waitpid(pid, 0)


def _called(request: bytes) -> bytes:
    function, arguments = pickle.loads(request)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            return pickle.dumps((True, function(*arguments)))
        except BaseException:
            return pickle.dumps((False, traceback.format_exc()))
    return pickle.dumps((False, "interrupted"))
