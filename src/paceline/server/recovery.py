"""Notes the state of a coordinator in its journal, and gives it to the one that is started after it was killed.

The state is pickled, as policies may be a user's own: it is in memory that only processes of the run have, and the
process that reads it was started like the one that wrote it.
"""

from __future__ import annotations

import dataclasses
import pickle
import time
from typing import TYPE_CHECKING, Any

from paceline import failpoints
from paceline.events.recorder import Recorder
from paceline.server.journal import EntryKind, Journal
from paceline.server.messages import SessionOpened
from paceline.server.session_link import SessionLink
from paceline.server.sessions import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.server.coordinator import Coordinator

_FIELDS = [field.name for field in dataclasses.fields(Session) if field.name != "connection"]


@dataclasses.dataclass
class CoordinatorState:
    """All that a coordinator must know beside the run's spec and memory."""

    parts: list[dict[str, Any]]
    """As `Coordinator.parts`: the attributes of each."""
    sessions: list[dict[str, Any]]
    pending: list[dict[str, Any]]


def keep_state(coordinator: Coordinator, journal: Journal, recorder: Recorder) -> str:
    """Notes the state; returns why that cannot be, if so, and writes no journal any more."""
    recorder.flush()  # what happened before is not done again, so its events must be in the file
    present, pending = coordinator.known
    state = CoordinatorState(
        [{name: getattr(part, name) for name in names} for part, names in coordinator.parts],
        [_described(session) for session in present.values()],
        [_described(session) for session in pending],
    )
    try:
        data = pickle.dumps(state, protocol=5)
    except Exception as error:  # of many kinds: a user's own policy may hold anything
        journal.on = False
        return f"it cannot be written ({type(error).__name__}: {error})"
    return "" if journal.note(data) else f"it takes {len(data):,} bytes"


def read_state(journal: Journal) -> CoordinatorState:
    failpoints.hit("recover.begin")
    state = pickle.loads(journal.read())
    assert isinstance(state, CoordinatorState)
    return state


def restore(coordinator: Coordinator, state: CoordinatorState) -> None:
    """Gives a coordinator its state, but for the sessions, which it was made with."""
    for (part, _), values in zip(coordinator.parts, state.parts, strict=True):
        vars(part).update(values)


def _described(session: Session) -> dict[str, Any]:
    link = session.connection
    assert isinstance(link, SessionLink)
    values = {name: getattr(session, name) for name in _FIELDS}
    return values | {"link": link.state, "relayed": link.relayed}


def rebuilt(values: dict[str, Any], journal: Journal, descriptors: Sequence[int]) -> Session:
    """The session of a worker that has not connected again; descriptors: of the run's memory."""
    link = SessionLink(values["rank"], values["pid"], journal, None, relayed=values["relayed"])
    link.restore(values["link"], lambda message: descriptors if isinstance(message, SessionOpened) else ())
    return Session(connection=link, **{name: values[name] for name in _FIELDS})


def replay(coordinator: Coordinator, journal: Journal, receive: Callable[[Session], None]) -> None:
    """Does again what a coordinator that was killed has done since it last noted its state.

    receive: handles a session's next message.
    """
    sessions, _ = coordinator.known
    while (entry := journal.peek()) is not None:
        failpoints.hit("recover.entry")
        if entry.kind in (EntryKind.MESSAGE, EntryKind.CLOSED):
            receive(sessions[entry.rank])
        else:
            coordinator.do_again(journal.take())
    failpoints.hit("recover.done")
    now = time.monotonic()
    for session in sessions.values():
        session.since = now  # the time in which the server was away does not count
