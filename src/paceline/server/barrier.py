"""Barriers and exchanges of values among whoever takes part at the moment."""

from __future__ import annotations

import msgspec

from paceline.errors import Mismatch
from paceline.server.messages import BarrierDone, EnterBarrier, receive_parts, send_parts
from paceline.server.sessions import Session, Sessions, SessionState
from paceline.transport import BarrierKind
from paceline.transport.unix_connection import Closed


class ServerBarrier:
    """Of workers who may come and go; one who has joined takes part once it has trained on something."""

    def __init__(self, sessions: Sessions, patience: float) -> None:
        self._sessions, self._patience = sessions, patience

    def come(self, session: Session, message: EnterBarrier) -> None:
        data = receive_parts(session.connection, self._patience)
        if data is None:
            raise Mismatch(f"rank {session.rank} did not say what it brought", [session.rank])
        if session.fresh:
            self._answer([session], {session.rank: data})  # the others were through here before it came
            return
        session.brought = (message.intent, data)
        session.into(SessionState.MEETING)
        self.settle()

    def settle(self) -> None:
        """If all are here who take part, let them go."""
        due = [self._sessions[rank] for rank in self._sessions.trained]
        if not due or any(session.state is not SessionState.MEETING for session in due):
            return
        first = due[0]
        assert first.brought is not None
        for session in due:
            assert session.brought is not None
            if session.brought[0] != first.brought[0]:
                raise Mismatch(
                    f"rank {session.rank} is at {BarrierKind(session.brought[0]).spoken} while rank {first.rank} is at "
                    f"{BarrierKind(first.brought[0]).spoken}: all workers must do the same",
                    [session.rank],
                )
        self._answer(due, {session.rank: session.brought[1] for session in due if session.brought is not None})

    def _answer(self, sessions: list[Session], brought: dict[int, bytes]) -> None:
        text = msgspec.msgpack.encode(brought)
        for session in sessions:
            session.brought = None
            self._sessions.answer(session, BarrierDone())
            try:
                send_parts(session.connection, text)
            except Closed:
                continue  # its end will be heard
