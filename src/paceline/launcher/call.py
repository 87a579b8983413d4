"""The script of a worker that `launch` has started: calls the function that it finds in the launcher's memory."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from paceline.errors import UsageError
from paceline.launcher.payload import answer, receive


def main() -> None:
    call, *answers = map(int, sys.argv[1:])
    rank, process = int(os.environ["RANK"]), os.getpid()
    own = answers[rank] if rank < len(answers) else None  # None for one that joined later
    try:
        function, arguments = receive(call)
        value = _called(function, arguments)
    except Exception as error:
        if own is not None and os.getpid() == process:
            with contextlib.suppress(Exception):  # then its text alone is known
                answer(own, False, error)
        raise
    if rank == 0 and own is not None and os.getpid() == process:
        try:
            answer(own, True, value)
        except Exception as error:
            raise UsageError(
                f"the function's result, a {type(value).__name__}, cannot be copied back: {error}; return numbers, "
                "tensors, a model or its state_dict()"
            ) from error


def _called(function: Any, arguments: Any) -> Any:
    try:
        value = function(*arguments)
    except SystemExit as end:
        if end.code:
            raise
        value = None
    if "paceline.team.current" in sys.modules:  # otherwise there is no team to leave
        from paceline.team.current import joined

        if (team := joined()) is not None:
            team.close()  # model and optimizer are plain torch again, so that they can be copied
    return value


if __name__ == "__main__":
    main()
