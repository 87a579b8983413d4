"""Who updates which parameter of a split model, and how it comes by the gradients that others have of it.

A parameter lies in shared memory once, and one worker updates it: one of those of the first stage that uses it. Where
several share that stage, each has about as many bytes to update. The others' gradients are summed there: those of later
stages, if weights are tied, and those of other microbatches, if a stage is shared.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.events import Recorder, Reduce, Wait
from paceline.pipeline.stage_assignment import StageAssignment
from paceline.transport.mailbox import Mailbox, ReceiveTransfer

_UPDATED, _LIST, _GRADIENT = -8, -9, -10
"""Tags: that a worker has made its updates, of which parameters it sends gradients, and, from there down, these."""
_NOTABLE = 5e-6


class Ownership:
    """One worker's view of that."""

    def __init__(
        self,
        assignment: StageAssignment,
        parameters: Sequence[nn.Parameter],
        mailbox: Mailbox,
        recorder: Recorder,
        ranks: Sequence[int],
    ) -> None:
        """ranks: in the team, by place in the mailbox."""
        self._assignment, self._parameters, self._mailbox = assignment, parameters, mailbox
        self._recorder, self._ranks = recorder, ranks
        self._rank = mailbox.rank
        self._stages: dict[int, list[int]] = {}
        """By parameter, the stages that use it."""
        self._owner: list[int] = []
        self._sent: dict[int, list[int]] = {}
        """Of which parameters this worker's gradients go to whom."""
        self._taken: dict[int, list[int]] = {}
        """And of which it takes whose."""
        self._coming: list[ReceiveTransfer] = []

    def note(self, number: int, stage: int) -> None:
        """A stage uses a parameter."""
        stages = self._stages.setdefault(number, [])
        if stage not in stages:
            stages.append(stage)

    def first_stage(self, number: int) -> int:
        """The first that uses a parameter; the last there is, if none does."""
        return self._stages.get(number, [len(self._assignment.workers) - 1])[0]

    def share_out(self) -> list[nn.Parameter]:
        """Find an owner for every parameter; those that are this worker's."""
        load = [0] * self._mailbox.size
        for number, parameter in enumerate(self._parameters):
            workers = self._assignment.workers[self.first_stage(number)]
            owner = min(workers, key=lambda worker: load[worker])
            load[owner] += parameter.nbytes
            self._owner.append(owner)
        return [one for one, owner in zip(self._parameters, self._owner, strict=True) if owner == self._rank]

    def find_routes(self) -> None:
        """Once it is known who uses what."""
        self._sent, self._taken = {}, {}
        for number, stages in sorted(self._stages.items()):
            owner = self._owner[number]
            users = sorted({worker for stage in stages for worker in self._assignment.workers[stage]} - {owner})
            if self._rank in users:
                self._sent.setdefault(owner, []).append(number)
            if self._rank == owner:
                for user in users:
                    self._taken.setdefault(user, []).append(number)

    def bring(self) -> None:
        """Let every parameter's gradient be whole, where it is updated, and nowhere else."""
        self._refuse_sparse()
        sendings = []
        for owner, numbers in self._sent.items():
            gradients = [self._parameters[number].grad for number in numbers]
            # A worker may have had no microbatch, or the loss may not depend on a parameter.
            there = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)
            sendings.append(self._mailbox.send(owner, there, _LIST))
            for number, gradient in zip(numbers, gradients, strict=True):
                if gradient is not None:
                    sendings.append(self._mailbox.send(owner, gradient.detach().contiguous(), _GRADIENT - number))
                    self._parameters[number].grad = None
        for user, numbers in sorted(self._taken.items()):
            there = torch.empty(len(numbers), dtype=torch.uint8)
            self._await(self._mailbox.receive(user, there, _LIST))
            self._add(user, [number for number, one in zip(numbers, there.tolist(), strict=True) if one])
        for sending in sendings:
            sending.wait()

    def _refuse_sparse(self) -> None:
        for number in itertools.chain(*self._sent.values(), *self._taken.values()):
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
            self._mailbox.receive(user, gradient, _GRADIENT - number).wait()
            size += gradient.nbytes
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        if numbers:
            self._recorder.add(Reduce(self._ranks[self._rank], start, time.perf_counter() - start, size))

    # -- updates -----------------------------------------------------------------------------------------------------

    def updated(self) -> None:
        """This worker has made its updates; the others of its stage need them for their next pass."""
        for peer in self._assignment.peers_of(self._rank):
            self._mailbox.send(peer, torch.zeros(1, dtype=torch.uint8), _UPDATED)
            self._coming.append(self._mailbox.receive(peer, torch.empty(1, dtype=torch.uint8), _UPDATED))

    def meet(self) -> None:
        """Until the others of its stage have made theirs."""
        coming, self._coming = self._coming, []
        for receiving in coming:
            self._await(receiving)

    def _await(self, receiving: ReceiveTransfer) -> None:
        start = time.perf_counter()
        receiving.wait()
        waited = time.perf_counter() - start
        if waited > _NOTABLE:
            self._recorder.add(Wait(self._ranks[self._rank], start, waited, self._ranks[receiving.peer]))
