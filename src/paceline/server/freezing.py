"""Stops all updates while a worker reads or writes memory that the servers own."""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import TeamTimeout
from paceline.server.messages import Freeze, Frozen, ReloadState, Thaw
from paceline.server.sessions import Session, Sessions
from paceline.server.shard_set import ShardSet
from paceline.transport.unix_connection import Closed


class Freezing:
    """Handles no other message from `Freeze` to `Thaw`."""

    def __init__(self, sessions: Sessions, shards: ShardSet, patience: float, lose: Callable[[Session], None]) -> None:
        """lose: goes on without a worker that has died."""
        self._sessions, self._shards, self._patience, self._lose = sessions, shards, patience, lose

    def freeze(self, session: Session, message: Freeze) -> None:
        if message.pull:
            self._sessions.pull(session)
        pool = self._sessions.pool
        self._sessions.send(session, Frozen(pool.version, pool.newest))
        try:
            answer = session.connection.receive_within(self._patience)
        except Closed:
            self._lose(session)
            return
        if not isinstance(answer, Thaw):
            raise TeamTimeout(
                f"rank {session.rank} kept the server waiting while it read the parameters", [session.rank]
            )
        if answer.reload:
            self._shards.handle(ReloadState())
