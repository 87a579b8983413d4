"""Two runs on one time scale: what is counted, and what is seen where nothing moves."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from paceline.events import Compute, Event, Push, Update
from paceline.report.race import Runner, race


def all_reduced(updates: int, seconds: float) -> list[Event]:
    """Two workers with 8 samples each, and an update after so many seconds each time."""
    events: list[Event] = []
    for version in range(updates):
        start = version * seconds
        for rank in range(2):
            events.append(Compute(rank, start, seconds * 0.9, version, 1, 8))
            events.append(Update(rank, start + seconds * 0.9, seconds * 0.1, version + 1))
    return events


def served(updates: int, seconds: float) -> list[Event]:
    """A server that updates with one gradient of 8 samples after so many seconds each time."""
    events: list[Event] = []
    for version in range(updates):
        start = version * seconds
        events.append(Compute(version % 2, start, seconds * 0.9, version, 1, 8))
        events.append(Push(version % 2, start + seconds * 0.9, version, version, 0, 8, [], 0, 0, "used", ""))
        events.append(Update(-1, start + seconds * 0.9, seconds * 0.1, version + 1, pushes=[version]))
    return events


def counters(svg: str) -> list[str]:
    """The last number of every counter."""
    columns = re.findall(r"<g class='c\d\d'>(.*?)</g>", svg)
    return [re.findall(r">([\d,]+)</text>", column)[-1] for column in columns]


def test_updates_and_samples_of_the_same_seconds_are_counted() -> None:
    svg = race("a race", [Runner("slow", all_reduced(40, 0.25)), Runner("fast", served(100, 0.125))], 2.0)
    assert counters(svg) == ["8", "128", "16", "128"]


def test_a_picture_that_does_not_move_is_the_one_at_the_end() -> None:
    svg = race("a race", [Runner("one", all_reduced(40, 0.25))], 2.0)
    ElementTree.fromstring(svg)  # well-formed
    assert ".c00{transform:translateY(-320px)" in svg  # eight lines up: the last number
    assert ".cover{fill:#fff;transform:scaleX(0)" in svg
    assert "prefers-reduced-motion" in svg
    assert "<script" not in svg and "http" not in svg.replace("http://www.w3.org/2000/svg", "")


def test_a_run_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="no 20 seconds"):
        race("a race", [Runner("one", all_reduced(40, 0.25))], 20.0)
