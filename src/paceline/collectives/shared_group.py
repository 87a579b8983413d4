"""A group's shared control block, and access to its members' memory."""

from __future__ import annotations

from paceline.collectives.operation import CollectiveCall
from paceline.errors import Mismatch, TeamError, WorkerLost
from paceline.transport.control_block import ControlBlock
from paceline.transport.peer_memory import PeerMemory


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
