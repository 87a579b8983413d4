"""The summary of events that no run has recorded."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.events import Event
from paceline.events.summary import Summariser, Summary


def summarise(events: Iterable[Event], world_size: int) -> Summary:
    """The summary of these events."""
    summariser = Summariser(world_size)
    for event in events:
        summariser.add(event)
    return summariser.result()
