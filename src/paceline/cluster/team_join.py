"""How a worker joins a running all-reduce team of its machine: it asks the lead, which listens for that.

1. The worker connects and gets the team's shared memory, as descriptors.
2. Its script begins an epoch: it asks to enter. Epochs that the team has left behind are over for it, too.
3. The lead sends the state of the team between two updates. All hold a barrier; then the worker is a member.

If the lead leaves or dies before that, the worker asks the next one.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence

import msgspec

from paceline import failpoints
from paceline.errors import JoinError
from paceline.transport.unix_connection import Closed, Listener, UnixConnection, connect

_PIECE = 100_000
"""Bytes of the state in one message."""
_SOON = 2.0
"""Seconds in which a running lead accepts a connection."""
_MOST = 32
"""Descriptors at most."""


class AskMemory(msgspec.Struct, frozen=True, tag=True):
    """A worker's request for the team's shared memory."""

    rank: int
    pid: int


class EnterEpoch(msgspec.Struct, frozen=True, tag=True):
    """A worker's request to become a member in this epoch of a loader."""

    loader: int
    epoch: int


class MemoryGiven(msgspec.Struct, frozen=True, tag=True):
    """Comes with the descriptors of the shared memory."""

    size: int
    """Workers that the team began with."""
    room: int
    """Workers that it has room for."""


class EpochPassed(msgspec.Struct, frozen=True, tag=True):
    """The team has left this epoch behind."""


class JoinRefused(msgspec.Struct, frozen=True, tag=True):
    """The team takes no worker."""

    reason: str


class TeamState(msgspec.Struct, frozen=True, tag=True):
    """A part of the state of the team, which the worker is a member of from the next barrier on."""

    data: bytes
    more: bool


class _Applicant:
    """A worker that wants to join."""

    def __init__(self, connection: UnixConnection[AskMemory | EnterEpoch]) -> None:
        self.connection = connection
        self.rank = self.pid = -1
        self.wants: EnterEpoch | None = None


class JoinRequests:
    """The lead's side: takes requests of workers between updates."""

    def __init__(self, address: str) -> None:
        self._listener = Listener(address)
        self._applicants: list[_Applicant] = []

    def look(self, given: MemoryGiven, descriptors: Sequence[int], ranks: Sequence[int]) -> bool:
        """Answers workers that ask for memory; True if one wants to enter an epoch. ranks: the members."""
        while (connection := self._listener.accept(AskMemory | EnterEpoch, 0)) is not None:
            self._applicants.append(_Applicant(connection))
        for applicant in list(self._applicants):
            try:
                if applicant.connection.ready:
                    self._take(applicant, applicant.connection.receive(), given, descriptors, ranks)
            except (Closed, TimeoutError, msgspec.DecodeError):
                self._drop(applicant)
        return any(applicant.wants for applicant in self._applicants)

    def _take(
        self,
        applicant: _Applicant,
        message: AskMemory | EnterEpoch,
        given: MemoryGiven,
        descriptors: Sequence[int],
        ranks: Sequence[int],
    ) -> None:
        if isinstance(message, EnterEpoch):
            applicant.wants = message
        elif message.rank < given.room and message.rank not in ranks:
            applicant.rank, applicant.pid = message.rank, message.pid
            applicant.connection.send(given, descriptors)
        else:
            applicant.connection.send(JoinRefused(f"the team has no place for rank {message.rank}"))
            self._drop(applicant)

    def next(self, loader: int, epoch: int) -> _Applicant | None:
        """A worker that can enter this epoch of this loader; those that want to enter one before it pass it by."""
        for applicant in self._applicants:
            wants = applicant.wants
            if wants is None or wants.loader != loader:
                continue
            if wants.epoch == epoch:
                return applicant
            if wants.epoch < epoch:
                applicant.wants = None
                with contextlib.suppress(Closed):
                    applicant.connection.send(EpochPassed())
        return None

    def admit(self, applicant: _Applicant, state: bytes) -> bool:
        """Sends a worker the state of the team; False if it is gone."""
        try:
            for start in range(0, len(state), _PIECE):
                piece = state[start : start + _PIECE]
                applicant.connection.send(TeamState(piece, start + _PIECE < len(state)))
        except Closed:
            self._drop(applicant)
            return False
        self._drop(applicant)
        return True

    def refuse(self, applicant: _Applicant, reason: str) -> None:
        with contextlib.suppress(Closed):
            applicant.connection.send(JoinRefused(reason))
        self._drop(applicant)

    def _drop(self, applicant: _Applicant) -> None:
        applicant.connection.close()
        if applicant in self._applicants:
            self._applicants.remove(applicant)

    def close(self) -> None:
        for applicant in list(self._applicants):
            self._drop(applicant)
        self._listener.close()


class JoinClient:
    """The side of a worker that joins."""

    def __init__(self, address: str, rank: int, patience: float) -> None:
        """patience: seconds to wait for an answer."""
        self._address, self._rank, self._patience = address, rank, patience
        self._connect(_SOON)

    def _connect(self, seconds: float, expected: Callable[[], bool] = lambda: True) -> None:
        """expected: returns False if no lead will ever answer."""
        try:
            self._connection: UnixConnection[MemoryGiven | EpochPassed | JoinRefused | TeamState] = connect(
                self._address, MemoryGiven | EpochPassed | JoinRefused | TeamState, seconds, expected
            )
        except JoinError:
            raise self._ended() from None
        self._connection.patience(self._patience)

    def memory(self) -> tuple[MemoryGiven, list[int]]:
        """The sizes of the team, and the descriptors of its memory."""
        failpoints.hit("join.begin")
        try:
            return self._ask_memory()
        except (Closed, TimeoutError, BlockingIOError):
            raise self._ended() from None

    def _ask_memory(self) -> tuple[MemoryGiven, list[int]]:
        self._connection.send(AskMemory(self._rank, os.getpid()))
        failpoints.hit("join.sent")
        answer, descriptors = self._connection.receive_with_descriptors(_MOST)
        if not isinstance(answer, MemoryGiven):
            raise self._refused(answer)
        return answer, descriptors

    def enter(self, loader: int, epoch: int, members: Callable[[], bool]) -> bytes | None:
        """The state of the team, in this epoch of this loader; None if it has left the epoch behind.

        members: returns True while the team has any, of whom the next leads when the lead has gone.
        """
        until = time.monotonic() + self._patience
        again = False
        while True:
            try:
                if again:
                    for descriptor in self._ask_memory()[1]:  # it has the same memory already
                        os.close(descriptor)
                return self._enter(loader, epoch)
            except (TimeoutError, BlockingIOError):
                raise self._ended() from None
            except Closed:
                again = True
                self._connection.close()
                self._connect(until - time.monotonic(), members)

    def _enter(self, loader: int, epoch: int) -> bytes | None:
        data = bytearray()
        self._connection.send(EnterEpoch(loader, epoch))
        while isinstance(answer := self._connection.receive(), TeamState):
            data += answer.data
            if not answer.more:
                self._connection.close()
                return bytes(data)
        if not isinstance(answer, EpochPassed):
            raise self._refused(answer)
        return None

    def _ended(self) -> JoinError:
        return JoinError(
            f"rank {self._rank} cannot join: the run has ended, or its lead has, or it makes no update", [self._rank]
        )

    def _refused(self, answer: object) -> JoinError:
        reason = answer.reason if isinstance(answer, JoinRefused) else "the lead gave no answer"
        return JoinError(f"rank {self._rank} cannot join: {reason}", [self._rank])
