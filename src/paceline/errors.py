"""Everything Paceline raises on purpose.

PacelineError
├── UsageError            what was asked for cannot be; says what is allowed      (a ValueError; exit code 2)
└── TeamError             the team cannot go on                                   (a RuntimeError)
    ├── JoinError         the members did not come together
    ├── WorkerLost        a worker died, or its script ended, while others needed it
    ├── ServerLost        a process that holds the parameters died
    ├── TeamTimeout       a worker is alive but did not come in time
    └── Mismatch          the workers do not do the same thing
"""

from collections.abc import Sequence


class PacelineError(Exception):
    """The root of the tree: catches everything below and nothing else."""


class UsageError(PacelineError, ValueError):
    """Bad input: one sentence that says what was wrong and what is allowed."""


class TeamError(PacelineError, RuntimeError):
    """The team cannot go on; `ranks` names those to blame."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class JoinError(TeamError):
    """The members of a team did not come together in time, or cannot share memory."""


class WorkerLost(TeamError):
    """A worker died, or left the team, while others needed it."""


class ServerLost(TeamError):
    """A server died, and with it the newest version of the parameters."""


class TeamTimeout(TeamError):
    """A worker is alive but did not come within the timeout."""


class Mismatch(TeamError):
    """The workers do not do the same thing: one is at an update, another at a barrier, say."""


def names(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 1 and 2`, `ranks 1, 2 and 5`: how messages speak of workers."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    listed = [str(rank) for rank in ranks]
    return f"ranks {', '.join(listed[:-1])} and {listed[-1]}"
