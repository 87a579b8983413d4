"""`join()` and `Team`: all that a training script uses."""

from paceline.team.joining import join
from paceline.team.team import Team

__all__ = ["Team", "join"]
