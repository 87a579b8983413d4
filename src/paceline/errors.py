"""Exceptions of Paceline.

PacelineError
├── UsageError            wrong input; the message states what is allowed         (a ValueError; exit code 2)
└── TeamError             the team cannot go on; `ranks` names the workers        (a RuntimeError; exit code 1)
    ├── JoinError         workers, servers or machines did not find each other in time
    ├── WorkerLost        a worker died, or its script ended, while others needed it
    ├── ServerLost        a process that holds parameters died
    ├── TeamTimeout       a worker is alive but did not arrive in time
    └── Mismatch          the workers are at different operations, or have different models
"""

from collections.abc import Sequence


class PacelineError(Exception):
    """Base class of all exceptions of Paceline."""


class UsageError(PacelineError, ValueError):
    """Wrong input. The message is one sentence: what is wrong, and what is allowed."""


class TeamError(PacelineError, RuntimeError):
    """The team cannot go on. `ranks` names the workers that are the cause."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class JoinError(TeamError):
    """The members of a team did not find each other in time, or cannot share memory."""


class WorkerLost(TeamError):
    """A worker died, or left the team, while others needed it."""


class ServerLost(TeamError):
    """A server died, and the newest version of its parameters with it."""


class TeamTimeout(TeamError):
    """A worker is alive but did not arrive within the timeout."""


class Mismatch(TeamError):
    """The workers are at different operations: one at an update and another at a barrier, for example."""


FORK = "this process is a fork of a worker, which is no member of the team; use the team in the worker itself"
"""The message of a UsageError in a process that a script has forked."""


def names(ranks: Sequence[int]) -> str:
    """Workers as messages name them: `rank 3`, `ranks 1 and 2`, `ranks 1, 2 and 5`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    listed = [str(rank) for rank in ranks]
    return f"ranks {', '.join(listed[:-1])} and {listed[-1]}"


def error_from(kind: str, message: str, ranks: Sequence[int]) -> TeamError:
    """The error of another process; `kind` is the name of its class."""
    known = globals().get(kind)
    if isinstance(known, type) and issubclass(known, TeamError):
        return known(message, ranks)
    return TeamError(message, ranks)


def waited_too_long(who: str, waited: float, others: str, where: str, limit: float) -> str:
    """The message of a `TeamTimeout`; times in seconds."""
    return f"{who} waited {waited:.1f} s for {others} at {where}; the timeout is {limit:g} s"


def still_waits(who: str, waited: float, others: str, where: str, limit: float) -> str:
    """The notice about a wait that may become a `TeamTimeout`; times in seconds."""
    return f"{who} waits for {others} at {where}: {waited:.0f} s so far, the timeout is {limit:g} s"


def left_out_step(ranks: Sequence[int], first: int) -> Mismatch:
    """The error of workers that are at another batch than the first one."""
    return Mismatch(
        f"{names(ranks)} updates with another batch of the loader than rank {first}: it has left out optimizer.step() "
        "for a batch, which all workers must do alike",
        ranks,
    )


def unlike_rates(rank: int, first: int) -> str:
    """Says that a worker's hyperparameters are not those of the first one."""
    return (
        f"rank {rank}'s learning rate, or another value of its optimizer, is not that of rank {first}, which is used; "
        "let schedulers depend on values that are the same on all workers, as team.mean gives"
    )
