"""The first code of a worker that an engine starts: a plain file, so that it runs before any import.

It ends the worker when the launcher dies, runs the script as `python script.py` would, and writes the script's error
into an exit report, so that the launcher shows it once instead of once per worker. A spare imports what takes long
first, and then waits for the script that it is to run.
"""

import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import pathlib
import runpy
import signal
import socket
import sys
import threading
import time
import traceback

_HIDDEN = (__file__, str(pathlib.Path(__file__).parents[1] / "launcher" / "call.py"))
"""Files that call the script's code: a traceback begins after them."""
_PATIENCE = 5.0
"""Seconds from the end of a script until the threads that keep its process alive are named."""


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def _exit_report(path: str, error: BaseException) -> int:
    kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]
    usage = "paceline.errors.UsageError" in kinds
    told = traceback.TracebackException.from_exception(error)
    told.stack = traceback.StackSummary.from_list(
        [entry for entry in told.stack if entry.filename not in _HIDDEN and "runpy" not in entry.filename]
    )
    report = {
        "kind": type(error).__name__,
        "message": str(error),
        "usage": usage,
        "consequence": "paceline.errors.TeamError" in kinds,
        "traceback": "".join(told.format()),
    }
    try:
        pathlib.Path(path).write_text(json.dumps(report), encoding="utf-8")
    except OSError:  # a full disk
        pathlib.Path(path).unlink(missing_ok=True)
        print(f"paceline: {error}" if usage else report["traceback"], file=sys.stderr)
    return 2 if usage else 1


def _tell_of_threads() -> None:
    """Says after a while which threads keep the process alive, though its script has ended."""

    def tell() -> None:
        time.sleep(_PATIENCE)
        # The executors' threads end by themselves once the interpreter waits for all.
        left = [thread.name for thread in threads if thread.is_alive()]
        if left:
            print(
                f"paceline: the script of rank {os.environ.get('RANK', '0')} has ended, but it still runs because of "
                f"its thread{'s' * (len(left) > 1)} {', '.join(left)}; make them daemon threads, or let them end",
                file=sys.stderr,
                flush=True,
            )

    threads = [one for one in threading.enumerate() if one is not threading.current_thread() and not one.daemon]
    if threads:
        threading.Thread(target=tell, daemon=True).start()


def _import_prelude() -> None:
    """Imports the module that the launcher wants imported before the script."""
    prelude = json.loads(os.environ.get("PACELINE_LAUNCH") or "{}").get("prelude")
    if prelude is not None:
        importlib.import_module(prelude)


def _wait_as_spare(connection: socket.socket, modules: list[str]) -> list[str]:
    """Imports modules, takes environment and descriptors from the launcher, and returns the words after its id."""
    name = pathlib.Path("/proc/self/comm")
    usual = name.read_bytes()
    name.write_bytes(b"paceline spare")  # what `ps` and `top` show
    for module in modules:
        importlib.import_module(module)
    header, received, *_ = socket.recv_fds(connection, 8, 64)
    if not header:
        sys.exit(0)  # the launcher needs it no more
    with connection, connection.makefile("rb") as source:
        order = json.loads(source.read(int.from_bytes(header, "big")))
    name.write_bytes(usual)
    os.environ.clear()
    os.environ.update(order["environment"])
    numbers = order["descriptors"]
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for one in received]
    for one in received:
        os.close(one)
    taken = False
    for number in numbers:
        with contextlib.suppress(OSError):
            os.fstat(number)
            taken = True
    for one, number in zip(moved, numbers, strict=True):
        os.dup2(one, number)
        os.close(one)
    if taken:  # a library has a file open under a number that the script knows: only a new program is free of it
        os.execv(sys.executable, [sys.executable, __file__, sys.argv[1], *order["words"]])
    return list(order["words"])


def main() -> None:
    """Arguments: the parent's process id, the path of the exit report, the script and its arguments.

    Without both of the first, as "0" and "", another launcher supervises the worker. Of a spare, instead of the script,
    `--spare=` with the descriptor of its connection to the launcher, and the modules that it imports.
    """
    parent, exit_report, script = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    if parent:
        _die_with_parent(parent)
    if script.startswith("--spare="):
        del sys.path[0]  # its folder has modules of this package, under other names
        connection = socket.socket(fileno=int(script.removeprefix("--spare=")))
        sys.argv[2:] = _wait_as_spare(connection, sys.argv[4:])
        sys.path.insert(0, "")
        exit_report, script = sys.argv[2], sys.argv[3]
    process = os.getpid()
    sys.argv = sys.argv[3:]
    sys.path[0] = str(pathlib.Path(script).resolve().parent)
    try:
        _import_prelude()
        runpy.run_path(script, run_name="__main__")
        _tell_of_threads()
    except SystemExit:
        _tell_of_threads()
        raise
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:
        if os.getpid() != process or not exit_report:  # a fork of the worker: its error is not the worker's
            raise
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a loader's process was killed
        code = _exit_report(exit_report, error)
        sys.last_value = error  # as the interpreter does it, for functions that run at exit
        sys.exit(code)


if __name__ == "__main__":
    main()
