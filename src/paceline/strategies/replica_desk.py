"""What the workers of one replica do at the server together: the first of them speaks, and all hear the answer.

To the server a replica is one worker. Its workers all run the same script, so they come here for the same things in the
same order; what the first says counts. A push is said once all of them have written their parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from paceline import errors
from paceline.cluster.membership import Members, Pulse
from paceline.config import Timeouts
from paceline.errors import TeamError
from paceline.server.desk import Desk
from paceline.server.messages import ToWorker
from paceline.strategies.replicas import Seat
from paceline.strategies.stopwatch import pause
from paceline.transport import Intent, Meeting, Memory


class ReplicaMeeting:
    """Where the workers of a replica meet."""

    def __init__(self, members: Members, seat: Seat, say: Callable[[str], None]) -> None:
        ranks = seat.replica_ranks()
        size = len(ranks)
        memories = [members.share(Meeting.memory_size(size)) for _ in range(seat.shape.data)]
        memory: Memory = memories[seat.replica]
        self._meeting = Meeting(memory, seat.place, size, members.meeting.timeouts, say)
        self._meeting.ranks = ranks
        self._meeting.crowd(members.size)
        self._meeting.sign_in()
        members.meeting.meet(Intent.ALLOCATE)
        self._meeting.watch = pulse = Pulse(self._meeting)
        members.meeting.meet(Intent.ALLOCATE)
        self.members = Members(seat.place, size, self._meeting, pulse, None)
        """The workers of the replica, by their places in it."""

    def gather(self, payload: bytes, intent: Intent = Intent.GATHER) -> list[bytes]:
        """Everybody's payload; each at most a note long."""
        meeting = self._meeting
        if len(payload) > meeting.CAPACITY:
            raise TeamError(
                f"what a replica's first worker was told takes {len(payload)} bytes, more than can be passed on"
            )
        meeting.note[: len(payload)] = payload
        meeting.meet(intent, len(payload))
        return [bytes(note[: meeting.length(place)]) for place, note in enumerate(meeting.notes)]

    def leave(self) -> None:
        self._meeting.sign_out()


class _Word(msgspec.Struct, array_like=True):
    """What the first worker passes on."""

    answer: ToWorker | None = None
    kind: str = ""
    message: str = ""
    ranks: list[int] = []


class ReplicaDesk:
    """As `Desk`, for all workers of a replica."""

    def __init__(self, desk: Desk | None, meeting: ReplicaMeeting | None, timeouts: Timeouts) -> None:
        """desk: of the first worker."""
        self.desk, self._meeting, self._timeouts = desk, meeting, timeouts

    def call(self, message: msgspec.Struct) -> Any:
        """Say something, and wait for the answer."""
        return self._pass_on(lambda desk: desk.call(message))

    def call_in_parts(self, data: bytes) -> Any:
        return self._pass_on(lambda desk: desk.call_in_parts(data))

    def wait_until_ready(self) -> None:
        self._pass_on(lambda desk: desk.wait_until_ready())

    def tell(self, message: msgspec.Struct) -> None:
        if self.desk is not None:
            self.desk.tell(message)

    def _pass_on(self, ask: Callable[[Desk], Any]) -> Any:
        word, caught = _Word(), None
        if self.desk is not None:
            try:
                word = _Word(ask(self.desk))
            except TeamError as error:
                caught = error
                word = _Word(None, type(error).__name__, str(error), list(error.ranks))
        told = b""
        if self._meeting is not None:
            payload = msgspec.msgpack.encode(word) if self.desk is not None else b""
            told = self._meeting.gather(payload, Intent.PUBLISH)[0]
        if caught is not None:
            raise caught
        if self.desk is None:
            word = msgspec.msgpack.decode(told, type=_Word)
        if word.kind:
            raise getattr(errors, word.kind, TeamError)(word.message, word.ranks)
        return word.answer

    def cancelled(self, _version: int) -> bool:
        """A replica leaves a step at its end only: its workers are in the middle of each other's work."""
        return False

    def sleep(self, seconds: float, _version: int | None) -> bool:
        pause(seconds)
        return False

    def close(self) -> None:
        if self.desk is not None:
            self.desk.close()
