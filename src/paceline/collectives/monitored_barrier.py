"""A barrier at which rank 0 finds the members that do not come, with the messages that gloo's has."""

from __future__ import annotations

import time

import torch

from paceline.errors import TeamTimeout, WorkerLost, names
from paceline.transport.mailbox import Mailbox

_CALL = -(1 << 40)
"""Tags of a monitored barrier; users' tags are not negative."""


class MonitoredBarrier:
    """One member's part in such barriers of a group on one machine."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox, self._rank, self._size = mailbox, mailbox.rank, mailbox.size
        self._count = 0

    def wait(self, limit: float, all_ranks: bool) -> None:
        """Waits for all members; raises TeamTimeout with the first missing one, or with all. limit: in seconds."""
        # Every barrier has its own tags: a late message of one must not count for the next.
        self._count += 1
        call, answer = _CALL - 2 * self._count, _CALL - 2 * self._count - 1
        nothing, missing = torch.empty(0, dtype=torch.uint8), torch.zeros(self._size, dtype=torch.bool)
        if self._rank:
            self._mailbox.send(0, nothing, call)
            self._mailbox.receive(0, missing, answer).wait(2 * limit + 1.0)
        else:
            self._receive_calls(call, limit, all_ranks, missing)
            for rank in range(1, self._size):
                self._mailbox.send(rank, missing, answer)
        late = [rank for rank in range(self._size) if missing[rank]]
        if late:
            raise TeamTimeout(self._said(late, limit), late)

    def _said(self, late: list[int], limit: float) -> str:
        listed = f"Rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
        if self._rank:
            return (
                f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0: {names(late)} did not come in {limit:g} s"
            )
        if limit <= 0.0:
            return f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {limit * 1000:g} ms"
        return f"[Rank 0]: {listed} failed to pass monitoredBarrier in {limit * 1000:g} ms: {names(late)} did not come"

    def _receive_calls(self, tag: int, limit: float, all_ranks: bool, missing: torch.Tensor) -> None:
        """Rank 0 waits for the others, and marks the missing ones: the first, or all of them."""
        until = time.monotonic() + limit
        nothing = torch.empty(0, dtype=torch.uint8)
        for rank in range(1, self._size):
            try:
                self._mailbox.receive(rank, nothing, tag).wait(max(0.01, until - time.monotonic()))
            except (TeamTimeout, WorkerLost):
                missing[rank] = True
                if not all_ranks:
                    return
