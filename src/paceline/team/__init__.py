"""`join()` and `Team`: all that a training script uses."""

from paceline.team.team import Team, join

__all__ = ["Team", "join"]
