"""`join()`, by which a training script begins."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config import Launch, Place, Strategy, Timeouts
from paceline.errors import UsageError
from paceline.team import current
from paceline.team.team import ANOTHER_RUN, Team


def join(
    strategy: str | Strategy | None = None,
    *,
    name: str | None = None,
    timeouts: Timeouts | None = None,
    loggers: str | Sequence[str] = (),
) -> Team:
    """Joins the team that this process was started for; a team of one when started with plain `python`.

    Called again it returns the same team. In a team of one `setup` then begins anew, as in a cell that is run again.

    strategy: how to train, unless `paceline run --strategy` says otherwise; all-reduce by default.
    name: the run's folder under `runs/`, where `paceline run` has not named one; without either, none is written.
    timeouts: how long to wait for other processes.
    loggers: "tensorboard", "wandb" or "mlflow", or several, which show the run's values unless `paceline run --log`
        names others.
    """
    team = current.joined()
    if team is not None:
        team._joined_again = (strategy, name, timeouts, loggers)
        return team
    if current.has_left():
        raise UsageError(
            "this worker has left its team, and a team is joined once; call team.close() after the last training only, "
            f"or start {ANOTHER_RUN}"
        )
    team = Team(Place.from_environment(), Launch.from_environment(), strategy, name, timeouts, loggers)
    current.enter(team)
    return team
