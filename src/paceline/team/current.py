"""The team that this process has joined: at most one, which its forks are no members of."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.team.team import Team

_joined: Team | None = None
_left = False


def joined() -> Team | None:
    """The team that this process has joined, and not left."""
    return _joined


def has_left() -> bool:
    """True if this process was a member of a team of several workers."""
    return _left


def enter(team: Team) -> None:
    """Makes this the team of the process."""
    global _joined
    _joined = team


def leave(team: Team, *, several: bool) -> None:
    """The process has left the team, of one or several workers."""
    global _joined, _left
    _left = several
    if _joined is team:
        _joined = None


def _forked() -> None:
    """Called in every fork of this process."""
    if _joined is not None:
        _joined._detach()


os.register_at_fork(after_in_child=_forked)
