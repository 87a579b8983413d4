"""The first thing that runs in a worker that `paceline run` starts: a plain file, so that it runs before any import.

It ties the worker's life to the launcher's, runs the script as `python script.py` would, and leaves word of how it
ended for the launcher, who tells the user once instead of once per worker.
"""

import ctypes
import json
import os
import pathlib
import runpy
import signal
import sys
import traceback


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def _exit_report(path: str, error: BaseException) -> int:
    kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]
    usage = "paceline.errors.UsageError" in kinds
    told = traceback.TracebackException.from_exception(error)
    told.stack = traceback.StackSummary.from_list(
        [entry for entry in told.stack if entry.filename != __file__ and "runpy" not in entry.filename]
    )
    word = {
        "kind": type(error).__name__,
        "message": str(error),
        "usage": usage,
        "consequence": "paceline.errors.TeamError" in kinds,
        "traceback": "".join(told.format()),
    }
    pathlib.Path(path).write_text(json.dumps(word), encoding="utf-8")
    return 2 if usage else 1


def main() -> None:
    parent, exit_report, script = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    _die_with_parent(parent)
    sys.argv = sys.argv[3:]
    sys.path[0] = str(pathlib.Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit:
        raise
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a loader's process was killed
        code = _exit_report(exit_report, error)
        sys.last_value = error  # as the interpreter does it, for whoever is called at exit
        sys.exit(code)


if __name__ == "__main__":
    main()
