"""Collects the results of the last stage on its first worker, the root, and sends values from there to all workers."""

from __future__ import annotations

import itertools

import torch

from paceline.pipeline.stage_assignment import StageAssignment
from paceline.pipeline.stage_links import StageLinks

_RESULT = -7
"""Tag of these messages; `ownership` uses those below."""


class ResultExchange:
    """One worker's part in the exchange of results."""

    def __init__(self, links: StageLinks, assignment: StageAssignment) -> None:
        self._links = links
        self._root, *self._others = assignment.workers[-1]
        self.is_root = links.rank == self._root

    def gather(self, own: dict[int, list[torch.Tensor]]) -> dict[int, list[torch.Tensor]]:
        """Tensors by microbatch: on the root those of all workers of the last stage, elsewhere `own`."""
        if self._links.rank in self._others:
            counts = [[microbatch, len(values)] for microbatch, values in own.items()]
            self._send(torch.tensor(counts, dtype=torch.long).view(-1, 2))
            for value in itertools.chain(*own.values()):
                self._send(value)
        elif self.is_root:
            for other in self._others:
                for microbatch, count in self._receive(other).tolist():
                    own[microbatch] = [self._receive(other) for _ in range(count)]
        return dict(sorted(own.items()))

    def broadcast(self, value: torch.Tensor | None) -> torch.Tensor:
        """The root's tensor, on every worker."""
        if not self.is_root:
            return self._receive(self._root)
        assert value is not None
        peers = [peer for peer in range(self._links.size) if peer != self._root]
        return self._links.send_described(peers, value, _RESULT)

    def _send(self, value: torch.Tensor) -> None:
        self._links.send_described([self._root], value, _RESULT)

    def _receive(self, peer: int) -> torch.Tensor:
        return self._links.receive_described(peer, _RESULT)
