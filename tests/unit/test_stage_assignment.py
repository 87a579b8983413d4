"""Which worker runs each microbatch of a stage, and which one updates each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from paceline.pipeline.ownership import Ownership
from paceline.pipeline.stage_links import StageLinks
from paceline.pipeline.stages import StageAssignment


class Nobody:
    """A mailbox that is never used."""

    network = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def owners(assignment: StageAssignment, rank: int, parameters: Sequence[nn.Parameter]) -> Ownership:
    size = sum(assignment.counts)
    mailbox: Any = Nobody(rank, size)
    unused: Any = None
    return Ownership(assignment, parameters, StageLinks(mailbox, unused, range(size), unused))


def test_workers_are_given_to_stages_one_after_the_other() -> None:
    assert StageAssignment.of((1, 2, 1)).workers == ((0,), (1, 2), (3,))
    assert StageAssignment.of((1, 2, 1)).shared and not StageAssignment.of((1, 1)).shared


def test_with_several_chunks_every_worker_has_a_stage_again() -> None:
    assignment = StageAssignment.of((1, 1), chunks=2)
    assert assignment.workers == ((0,), (1,), (0,), (1,))
    assert assignment.stages_of(1) == [1, 3]


def test_those_of_a_stage_take_microbatches_in_turn() -> None:
    assignment = StageAssignment.of((1, 3))
    assert [assignment.worker(0, microbatch) for microbatch in range(4)] == [0, 0, 0, 0]
    assert [assignment.worker(1, microbatch) for microbatch in range(7)] == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize("counts", [(2, 1), (1, 2), (2, 2), (3,), (1, 2, 1)])
def test_every_parameter_is_updated_by_one_worker_of_the_first_stage_that_uses_it(counts: tuple[int, ...]) -> None:
    assignment = StageAssignment.of(counts)
    last = len(counts) - 1
    parameters = [nn.Parameter(torch.zeros(size)) for size in (10, 10, 30, 5, 5, 7, 7, 2)]
    used = {0: [0], 1: [0], 2: [0, last], 3: [last], 4: [last], 5: [last // 2], 6: [last // 2]}  # the last by nobody
    found: list[int] = []
    for rank in range(sum(counts)):
        own = owners(assignment, rank, parameters)
        for number, stages in used.items():
            for stage in stages:
                own.add_user(number, stage)
        mine = {id(one) for one in own.assign()}
        found += [number for number, one in enumerate(parameters) if id(one) in mine]
        stages = [own.first_stage(number) for number, one in enumerate(parameters) if id(one) in mine]
        assert all(rank in assignment.workers[stage] for stage in stages)
        assert stages, "each has something to update"
    assert sorted(found) == list(range(8))
