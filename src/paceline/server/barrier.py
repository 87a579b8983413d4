"""Barriers and exchanges of values between the workers that take part at the moment."""

from __future__ import annotations

import msgspec

from paceline.errors import Mismatch
from paceline.server.messages import BarrierDone, EnterBarrier
from paceline.server.parts import receive_parts, send_parts
from paceline.server.sessions import Session, Sessions, SessionState
from paceline.transport import BarrierKind
from paceline.transport.unix_connection import Closed


class ServerBarrier:
    """A barrier of workers that join and leave; one that has joined takes part once it has trained."""

    def __init__(self, sessions: Sessions, patience: float) -> None:
        self._sessions, self._patience = sessions, patience

    def enter(self, session: Session, message: EnterBarrier) -> None:
        data = receive_parts(session.connection, self._patience)
        if data is None:
            raise Mismatch(f"rank {session.rank} entered a barrier without its payload", [session.rank])
        if session.fresh:
            self._release([session], {session.rank: data})  # the others passed this barrier before it joined
            return
        session.payload = (message.kind, data)
        session.enter(SessionState.BARRIER)
        self.release_if_complete()

    def release_if_complete(self) -> None:
        due = [self._sessions[rank] for rank in self._sessions.trained]
        looking = [session for session in due if session.payload and session.payload[0] == BarrierKind.REDUCE]
        if looking:
            due = self._computing(looking[0], due)
        if not due or any(session.state is not SessionState.BARRIER for session in due):
            return
        payloads = {session.rank: session.payload for session in due if session.payload is not None}
        first, (kind, _) = next(iter(payloads.items()))
        for rank, (other, _) in payloads.items():
            if other != kind:
                raise Mismatch(
                    f"rank {rank} is at {BarrierKind(other).spoken} while rank {first} is at "
                    f"{BarrierKind(kind).spoken}: all workers must do the same",
                    [rank],
                )
        self._release(due, {rank: data for rank, (_, data) in payloads.items()})

    def _computing(self, first: Session, due: list[Session]) -> list[Session]:
        """The workers that have a gradient, when one of them looks at the team's."""
        for session in due:
            if session.state is SessionState.PUSHED:
                raise Mismatch(
                    f"rank {session.rank} has pushed its gradient while rank {first.rank} looks at the team's: all "
                    "workers must look at .grad, or none",
                    [session.rank],
                )
        at_epoch = (session for session in due if session.payload and session.payload[0] == BarrierKind.EPOCH)
        done = {session.rank for session in at_epoch}
        states = (SessionState.BARRIER, SessionState.COMPUTING)
        return [session for session in due if session.state in states and session.rank not in done]

    def _release(self, sessions: list[Session], payloads: dict[int, bytes]) -> None:
        text = msgspec.msgpack.encode(payloads)
        for session in sessions:
            session.payload = None
            self._sessions.reply(session, BarrierDone())
            try:
                send_parts(session.connection, text)
            except Closed:
                continue  # the coordinator notices that
