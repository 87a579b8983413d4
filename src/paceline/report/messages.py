"""Draws a collective: a row per worker, time to the right, an arrow per message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from html import escape
from typing import NamedTuple

from paceline.events import Message
from paceline.report.svg import LEFT, WIDTH, Figure, document

# Okabe and Ito's colours, which stay apart for colour-blind readers: one per sender.
_COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7a7a7a"]
_ROW, _TOP = 62, 62


class Arrow(NamedTuple):
    """A message between two workers, from its sending to its arrival."""

    sender: int
    receiver: int
    left: float
    arrived: float
    bytes: int


def arrows(messages: Iterable[Message]) -> list[Arrow]:
    """Pairs sends with receives: between two workers, messages arrive in the order in which they were sent."""
    sent: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
    direct = []
    for message in sorted(messages, key=lambda message: message.start):
        ends = message.start, message.start + message.seconds, message.bytes
        if message.direction == "read":
            direct.append(Arrow(message.peer, message.rank, *ends))
        elif message.direction == "write":
            direct.append(Arrow(message.rank, message.peer, *ends))
        elif message.direction == "send":
            sent[message.rank, message.peer].append(message)
        else:
            received[message.peer, message.rank].append(message)
    return direct + [
        Arrow(*pair, out.start, back.start + back.seconds, out.bytes)
        for pair, outs in sent.items()
        for out, back in zip(outs, received[pair], strict=False)
    ]


def draw_messages(messages: Iterable[Message], title: str) -> Figure:
    """An SVG of all messages of one collective."""
    seen = list(messages)
    known = arrows(seen)
    ranks = sorted({rank for arrow in known for rank in (arrow.sender, arrow.receiver)})
    if not known:
        return document(title, _TOP + 44, ["<text x='76' y='80'>no message was sent</text>"])
    begin, end = min(arrow.left for arrow in known), max(arrow.arrived for arrow in known)
    scale = (WIDTH - LEFT - 24) / max(end - begin, 1e-9)
    rows = {rank: _TOP + number * _ROW for number, rank in enumerate(ranks)}
    shapes = [_row(rank, y) for rank, y in rows.items()]
    for arrow in sorted(known, key=lambda arrow: arrow.left):
        first, last = (LEFT + (moment - begin) * scale for moment in (arrow.left, arrow.arrived))
        colour = _COLOURS[arrow.sender % len(_COLOURS)]
        words = (
            f"{arrow.bytes:,} bytes from worker {arrow.sender} to worker {arrow.receiver}, "
            f"{(arrow.arrived - arrow.left) * 1e6:,.0f} µs"
        )
        shapes.append(
            f"<g stroke='{colour}' fill='{colour}'><title>{escape(words)}</title>"
            f"<line x1='{first:.1f}' y1='{rows[arrow.sender]}' x2='{last:.1f}' y2='{rows[arrow.receiver]}' "
            f"stroke-width='1.6' opacity='.85'/><circle cx='{last:.1f}' cy='{rows[arrow.receiver]}' r='3.2'/></g>"
        )
    bottom = max(rows.values()) + 30
    shapes.append(f"<text x='{LEFT}' y='{bottom}' class='small'>0</text>")
    unit = f"{(end - begin) * 1e6:,.0f} µs"
    shapes.append(f"<text x='{WIDTH - 24}' y='{bottom}' class='small' text-anchor='end'>{unit}</text>")
    noun = "messages" if any(message.direction == "send" for message in seen) else "reads and writes"
    total = f"{len(known)} {noun}, {sum(arrow.bytes for arrow in known) / 1e6:,.1f} MB in all; a dot is an arrival"
    shapes.append(f"<text x='{WIDTH / 2}' y='{bottom}' class='small' text-anchor='middle'>{total}</text>")
    return document(title, bottom + 14, shapes)


def _row(rank: int, y: int) -> str:
    colour = _COLOURS[rank % len(_COLOURS)]
    return (
        f"<text x='{LEFT - 12}' y='{y + 4}' text-anchor='end'>worker {rank}</text>"
        f"<line x1='{LEFT}' y1='{y}' x2='{WIDTH - 24}' y2='{y}' stroke='{colour}' stroke-width='5' opacity='.22'/>"
    )
