"""Where the members of a group come together: the board on which they write, and the reach to each other's memory."""

from __future__ import annotations

from paceline.collectives.operation import CollectiveCall
from paceline.errors import Mismatch, TeamError, WorkerLost
from paceline.transport.control_block import ControlBlock
from paceline.transport.peer_memory import PeerMemory


class SharedGroup:
    """One member's place among the others."""

    def __init__(self, board: ControlBlock, reach: PeerMemory) -> None:
        self.board, self.reach = board, reach
        self.rank, self.size = board.rank, board.size
        self.spin = True
        """Whether to wait by looking for a while; not from a thread in the background."""

    def come(self, made: CollectiveCall, signature: int) -> list[memoryview]:
        """Take a step for an operation, together with all others; everybody's numbers."""
        if not self.board.agree(signature, made, self.spin):
            self._disagree(made)
        return self.board.rows

    def others(self) -> list[int]:
        """All other members, beginning with the next: so that not all look at the same one at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _disagree(self, made: CollectiveCall) -> None:
        """Somebody came for something else. All see it in the same step, so that the group goes on."""
        for rank, row in enumerate(self.board.rows):
            if row[0] != made.signature:
                other = CollectiveCall.of(row[0])
                raise Mismatch(
                    f"{self.board.called([rank])} is at {other.spoken if other else 'something else'} while "
                    f"{self.board.called([self.rank])} is at {made.spoken}: all members must do the same",
                    [self.board.ranks[rank]],
                )

    def named(self, error: TeamError, made: CollectiveCall) -> TeamError:
        """What went wrong with another's memory, with the reason for it: mostly that its owner has died."""
        for rank in error.ranks:
            reason = self.board.gone_soon(rank)
            if reason is not None:
                who = self.board.called([rank])
                return WorkerLost(f"{who} {reason} in the middle of {made.spoken}", [self.board.ranks[rank]])
        return error
