"""Exceptions of Paceline.

PacelineError
├── UsageError            wrong input; the message states what is allowed         (a ValueError; exit code 2)
│   └── InvalidCall       wrong arguments of a collective of the backend           (a RuntimeError, too)
└── TeamError             the team cannot go on; `ranks` names the workers        (a RuntimeError; exit code 1)
    ├── JoinError         workers, servers or machines did not find each other in time
    ├── WorkerLost        a worker died, or its script ended, while others needed it
    ├── ServerLost        a process that holds parameters died
    ├── TeamTimeout       a worker is alive but did not arrive in time
    └── Mismatch          the workers are at different operations, or have different models
"""

import resource
from collections.abc import Mapping, Sequence

_WHOLE = 1.0 - 1e-6
"""The sum of shares of a whole batch, less rounding errors."""


class PacelineError(Exception):
    """Base class of all exceptions of Paceline."""


class UsageError(PacelineError, ValueError):
    """Wrong input. The message is one sentence: what is wrong, and what is allowed."""


class InvalidCall(UsageError, RuntimeError):
    """Wrong arguments of a collective; torch's own backends raise RuntimeErrors for them."""


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

    UNTOLD = "the server, which holds the parameters, died"
    """The message where its connection has ended without a reason."""


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


def too_few_files() -> str:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"{limit} open files, which is the limit here, are too few; raise it with ulimit -n"


def left_out_step(ranks: Sequence[int], first: int) -> Mismatch:
    """The error of workers that are at another batch than the first one."""
    return Mismatch(
        f"{names(ranks)} updates with another batch of the loader than rank {first}: it has left out optimizer.step() "
        "for a batch, which all workers must do alike",
        ranks,
    )


def adds_to_clipped(strategy: str) -> UsageError:
    """The error of a script that adds to a gradient which is clipped, where no worker has the whole of it."""
    return UsageError(
        f"under '{strategy}' nothing can be added to a gradient that is clipped; clip it once, before "
        "optimizer.step(), or use all-reduce"
    )


def not_finite(loss: float, rank: int, update: int) -> TeamError:
    """The error of a loss that is NaN or inf."""
    return TeamError(
        f"the loss of rank {rank} is {loss} at update {update}; setup(on_nan='skip') leaves out updates whose loss or "
        "gradient is not finite, on_nan='ignore' makes them as plain torch does",
        [rank],
    )


def summed_without_part() -> UsageError:
    """The error of a worker with gradients of one of several optimizers, and no part of the batch of its step."""
    return UsageError(
        "gradients of several batches are summed, and a worker has no part of the last one; with several optimizers "
        "give the loader drop_last=True"
    )


def missed_step(ranks: Sequence[int], first: int) -> Mismatch:
    """The error of workers whose summed gradients wait for a step that the first one makes without them."""
    return Mismatch(
        f"{names(ranks)} has summed gradients of several batches and has no part of the epoch's last one, with which "
        f"rank {first} updates: give the loader drop_last=True, or use all-reduce",
        ranks,
    )


def is_whole(parts: Mapping[int, float]) -> bool:
    """True if workers have a whole batch together; parts: by rank, its share of the batch."""
    return sum(parts.values()) >= _WHOLE


def check_whole(parts: Mapping[int, float]) -> None:
    """Raises Mismatch if workers update with a part of a batch; parts: by rank, its share of the batch."""
    if not is_whole(parts):
        raise Mismatch(
            f"the update by {names(sorted(parts))} has only a part of a batch: all workers must step for the same "
            "batches; if one has no part of an epoch's last batch, use drop_last=True"
        )


def unlike_streams(ranks: Sequence[int], first: int, samples: int) -> Mismatch:
    """The error of workers that read other samples than the first one among so many at the beginning of a stream."""
    verb = "reads" if len(ranks) == 1 else "read"
    return Mismatch(
        f"{names(ranks)} {verb} other samples than rank {first} among the first {samples} of a stream that all must "
        "read alike: seed its random numbers alike, do not divide it by rank, or give the dataset a method "
        "shard(index, count)",
        ranks,
    )


def unlike_losses(rank: int, first: int) -> str:
    """Says that a worker has computed its loss of a batch in another way than the first one."""
    return (
        f"rank {rank} computes its loss of a batch in another way than rank {first}, as a script does that decides by "
        "its loss: each worker has that of its part, while team.mean(loss) is the same on all workers"
    )


def unlike_samples(rank: int) -> str:
    """Says that a worker's gradients are averaged by samples which its loss does not count alike."""
    return (
        f"the gradients of this loss are averaged by numbers of samples, while rank {rank}'s losses do not count all "
        "samples alike; `with team.step(weight=…)` gives them another weight"
    )


def unlike_rates(rank: int, first: int) -> str:
    """Says that a worker's hyperparameters are not those of the first one."""
    return (
        f"rank {rank}'s learning rate, or another value of its optimizer, is not that of rank {first}, which is used; "
        "let schedulers depend on values that are the same on all workers, as team.mean gives"
    )
