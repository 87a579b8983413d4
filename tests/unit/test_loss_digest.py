"""Workers whose losses are computed in different ways are found by digests, and those of like ones agree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from paceline.parameters.loss_digest import LossComparison, LossDigest

OUTPUT = torch.linspace(-1, 1, 32).view(8, 4).requires_grad_()
LABELS = torch.arange(8) % 4
Way = Callable[[torch.Tensor], torch.Tensor]


def digest(way: Way, samples: int = 8) -> int:
    """Of a loss on so many samples."""
    made = LossDigest()
    made.add(way(F.cross_entropy(OUTPUT[:samples], LABELS[:samples])), samples)
    return made.value


LIKE: dict[str, tuple[Way, Way]] = {
    "plain": (lambda loss: loss, lambda loss: loss),
    "a factor": (lambda loss: 0.1 * loss, lambda loss: loss * 0.1),
    "divided by its items": (lambda loss: loss / 7, lambda loss: loss / 5),
    "many terms": (lambda loss: loss + loss.exp(), lambda loss: loss + loss.exp() + loss.sqrt()),
}
UNLIKE: dict[str, tuple[Way, Way]] = {
    "one has a factor": (lambda loss: 0.1 * loss, lambda loss: loss),
    "one has a term more": (lambda loss: loss + loss.exp(), lambda loss: loss),
    "one has another sign": (lambda loss: -loss, lambda loss: loss),
    "a tensor of the batch": (lambda loss: loss * torch.tensor(2.0), lambda loss: loss * torch.tensor(3.0)),
}


@pytest.mark.parametrize("name", LIKE)
def test_losses_that_are_computed_alike_agree(name: str) -> None:
    first, second = LIKE[name]
    assert LossComparison().unlike({0: digest(first), 1: digest(second)}) == -1


@pytest.mark.parametrize("name", UNLIKE)
def test_a_worker_that_computes_another_loss_is_found_at_once(name: str) -> None:
    first, second = UNLIKE[name]
    assert LossComparison().unlike({0: digest(first), 2: digest(first), 3: digest(second)}) == 3


def test_factors_that_are_decided_for_are_found_and_random_ones_are_not() -> None:
    decided, drawn = LossComparison(), LossComparison()
    assert decided.unlike({0: digest(lambda loss: 1.0 * loss), 1: digest(lambda loss: 1.0 * loss)}) == -1
    assert decided.unlike({0: digest(lambda loss: 1.0 * loss), 1: digest(lambda loss: 0.1 * loss)}) == 1
    for step in range(1, 20):
        ways = {rank: digest(lambda loss, own=step + rank / 2 - 0.1: own * loss) for rank in range(2)}  # type: ignore[misc]
        assert drawn.unlike(ways) == -1


def test_the_number_of_samples_may_differ() -> None:
    for few, more in ((4, 5), (torch.tensor(4.0), torch.tensor(5.0))):
        ways = {0: digest(lambda loss, by=few: loss * by, 4), 1: digest(lambda loss, by=more: loss * by, 5)}  # type: ignore[misc]
        assert LossComparison().unlike(ways) == -1


def test_the_losses_of_a_step_count_in_their_order() -> None:
    first, second = LossDigest(), LossDigest()
    loss = F.cross_entropy(OUTPUT, LABELS)
    for one in (loss, -loss):
        first.add(one, 8)
    for one in (-loss, loss):
        second.add(one, 8)
    assert first.value != second.value
    assert all(0 <= made.value < 1 << 63 for made in (first, second))
