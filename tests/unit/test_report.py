"""The picture of a run says what its events say."""

from xml.etree import ElementTree

import pytest

from paceline.events import Compute, Event, Join, Metric, Update, Wait
from paceline.report import timeline

SVG = "{http://www.w3.org/2000/svg}"


def events() -> list[Event]:
    """Two workers, ten updates of 0.1 s; worker 1 computes all the time, and worker 0 waits for it half of it."""
    happened: list[Event] = [Join(rank, 0.0, 1, "host", "cpu", "all-reduce", 0.0) for rank in (0, 1)]
    for number in range(10):
        start = 0.1 * number
        happened += [
            Compute(0, start, 0.04, number, 1, 8),
            Wait(0, start + 0.04, 0.05, 1),
            Compute(1, start, 0.09, number, 1, 8, 0.06),
            *(Update(rank, start + 0.09, 0.01, number + 1, 64, 2) for rank in (0, 1)),
        ]
    return [*happened, Metric(0, 1.0, 10, {"accuracy": 0.5})]


def bars(picture: str) -> list[tuple[str, float]]:
    """What each bar says, and how long it is; without the slivers that end where the picture begins."""
    rectangles = ElementTree.fromstring(picture).iter(f"{SVG}rect")
    said = [(bar.findtext(f"{SVG}title") or "", float(bar.get("width", "0"))) for bar in rectangles]
    return [(words, length) for words, length in said if words and length > 1.0]


def test_every_worker_has_a_row_with_its_bars_and_words() -> None:
    picture = timeline(events(), "a <run>", updates=4)
    texts = [element.text for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]
    assert "a <run>" in texts
    assert "worker 0" in texts and "worker 1" in texts
    words = [said for said, _ in bars(picture)]
    assert sum(said.startswith("waiting: 50.00 ms for worker 1") for said in words) == 4
    assert sum(said.startswith("slowed on purpose") for said in words) == 4
    assert sum(said.startswith("computing: 8 samples") for said in words) == 8


def test_a_bar_is_as_long_as_what_it_shows() -> None:
    whole = 960 - 76 - 16
    waits = [length for said, length in bars(timeline(events(), "run", updates=4)) if said.startswith("waiting")]
    assert waits == pytest.approx([whole * 0.05 / 0.4] * 4, abs=0.1)


def test_a_run_without_an_update_is_said_to_have_none() -> None:
    assert "no update" in timeline([], "nothing")
