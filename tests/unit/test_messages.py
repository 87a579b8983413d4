"""Pictures of messages show what was recorded."""

from xml.etree import ElementTree

from paceline.events import Message
from paceline.report import draw_messages
from paceline.report.messages import Arrow, arrows


def message(rank: int, start: float, seconds: float, direction: str, peer: int, size: int = 100) -> Message:
    return Message(rank, start, seconds, "all_reduce", "ring", direction, peer, size)


SEEN = [
    message(0, 1.0, 0.1, "send", 1),
    message(0, 2.0, 0.1, "send", 1),
    message(1, 0.5, 1.0, "receive", 0),
    message(1, 1.5, 1.0, "receive", 0),
    message(1, 1.2, 0.1, "send", 0, 7),
    message(0, 1.1, 0.4, "receive", 1, 7),
]


def test_sends_and_receives_are_matched_in_their_order() -> None:
    assert sorted(arrows(reversed(SEEN))) == [
        Arrow(0, 1, 1.0, 1.5, 100),
        Arrow(0, 1, 2.0, 2.5, 100),
        Arrow(1, 0, 1.2, 1.5, 7),
    ]


def test_reads_go_from_the_owner_and_writes_to_it() -> None:
    seen = [message(2, 1.0, 0.5, "read", 0), message(2, 2.0, 0.5, "write", 1)]
    assert arrows(seen) == [Arrow(0, 2, 1.0, 1.5, 100), Arrow(2, 1, 2.0, 2.5, 100)]


def test_a_message_that_never_arrived_is_not_drawn() -> None:
    assert arrows([message(0, 1.0, 0.1, "send", 1)]) == []


def test_the_picture_has_a_row_for_each_worker_and_a_line_for_each_message() -> None:
    root = ElementTree.fromstring(draw_messages(SEEN, "ring & co"))
    texts = ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "ring & co" in texts
    assert {"worker 0", "worker 1"} <= set(texts)
    assert any(text.startswith("3 messages") for text in texts)
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 3
    assert "7 bytes from worker 1 to worker 0, 300,000 µs" in titles


def test_nothing_is_said_to_be_nothing() -> None:
    assert "no message was sent" in draw_messages([], "empty")
