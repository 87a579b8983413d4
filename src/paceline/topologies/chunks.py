"""Bounds of chunks that differ by at most one element.

        length 10, 4 chunks      | 0 1 | 2 3 4 | 5 6 | 7 8 9 |
        bounds                   0     2       5     7      10

All ranks use the same bounds, so the length of a chunk is never sent. With fewer elements than chunks some chunks are
empty; they are sent all the same, so that the number of messages does not depend on the length.
"""

from __future__ import annotations


def bounds(length: int, count: int) -> list[int]:
    """The start of each of `count` chunks of `length` elements, then the end of the last one."""
    return [length * index // count for index in range(count + 1)]
