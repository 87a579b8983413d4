"""A loss is checked on random outputs, once for every kind of loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from paceline.parameters.loss_weight import Batch, Kind, loss_weight
from paceline.pipeline.deferred import Deferred
from paceline.pipeline.loss_check import adds_up, kind, loss_on_random_outputs
from paceline.pipeline.microbatch_loss import MicrobatchLoss

BATCH, LENGTH, CLASSES = 8, 3, 5
TARGETS = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % CLASSES


class Run:
    finished = False


def output() -> Any:
    run: Any = Run()
    return Deferred.result(run, torch.empty(BATCH, LENGTH, CLASSES, device="meta"), 0)


def flat(made: Any) -> Any:
    return functional.cross_entropy(made.flatten(0, 1), TARGETS.flatten())


@pytest.mark.parametrize(
    ("loss", "sound"),
    [
        (flat, True),
        (lambda made: functional.cross_entropy(made.flatten(0, 1), TARGETS.flatten(), ignore_index=2) * 3 - 1, True),
        (lambda made: made.square().sum() / 7, True),
        (lambda made: functional.cross_entropy(made.transpose(0, 1).flatten(0, 1), TARGETS.t().flatten()), False),
        (lambda made: (made - made.flip(0)).square().mean(), False),
        (lambda made: made.sort(0).values.mul(torch.arange(BATCH).view(-1, 1, 1)).mean(), False),
        (lambda made: functional.dropout(made, 0.5).mean(), True),  # drawn anew each time: nothing can be seen
        (lambda made: (made - 2).log().mean(), True),  # no number: neither
    ],
)
@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (3, 3, 2)])
def test_what_does_not_add_up_is_found(loss: Callable[[Any], Any], sound: bool, sizes: tuple[int, ...]) -> None:
    state = torch.get_rng_state()
    assert adds_up(loss(output()), MicrobatchLoss(BATCH, sizes)) == sound
    assert torch.equal(torch.get_rng_state(), state)


def test_numbers_that_change_in_every_step_make_no_other_kind() -> None:
    sizes = (4, 4)
    assert kind(flat(output()) * 2 / 5, sizes) == kind(flat(output()) * 3 / 7.5, sizes)
    assert kind((output() * 2).mean(), sizes) == kind((output() * 3).mean(), sizes)
    assert kind(output()[:, 1].mean(), sizes) != kind(output()[:, 2].mean(), sizes)
    assert kind(output().mean(), sizes) != kind(output().mean(), (5, 3))
    assert kind(output().mean(), sizes) != kind(output().sum(), sizes)


def test_a_term_of_the_output_itself_is_no_penalty_on_parameters() -> None:
    targets = TARGETS.clone()
    targets[0] = -100
    made = output()
    loss = functional.cross_entropy(made.flatten(0, 1), targets.flatten()) + 0.1 * made.square().mean()
    found = loss_weight(loss_on_random_outputs(loss, BATCH), Batch(BATCH, set()))
    assert found.kind is Kind.UNKNOWN  # means over different numbers of items
    whole = functional.cross_entropy(output().flatten(0, 1), targets.flatten())
    assert loss_weight(loss_on_random_outputs(whole, BATCH), Batch(BATCH, set())).items == (BATCH - 1) * LENGTH
