"""Marks versions for snapshots, and remembers which samples were left at them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from paceline import failpoints
from paceline.parameters.kept_version import KeptVersion
from paceline.server.flags import SharedFlags
from paceline.server.leases import LeaseService
from paceline.server.messages import EpochsLeft, Left, MarkVersion, Notes, RequestLeft, SnapshotNote
from paceline.server.parts import send_parts
from paceline.server.sessions import Session
from paceline.server.updates import Updates
from paceline.transport.unix_connection import Closed


class VersionMarking:
    """The versions of a run that snapshots are of, one at a time.

    1. The lead asks for a snapshot. The next version is marked: all workers see that when they get it.
    2. The update after it copies the version and the optimizer's state before they are overwritten.
    3. The lead asks what was left of all epochs at that version, and writes the snapshot.
    """

    STATE = ("_wanted", "_number", "_left", "_notes", "_values")
    """Attributes that change."""

    def __init__(
        self,
        flags: SharedFlags,
        updates: Updates,
        leases: LeaseService,
        kept: KeptVersion,
        tell_lead: Callable[[str], None],
        values: Callable[[], dict[str, Any]],
    ) -> None:
        """tell_lead: lets the lead print a line; values: of the policy."""
        self._tell_lead, self._policy_values, self._refused = tell_lead, values, False
        self._values = b"\x80"
        """The policy's values at that version, encoded."""
        self._flags, self._updates, self._leases, self._kept = flags, updates, leases, kept
        self._wanted = False
        self._number = 0
        """Of the snapshot that is being taken: one more than its version; 0 if there is none."""
        self._left: Left = {}
        self._notes: Notes = {}
        """By rank, the last note of a worker on another machine."""

    def request(self, _session: Session, _message: MarkVersion) -> None:
        self._wanted = True

    def updated(self, version: int) -> None:
        """This version is made, and its samples are done."""
        if self._number:
            self._kept.complete = max(self._kept.complete, self._number)  # it may be done again, after a later one
            self._number = 0
        elif self._wanted:
            self._wanted, self._number = False, version + 1
            self._left = self._leases.left()
            self._note_policy()
            self._updates.keep = True
            failpoints.hit("snapshot.marked")
            self._flags.marked = max(self._flags.marked, self._number)

    def _note_policy(self) -> None:
        try:
            self._values = msgspec.msgpack.encode(self._policy_values())
        except TypeError as error:  # a user's own policy
            if self._refused:
                return
            self._refused = True
            self._tell_lead(f"the policy's state_dict is not in snapshots, so its values begin anew: {error}")

    def note(self, session: Session, message: SnapshotNote) -> None:
        self._notes[session.rank] = (message.number, message.data)

    def answer(self, session: Session, _message: RequestLeft) -> None:
        with contextlib.suppress(Closed):  # the coordinator notices that
            session.connection.send(EpochsLeft())
            send_parts(session.connection, msgspec.msgpack.encode((self._left, self._notes, msgspec.Raw(self._values))))
