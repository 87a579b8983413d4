"""The buckets in which gradients cross the network, each as soon as the backward pass has made all of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from paceline.collectives.inter_machine import ReduceSegment
from paceline.parameters.layout import Flat, Layout

BUCKET = 512 * 1024
"""Bytes of a bucket between few machines; small, for the last one is sent when nothing is left to hide it."""
_PART = 64 * 1024
"""Bytes of a message that are worth its cost; a ring cuts a bucket into as many parts as there are machines."""
_SMALL = 8
"""Parameters that are so many times smaller than a bucket go with the group before, as a bias with its weight."""
_UNIT = 64
"""Bytes to whose multiples buckets are cut."""


class Bucket(NamedTuple):
    """A stretch of a flat buffer that is exchanged by itself."""

    flat: int
    start: int
    stop: int
    owners: list[int]
    """By machine, the rank that exchanges it."""
    slots: tuple[int, ...]
    """Indices of the parameters that have a part in it."""


def cut_buckets(layout: Layout, segments: Iterable[ReduceSegment], machines: int) -> list[Bucket]:
    """The segments as buckets, in the order in which a backward pass mostly makes them: from the last parameter on.

    Their borders, and so the order in which numbers are added, depend on nothing that happens in a run.
    """
    size = max(BUCKET, _PART * machines)
    found: list[Bucket] = []
    edges = [_groups(flat, size) for flat in layout.flats]
    for flat, start, stop, owners in segments:
        inside = [start, *(edge for edge in edges[flat] if start < edge < stop), stop]
        for first, last in itertools.pairwise(inside):
            for begin, end in itertools.pairwise(_split(first, last, layout.flats[flat].dtype.itemsize, size)):
                slots = layout.flats[flat].slots
                having = tuple(one.index for one in slots if one.offset < end and one.offset + one.count > begin)
                found.append(Bucket(flat, begin, end, owners, having))
    return sorted(found, key=lambda bucket: (max(bucket.slots, default=0), bucket.flat, bucket.start), reverse=True)


def _groups(flat: Flat, size: int) -> list[int]:
    """Where groups of neighbouring parameters begin that are made at about the same time, each of a bucket or more.

    What a layer makes last would else wait, in a bucket of two layers, for the next one.
    """
    edges: list[int] = []
    filled = small = 0
    for slot in flat.slots:
        bytes_here = slot.count * flat.dtype.itemsize
        if filled >= size and small + bytes_here > size // _SMALL:
            edges.append(slot.offset)
            filled = small = 0
        small += bytes_here if filled >= size else 0
        filled += bytes_here
    return edges


def _split(start: int, stop: int, itemsize: int, size: int) -> list[int]:
    """The edges of about equal parts of a stretch, of about this many bytes."""
    unit = max(1, _UNIT // itemsize)
    count = max(1, round((stop - start) * itemsize / size))
    return [start + (stop - start) // unit * part // count * unit for part in range(count)] + [stop]
