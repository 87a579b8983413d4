"""Everybody offers something to everybody, and takes something from everybody: what all collectives that move are."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy
import torch

from paceline.collectives.operation import CollectiveCall
from paceline.collectives.shared_group import SharedGroup
from paceline.errors import Mismatch, TeamError
from paceline.transport.control_block import ControlBlock
from paceline.transport.peer_memory import MappedView, View, bytes_of

_INLINE = 1 << 62
"""Stands for a segment's number where data lies in the slot."""
FIRST, _WIDTH = 3, 5
"""A row: signature, whether somebody will read memory, own place; then for each member where its part is (three
numbers), how many bytes are offered to it and how many expected from it, both plus one."""

Offers = Sequence[torch.Tensor | None]
"""By rank."""


class Exchange:
    """What everybody offers to everybody, seen by one member: views by rank, for as long as all are at it."""

    def __init__(self, floor: SharedGroup, made: CollectiveCall, signature: int, offers: Offers, wants: Offers) -> None:
        self._floor, self._made = floor, made
        board, reach = floor.board, floor.reach
        rank, size = floor.rank, floor.size
        turn = board.turn
        numbers = array("Q", bytes(8 * _WIDTH * size))
        used, exposed = 0, 0
        last: torch.Tensor | None = None
        entry: tuple[int, int, int] = (0, 0, 0)
        for peer in range(size):
            offer, want, at = offers[peer], wants[peer], _WIDTH * peer
            if peer == rank:
                if offer is not None and want is not None:
                    # Nothing travels, but the sizes must agree as they do with the others.
                    numbers[at + 3], numbers[at + 4] = offer.nbytes + 1, want.nbytes + 1
                continue
            if want is not None:
                numbers[at + 4] = want.nbytes + 1
            if offer is None:
                continue
            if offer is not last:
                size_in_bytes = offer.nbytes
                if used + size_in_bytes <= ControlBlock.SLOT:
                    if size_in_bytes:
                        board.slot(turn, rank, size_in_bytes, torch.uint8, used).copy_(bytes_of(offer))
                    entry = (_INLINE, 0, used)
                    used += -(-size_in_bytes // 64) * 64
                else:
                    _, entry = reach.expose(offer)
                    exposed = 1
                last = offer
            numbers[at], numbers[at + 1], numbers[at + 2], numbers[at + 3] = *entry, offer.nbytes + 1
        row = board.row
        row[1] = exposed
        row[FIRST : FIRST + _WIDTH * size] = memoryview(numbers)
        self._turn = turn
        self._rows = floor.come(made, signature)
        self._check()

    def __enter__(self) -> dict[int, View]:
        try:
            return self._open()
        except TeamError as error:
            raise self._floor.named(error, self._made) from None

    def _open(self) -> dict[int, View]:
        floor = self._floor
        views: dict[int, View] = {}
        at = FIRST + _WIDTH * floor.rank
        for rank in floor.others():
            number, descriptor, place, size = self._rows[rank][at : at + 4]
            if size <= 1:
                continue
            if number == _INLINE:
                views[rank] = MappedView(floor.board.slot(self._turn, rank, size - 1, torch.uint8, place), 0)
            else:
                views[rank] = floor.reach.view(rank, (number, descriptor, place))
        return views

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, TeamError):
            raise self._floor.named(error, self._made) from None
        if kind is None and any(row[1] for row in self._rows):
            self._floor.board.finish(self._made, self._floor.spin)
            self._floor.reach.release()

    def _check(self) -> None:
        """What is offered must be what is expected; everybody checks it for all, so that all know."""
        size = self._floor.size
        table = numpy.stack([numpy.asarray(row[FIRST : FIRST + _WIDTH * size]) for row in self._rows])
        offered, wanted = table[:, 3::_WIDTH], table[:, 4::_WIDTH].T
        wrong = numpy.argwhere(offered != wanted)
        if len(wrong):
            giver, taker = (int(number) for number in wrong[0])
            gives, takes = int(offered[giver, taker]) - 1, int(wanted[giver, taker]) - 1
            raise Mismatch(
                f"rank {giver} has {_bytes(gives)} for rank {taker}, which expects {_bytes(takes)}, "
                f"at {self._made.spoken}",
                [giver, taker],
            )


def _bytes(count: int) -> str:
    return "nothing" if count < 0 else f"{count} bytes"
