"""The weight of a gradient, as it is read from the graph of its loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.parameters.gradient_state import add_loss, gradient_states
from paceline.parameters.gradients import Gradients
from paceline.parameters.layout import Layout
from paceline.parameters.loss_reader import SUM, LossReader
from paceline.parameters.loss_weight import Batch, Kind, loss_weight

SAMPLES, CLASSES = 6, 3
MODEL = nn.Linear(5, CLASSES)
X = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2])
IGNORED = torch.tensor([-100, -100, 2, 0, 1, 2])
MASK = IGNORED >= 0
WEIGHTS = torch.tensor([1.0, 2.0, 3.0])
TARGETS = torch.rand(SAMPLES, CLASSES, generator=torch.Generator().manual_seed(1))

Loss = Callable[[torch.Tensor], torch.Tensor]


def penalty() -> torch.Tensor:
    return sum((p.pow(2).sum() for p in MODEL.parameters()), torch.zeros(()))


def each(outputs: torch.Tensor) -> list[torch.Tensor]:
    """A loss for each sample, as inner loops have them."""
    return [F.mse_loss(output, target) for output, target in zip(outputs, TARGETS, strict=True)]


def added(losses: list[torch.Tensor]) -> torch.Tensor:
    return sum(losses[1:], losses[0])


MEANS: dict[str, tuple[Loss, float, bool]] = {
    "cross entropy": (lambda o: F.cross_entropy(o, Y), 6, True),
    "ignored targets": (lambda o: F.cross_entropy(o, IGNORED), 4, True),
    "class weights": (lambda o: F.cross_entropy(o, Y, weight=WEIGHTS), 12, False),
    "of tokens": (lambda o: F.cross_entropy(o.repeat(2, 1), IGNORED.repeat(2)), 8, False),
    "label smoothing": (lambda o: F.cross_entropy(o, Y, label_smoothing=0.1), 6, False),
    "soft targets": (lambda o: F.cross_entropy(o, TARGETS), 6, True),
    "of images": (lambda o: F.cross_entropy(o.view(2, 3, 3).permute(0, 2, 1), Y.view(2, 3)), 6, True),
    "squares": (lambda o: F.mse_loss(o, TARGETS), 18, True),
    "distances": (lambda o: F.l1_loss(o, TARGETS), 18, True),
    "binary": (lambda o: F.binary_cross_entropy_with_logits(o, TARGETS), 18, True),
    "divergence": (lambda o: F.kl_div(F.log_softmax(o, -1), TARGETS, reduction="batchmean"), 6, True),
    "by hand": (lambda o: ((o - TARGETS) ** 2).mean(), 18, True),
    "a mean of means": (lambda o: ((o - TARGETS) ** 2).mean(1).mean(), 6, True),
    "a sum by samples": (lambda o: F.cross_entropy(o, Y, reduction="sum") / len(Y), 6, True),
    "a sum by a mask": (lambda o: (F.cross_entropy(o, Y, reduction="none") * MASK).sum() / MASK.sum(), 4, False),
    "a sum by its terms": (lambda o: F.mse_loss(o, TARGETS, reduction="sum") / TARGETS.numel(), 18, True),
    "scaled": (lambda o: 0.5 * F.cross_entropy(o, Y) / 4 + 1, 6, True),
    "with a penalty": (lambda o: F.cross_entropy(o, Y) + 1e-3 * penalty(), 6, True),
    "of several": (lambda o: F.cross_entropy(o, Y) - 0.1 * F.cross_entropy(-o, Y), 6, True),
    "of unlike items": (lambda o: F.mse_loss(o, TARGETS) + F.cross_entropy(o, Y), 6, True),
    "in a list": (lambda o: torch.stack([F.cross_entropy(o, Y), F.cross_entropy(-o, Y)]).mean(), 6, True),
    "one of each sample in a list": (lambda o: torch.stack(each(o)).mean(), 6, True),
    "one of each sample by their number": (lambda o: added(each(o)) / len(o), 6, True),
}
SUMS: dict[str, Loss] = {
    "cross entropy": lambda o: F.cross_entropy(o, Y, reduction="sum"),
    "by hand": lambda o: ((o - TARGETS) ** 2).sum(),
    "of several": lambda o: F.mse_loss(o, TARGETS, reduction="sum") - 0.5 * torch.sum(1 + o - o.exp()),
    "by a constant": lambda o: F.mse_loss(o, TARGETS, reduction="sum") / 32,
    "by the whole batch": lambda o: F.cross_entropy(o, Y, reduction="sum") / (4 * SAMPLES),
    "one of each sample": lambda o: added(each(o)),
    "one of each sample in a list": lambda o: torch.stack(each(o)).sum(),
    "one of each sample by a constant": lambda o: added(each(o)) / 32,
    "of rewards": lambda o: torch.stack([-row.log_softmax(0)[0] for row in o]).sum(),
}
UNKNOWN: dict[str, Loss] = {
    "a root": lambda o: F.mse_loss(o, TARGETS).sqrt(),
    "unlike means": lambda o: F.mse_loss(o, TARGETS) + F.cross_entropy(o, IGNORED),
    "a product": lambda o: F.mse_loss(o, TARGETS) * F.cross_entropy(o, Y),
    "a sum with a penalty": lambda o: F.mse_loss(o, TARGETS, reduction="sum") + penalty(),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_counts_its_items(name: str) -> None:
    loss, count, by_sample = MEANS[name]
    found = loss_weight(loss(MODEL(X)), Batch(SAMPLES, set()))
    assert (found.kind, found.items, found.by_sample) == (Kind.MEAN, count, by_sample)


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_known_as_one(name: str) -> None:
    assert loss_weight(SUMS[name](MODEL(X)), Batch(SAMPLES, set())).kind is Kind.SUM


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_neither_is_not_guessed(name: str) -> None:
    assert loss_weight(UNKNOWN[name](MODEL(X)), Batch(SAMPLES, set())).kind is Kind.UNKNOWN


def test_a_divisor_that_was_a_constant_before_is_no_count_by_chance() -> None:
    seen: set[float] = set()
    for samples, kind in ((SAMPLES, Kind.SUM), (2, Kind.SUM)):
        loss = F.cross_entropy(MODEL(X[:samples]), Y[:samples], reduction="sum") / 2
        assert loss_weight(loss, Batch(samples, seen)).kind is kind


def test_as_many_losses_as_samples_may_be_one_of_each() -> None:
    lists: set[int] = set()
    loss = added([F.cross_entropy(one * MODEL(X), Y) for one in range(SAMPLES)])
    assert loss_weight(loss, Batch(SAMPLES, set(), set(), lists)).kind is Kind.MEAN
    assert lists == {SAMPLES}


def test_as_many_losses_for_every_number_of_samples_are_not_one_of_each() -> None:
    said: list[str] = []
    reader = LossReader(said.append, divided=True)
    for reader.samples in (SAMPLES, 2):
        x, y = X[: reader.samples], Y[: reader.samples]
        assert reader.read(F.cross_entropy(MODEL(x), y) + F.cross_entropy(-MODEL(x), y)).kind is Kind.MEAN
    assert not said


def test_products_of_parameters_and_data_are_no_penalty() -> None:
    weight, offset = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(()))
    loss = ((X * weight).sum(1) + offset - TARGETS[:, 0]).pow(2).mean() + 0.1 * weight.abs().sum()
    assert loss_weight(loss, Batch(SAMPLES, set()))[:2] == (Kind.MEAN, SAMPLES)


def test_a_copy_of_another_workers_part_has_no_weight_and_teaches_nothing() -> None:
    model, said = nn.Linear(5, CLASSES), list[str]()
    optimizer = torch.optim.SGD(model.parameters())
    gradients = Gradients.private(Layout(list(model.named_parameters()), 1), torch.device("cpu"))
    gradients.attach()
    reader = LossReader(said.append, divided=True)
    (state,) = gradient_states(optimizer, gradients, 0.5, reader)

    def backward(samples: int, share: float, divisor: float, given: float | None = None) -> None:
        reader.samples, reader.copied = samples, not share
        state.take_batch(share)
        loss = model(X[:3]).sum() / divisor
        add_loss([state], reader.read(loss, given))
        loss.backward()

    try:
        backward(0, 0.0, 3.0)
        backward(0, 0.0, 3.0, SUM)  # of several batches that are summed
        assert (state.weight.weight, reader.averaged, said) == (0.0, False, [])
        backward(3, 0.5, 1.0)
        assert torch.equal(model.weight.grad, X[:3].sum(0).expand(CLASSES, -1)), "of the last one alone"
        assert state.weight.loss.kind is Kind.SUM
        assert said == []
        model.zero_grad()
        backward(3, 0.5, 3.0)
        assert state.weight.loss.kind is Kind.MEAN, "3 counts samples; the copy's 3 were not taken for a constant"
    finally:
        reader.close()
        gradients.detach()
