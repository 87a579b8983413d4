"""A group on one machine, and the exchange behind all collectives that move data in it.

In an exchange each member offers a tensor to each other member.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy
import torch

from paceline.collectives.operation import CollectiveCall
from paceline.errors import Mismatch, TeamError, WorkerLost
from paceline.transport.control_block import ControlBlock
from paceline.transport.peer_memory import MappedView, PeerMemory, View, bytes_of

_INLINE = 1 << 62
"""In place of a segment's number: the data is in the slot."""
FIRST, _WIDTH = 3, 5
"""A row: signature, 1 if memory will be read, unused; then for each member the place of its part (three numbers), the
bytes offered to it and the bytes expected from it, both plus one."""

Offers = Sequence[torch.Tensor | None]
"""By rank."""


class SharedGroup:
    """One member of a group on one machine."""

    def __init__(self, control: ControlBlock, peers: PeerMemory) -> None:
        self.control, self.peers = control, peers
        self.rank, self.size = control.rank, control.size
        self.spin = True
        """True to poll before sleeping; False in a background thread."""

    def agree(self, call: CollectiveCall, signature: int) -> list[memoryview]:
        """Waits until all members have called the same operation; returns all members' rows of the control block."""
        if not self.control.agree(signature, call, self.spin):
            self._raise_mismatch(call)
        return self.control.rows

    def others(self) -> list[int]:
        """All other members, starting with the next, so that members do not all read the same one at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _raise_mismatch(self, call: CollectiveCall) -> None:
        """Raises for a member that called another operation. All see it in the same step, so the group stays usable."""
        for rank, row in enumerate(self.control.rows):
            if row[0] != call.signature:
                other = CollectiveCall.of(row[0])
                raise Mismatch(
                    f"{self.control.called([rank])} is at {other.spoken if other else 'something else'} while "
                    f"{self.control.called([self.rank])} is at {call.spoken}: all members must do the same",
                    [self.control.ranks[rank]],
                )

    def explain(self, error: TeamError, call: CollectiveCall) -> TeamError:
        """An error in another member's memory, with its cause if that member has died."""
        for rank in error.ranks:
            reason = self.control.gone_soon(rank)
            if reason is not None:
                who = self.control.called([rank])
                return WorkerLost(f"{who} {reason} in the middle of {call.spoken}", [self.control.ranks[rank]])
        return error


class Exchange:
    """One member's views of the tensors that the others offer it, by rank, until all have read."""

    def __init__(self, group: SharedGroup, call: CollectiveCall, signature: int, offers: Offers, wants: Offers) -> None:
        self._group, self._call = group, call
        control, peers = group.control, group.peers
        rank, size = group.rank, group.size
        turn = control.turn
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
                        control.slot(turn, rank, size_in_bytes, torch.uint8, used).copy_(bytes_of(offer))
                    entry = (_INLINE, 0, used)
                    used += -(-size_in_bytes // 64) * 64
                else:
                    _, entry = peers.expose(offer)
                    exposed = 1
                last = offer
            numbers[at], numbers[at + 1], numbers[at + 2], numbers[at + 3] = *entry, offer.nbytes + 1
        row = control.row
        row[1] = exposed
        row[FIRST : FIRST + _WIDTH * size] = memoryview(numbers)
        self._turn = turn
        self._rows = group.agree(call, signature)
        self._check()

    def __enter__(self) -> dict[int, View]:
        try:
            return self._open()
        except TeamError as error:
            raise self._group.explain(error, self._call) from None

    def _open(self) -> dict[int, View]:
        group = self._group
        views: dict[int, View] = {}
        at = FIRST + _WIDTH * group.rank
        for rank in group.others():
            number, descriptor, place, size = self._rows[rank][at : at + 4]
            if size <= 1:
                continue
            if number == _INLINE:
                views[rank] = MappedView(group.control.slot(self._turn, rank, size - 1, torch.uint8, place), 0)
            else:
                views[rank] = group.peers.view(rank, (number, descriptor, place))
        return views

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, TeamError):
            raise self._group.explain(error, self._call) from None
        if kind is None and any(row[1] for row in self._rows):
            self._group.control.finish(self._call, self._group.spin)
            self._group.peers.release()

    def _check(self) -> None:
        """Raises if an offer and an expectation differ; every member checks all pairs, so all raise alike."""
        size = self._group.size
        table = numpy.stack([numpy.asarray(row[FIRST : FIRST + _WIDTH * size]) for row in self._rows])
        offered, wanted = table[:, 3::_WIDTH], table[:, 4::_WIDTH].T
        wrong = numpy.argwhere(offered != wanted)
        if len(wrong):
            giver, taker = (int(number) for number in wrong[0])
            gives, takes = int(offered[giver, taker]) - 1, int(wanted[giver, taker]) - 1
            raise Mismatch(
                f"rank {giver} has {_bytes(gives)} for rank {taker}, which expects {_bytes(takes)}, "
                f"at {self._call.spoken}",
                [giver, taker],
            )


def _bytes(count: int) -> str:
    return "nothing" if count < 0 else f"{count} bytes"
