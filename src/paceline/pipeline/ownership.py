"""Ownership of the parameters of a split model: which worker updates each, and how it gets the others' gradients.

A parameter lies in shared memory once. Its owner, which updates it, is a worker of the first stage that uses it; the
workers of a shared stage own about as many bytes each. The owner sums the gradients of all other users: of later
stages, if weights are tied, and of other microbatches, if the stage is shared.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.events import Reduce
from paceline.pipeline.stage_links import StageLinks
from paceline.pipeline.stages import StageAssignment

_PRESENT, _GRADIENT = -8, -9
"""Tags: the parameters that a worker sends gradients of; these gradients, from here down."""
_VALUE = -(1 << 40)
"""Tag of the values of parameters, from here down."""


class Ownership:
    """One worker's own parameters, and the gradients that it sends and receives."""

    def __init__(self, assignment: StageAssignment, parameters: Sequence[nn.Parameter], links: StageLinks) -> None:
        self._assignment, self._parameters, self._links = assignment, parameters, links
        self._users: dict[int, list[int]] = {}
        """By parameter, the stages that use it."""
        self._owner: list[int] = []
        """By parameter, the rank of its owner."""
        self._sent: dict[int, list[int]] = {}
        """By owner, the parameters of which this worker sends gradients."""
        self._received: dict[int, list[int]] = {}
        """By user, the parameters of which this worker receives gradients."""

    def add_user(self, number: int, stage: int) -> None:
        """Records that a stage uses a parameter."""
        stages = self._users.setdefault(number, [])
        if stage not in stages:
            stages.append(stage)

    def first_stage(self, number: int) -> int:
        """The first stage that uses a parameter; the last stage if none does."""
        return self._users.get(number, [len(self._assignment.workers) - 1])[0]

    def assign(self) -> list[nn.Parameter]:
        """Chooses the owner of every parameter; returns this worker's own."""
        load = [0] * self._links.size
        for number, parameter in enumerate(self._parameters):
            workers = self._assignment.workers[self.first_stage(number)]
            owner = min(workers, key=lambda worker: load[worker])
            load[owner] += parameter.nbytes
            self._owner.append(owner)
        return [one for one, owner in zip(self._parameters, self._owner, strict=True) if owner == self._links.rank]

    def owner(self, number: int) -> int:
        """The rank of the worker that updates a parameter."""
        return self._owner[number]

    def uses(self, worker: int) -> set[int]:
        """The parameters that a worker's stages use."""
        stages = self._assignment.stages_of(worker)
        return {number for number, users in self._users.items() if any(stage in stages for stage in users)}

    def find_routes(self) -> None:
        """Derives from the users known so far which gradients this worker sends and receives."""
        rank = self._links.rank
        self._sent, self._received = {}, {}
        for number, stages in sorted(self._users.items()):
            owner = self._owner[number]
            users = sorted({worker for stage in stages for worker in self._assignment.workers[stage]} - {owner})
            if rank in users:
                self._sent.setdefault(owner, []).append(number)
            if rank == owner:
                for user in users:
                    self._received.setdefault(user, []).append(number)

    def reduce_gradients(self) -> None:
        """Sums every parameter's gradients at its owner, and drops them elsewhere."""
        self._refuse_sparse()
        transfers = []
        for owner, numbers in self._sent.items():
            gradients = [self._parameters[number].grad for number in numbers]
            # A worker may have had no microbatch, or the loss may not depend on a parameter.
            present = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)
            transfers.append(self._links.send(owner, present, _PRESENT))
            for number, gradient in zip(numbers, gradients, strict=True):
                if gradient is not None:
                    packed = gradient.detach().contiguous()
                    transfers.append(self._links.send(owner, packed, _GRADIENT - number))
                    self._parameters[number].grad = None
        for user, numbers in sorted(self._received.items()):
            present = torch.empty(len(numbers), dtype=torch.uint8)
            self._links.receive(user, present, _PRESENT)
            self._add(user, [number for number, one in zip(numbers, present.tolist(), strict=True) if one])
        for transfer in transfers:
            transfer.wait()

    def share_values(self) -> None:
        """Sends the new values of parameters from their owners to the other workers that use them."""
        transfers = []
        for user, numbers in self._received.items():
            for number in numbers:
                if (parameter := self._parameters[number]).requires_grad:
                    transfers.append(self._links.send(user, parameter.detach().contiguous(), _VALUE - number))
        for owner, numbers in self._sent.items():
            for number in numbers:
                if (parameter := self._parameters[number]).requires_grad:
                    value = torch.empty(parameter.shape, dtype=parameter.dtype)
                    self._links.finish(self._links.expect(owner, value, _VALUE - number))
                    parameter.data.copy_(value)
        for transfer in transfers:
            transfer.wait()

    def _refuse_sparse(self) -> None:
        for number in itertools.chain(*self._sent.values(), *self._received.values()):
            gradient = self._parameters[number].grad
            if gradient is not None and gradient.layout != torch.strided:
                raise UsageError(
                    "a parameter that several workers of a pipeline use has a sparse gradient, which they cannot sum; "
                    "make its layer without sparse=True"
                )

    def _add(self, user: int, numbers: list[int]) -> None:
        start, size = time.perf_counter(), 0
        for number in numbers:
            parameter = self._parameters[number]
            gradient = torch.empty(parameter.shape, dtype=parameter.dtype)
            self._links.finish(self._links.expect(user, gradient, _GRADIENT - number))
            size += gradient.nbytes
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        if numbers:
            self._links.recorder.add(Reduce(self._links.team_rank, start, time.perf_counter() - start, size))
