"""Spans of time: what lies between others, and how a step is divided by them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from paceline.events import Compute
from paceline.events.kernel import KernelCounts

Span = tuple[float, float]
_NOTABLE = 5e-6
"""Seconds of computing between two waits that are worth an event."""


def between(begin: float, end: float, out: Iterable[Span]) -> Iterator[Span]:
    """The spans from `begin` to `end` that are not in `out`; the last one reaches to `end`, and may be empty."""
    for start, finish in sorted(out):
        if start > begin:
            yield begin, min(start, end)
        begin = max(begin, finish)
    yield min(begin, end), end


def union(spans: Iterable[Span]) -> list[Span]:
    """The same moments as spans that do not overlap, in order."""
    found: list[Span] = []
    for start, finish in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], finish)
        else:
            found.append((start, finish))
    return found


def computing(
    rank: int,
    span: Span,
    out: Sequence[Span],
    backward: Sequence[Span],
    *,
    version: int,
    minibatches: int,
    samples: int = 0,
    core: float = 0.0,
    kernel: KernelCounts | None = None,
) -> Iterator[Compute]:
    """A step in pieces between the spans in which the worker did not compute; the last one is that of the gradient."""
    pieces = list(between(*span, out))
    for number, (begin, finish) in enumerate(pieces):
        last, seconds = number == len(pieces) - 1, finish - begin
        if not last and seconds < _NOTABLE:
            continue
        turned = sum(max(0.0, min(finish, b) - max(begin, a)) for a, b in backward)
        counts = (minibatches, samples) if last else (0, 0)
        forward = max(0.0, seconds - turned)
        counted = (core, kernel) if last else (0.0, None)
        yield Compute(rank, begin, seconds, version, *counts, 0.0, forward, *counted)
