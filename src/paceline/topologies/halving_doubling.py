"""Recursive halving and doubling: the exchanges of each rank, and the cost.

        chunks that eight ranks' partial sums cover, as rank 2 sees it

        begin            0 1 2 3 4 5 6 7
        with rank 6      0 1 2 3            sends 4–7, receives 6's 0–3 and adds
        with rank 0          2 3            sends 0–1, receives 0's 2–3 and adds
        with rank 3          2              sends 3, receives 3's 2 and adds: this is the sum of all eight
        with rank 3          2 3            back again: the same partners, sums are copied instead of added
        with rank 0      0 1 2 3
        with rank 6      0 1 2 3 4 5 6 7

Halving is a reduce-scatter, doubling an all-gather. For a power of two this takes only 2·log2 N messages per rank, and
the S/2 + S/4 + … + S/N bytes each way are 2(N−1)/N·S in all, as few as the ring's.

Other numbers of ranks: let P be the largest power of two within N. Rank P + i is a guest of rank i: it first sends its
tensor to its host, which adds it, and it receives the result at the end. The P hosts do as above. This costs two more
messages of the whole tensor, one before and one after: 2(latency + S/B) in an all-reduce.
"""

from __future__ import annotations

from typing import NamedTuple

from paceline.topologies.costs import ExchangeCost


class ExchangeRound(NamedTuple):
    """One exchange of the halving; ranges of chunks are given as first, last + 1."""

    peer: int
    kept: tuple[int, int]
    given: tuple[int, int]


def hosts(size: int) -> int:
    """The largest power of two within `size`: the ranks from there on are guests."""
    return 1 << (size.bit_length() - 1)


def rounds(rank: int, count: int) -> list[ExchangeRound]:
    """The exchanges of a rank while halving, when `count` (a power of two) ranks take part."""
    found = []
    first, last = 0, count
    while last - first > 1:
        middle = (first + last) // 2
        lower, upper = (first, middle), (middle, last)
        kept, given = (lower, upper) if rank < middle else (upper, lower)
        found.append(ExchangeRound(rank ^ (middle - first), kept, given))
        first, last = kept
    return found


def cost(size: int) -> ExchangeCost:
    """2·log2 P·latency + 2(P−1)/P·S/B, and 2(latency + S/B) more if N is not its largest power of two P."""
    power = hosts(size)
    guests = 0 if size == power else 2
    return ExchangeCost(guests + 2 * (power.bit_length() - 1), guests + 2 * (power - 1) / power)
