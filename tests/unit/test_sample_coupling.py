"""Losses in which samples meet are found in their graphs, all others are left alone, and nothing is disturbed."""
# ruff: noqa: PLW0108 (each loss is computed anew when it is asked for)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.parameters.loss_reader import LossReader
from paceline.parameters.sample_coupling import Coupling, find_coupling

SAMPLES = 8
Loss = Callable[[], torch.Tensor]


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5))
X, OTHER, TARGET = noise(SAMPLES, 6), noise(SAMPLES, 6, seed=2), noise(SAMPLES, 5, seed=3)
LABELS = torch.arange(SAMPLES) % 5
SCALE = nn.Parameter(torch.tensor(2.0))
SEQUENCE, IMAGE = nn.Linear(6, 4), nn.Conv2d(3, 4, 3, padding=1)
SPECTRAL = nn.utils.spectral_norm(nn.Linear(6, SAMPLES, bias=False))
NORMED = nn.utils.parametrizations.weight_norm(nn.Linear(6, SAMPLES, bias=False))
ADAPTED = [nn.Parameter(noise(SAMPLES, 6)), nn.Parameter(noise(SAMPLES, 2)), nn.Parameter(noise(2, 6))]


def out(x: torch.Tensor = X) -> torch.Tensor:
    result: torch.Tensor = NET(x)
    return result


def each() -> torch.Tensor:
    return F.cross_entropy(out(), LABELS, reduction="none")


def words() -> torch.Tensor:
    result: torch.Tensor = SEQUENCE(noise(SAMPLES, SAMPLES, 6))
    return result


def pixels() -> torch.Tensor:
    return F.cross_entropy(IMAGE(noise(SAMPLES, 3, 8, 8)), torch.zeros(SAMPLES, 8, 8).long(), reduction="none")


def steady(x: torch.Tensor, highest: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A softmax by hand, with a maximum subtracted."""
    return -((x - highest()) - (x - highest()).exp().sum(1, keepdim=True).log()).gather(1, LABELS[:, None]).mean()


def slope() -> torch.Tensor:
    x = X.clone().requires_grad_()
    score = out(x).sum(1)
    (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return score.mean() + ((gradient.norm(dim=1) - 1) ** 2).mean()


def hinge_of_pairs(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.relu(1 - (x - y)).mean()


ORDINARY: dict[str, Loss] = {
    "cross entropy": lambda: F.cross_entropy(out(), LABELS),
    "smoothed and weighted": lambda: F.cross_entropy(out(), LABELS, weight=torch.ones(5), label_smoothing=0.1),
    "squares": lambda: F.mse_loss(out(), TARGET),
    "sum of squares": lambda: F.mse_loss(out(), TARGET, reduction="sum"),
    "absolute": lambda: F.l1_loss(out(), TARGET),
    "huber": lambda: F.huber_loss(out(), TARGET),
    "logits": lambda: F.binary_cross_entropy_with_logits(out(), TARGET.sigmoid()),
    "divergence": lambda: F.kl_div(out().log_softmax(1), TARGET.softmax(1), reduction="batchmean"),
    "gaussian": lambda: F.gaussian_nll_loss(out()[:, :2], TARGET[:, :2], out()[:, 2:4].exp()),
    "cosine": lambda: (1 - F.cosine_similarity(out(), out(OTHER))).mean(),
    "triplets": lambda: F.triplet_margin_loss(out(), out(OTHER), TARGET),
    "steady by the batch": lambda: steady(x := out(), lambda: x.max()),
    "steady by the row": lambda: steady(x := out(), lambda: x.max(1, keepdim=True).values),
    "maximum of a row": lambda: out().max(1).values.mean(),
    "largest of a row": lambda: out().topk(2, dim=1).values.mean(),
    "pairs of a row": lambda: hinge_of_pairs((x := out())[:, :, None], x[:, None, :]),
    "pairs of a wide row": lambda: hinge_of_pairs(
        (x := SEQUENCE(noise(SAMPLES, 8, 6))[..., 0])[:, :, None], x[:, None]
    ),
    "some by a mask": lambda: each()[LABELS != 0].mean(),
    "some by their order": lambda: each()[torch.tensor([1, 3, 4])].mean(),
    "in another order": lambda: each()[torch.arange(SAMPLES).flip(0)].mean(),
    "in two steps": lambda: (out() - TARGET).pow(2).mean(0).sum(),
    "critic": lambda: (x := out())[SAMPLES // 2 :].mean() - x[: SAMPLES // 2].mean(),
    "words": lambda: F.cross_entropy(SEQUENCE(noise(SAMPLES, 16, 6)).flatten(0, 1), torch.zeros(128).long()),
    "time first": lambda: F.cross_entropy(SEQUENCE(noise(8, SAMPLES, 6)).permute(1, 2, 0), torch.zeros(8, 8).long()),
    "maximum over time": lambda: SEQUENCE(noise(8, SAMPLES, 6)).max(0).values.mean(),
    "words that meet, time first": lambda: SEQUENCE(noise(16, SAMPLES, 6)).sum(0).pow(2).mean(),
    "words that meet": lambda: SEQUENCE(noise(SAMPLES, 16, 6)).logsumexp(1).mean(),
    "slope": slope,
    "penalty": lambda: F.cross_entropy(out(), LABELS) + 0.01 * sum(p.pow(2).sum() for p in NET.parameters()),
    "spectral norm": lambda: F.cross_entropy(SPECTRAL(X), LABELS),
    "weight norm": lambda: F.cross_entropy(NORMED(X), LABELS),
    "adapter": lambda: F.cross_entropy(F.linear(X, ADAPTED[0] + 0.1 * ADAPTED[1] @ ADAPTED[2]), LABELS),
    "segmentation": lambda: pixels().mean(),
    "hard pixels of an image": lambda: pixels().flatten(1).topk(8, dim=1).values.mean(),
    "hard pixels, image by image": lambda: torch.stack(
        [one.flatten().topk(8).values.mean() for one in pixels()]
    ).mean(),
}


def simclr() -> torch.Tensor:
    z = F.normalize(out(torch.cat([X, OTHER])), dim=1)
    likeness = (z @ z.T).masked_fill(torch.eye(2 * SAMPLES).bool(), -1e9)
    return F.cross_entropy(likeness, torch.arange(2 * SAMPLES).roll(SAMPLES))


def clip() -> torch.Tensor:
    logits = SCALE.exp() * F.normalize(out()) @ F.normalize(out(OTHER)).T
    return (F.cross_entropy(logits, torch.arange(SAMPLES)) + F.cross_entropy(logits.T, torch.arange(SAMPLES))) / 2


def supervised() -> torch.Tensor:
    z, alike = F.normalize(out()), (LABELS[:, None] == LABELS[None]).float()
    return -((z @ z.T).log_softmax(1) * alike / alike.sum(1, keepdim=True)).sum(1).mean()


def hardest() -> torch.Tensor:
    distances = torch.cdist(x := out(), x)
    return F.relu(distances.max(1).values - distances.min(1).values + 0.3).mean()


def compiled() -> torch.Tensor:
    z = F.normalize(torch.compile(NET, backend="aot_eager")(X))
    return F.cross_entropy(z @ z.T, torch.arange(SAMPLES))


COMPARING: dict[str, Loss] = {
    "compiled": compiled,
    "simclr": simclr,
    "clip": clip,
    "supervised contrast": supervised,
    "distances": lambda: F.relu(1 - torch.cdist(x := out(), x)).mean(),
    "distances of one": lambda: torch.exp(-torch.pdist(out())).mean(),
    "spread": lambda: F.relu(1 - torch.sqrt(out().var(0) + 1e-4)).mean(),
    "correlation": lambda: ((out().T @ out(OTHER) / SAMPLES - torch.eye(5)) ** 2).sum(),
    "ranking": lambda: hinge_of_pairs((x := out()[:, 0])[:, None], x[None, :]),
    "the next one": lambda: ((x := out()) * x.roll(1, 0)).sum(1).sigmoid().mean(),
    "survival": lambda: (torch.logcumsumexp(x := out()[:, 0], 0) - x).mean(),
    "a list": lambda: -(TARGET[:, 0].softmax(0) * out()[:, 0].log_softmax(0)).sum(),
    "normalised": lambda: (((x := out()) - x.mean(0)) / x.std(0) * TARGET).mean(),
}
SELECTING: dict[str, Loss] = {
    "largest": lambda: each().topk(4).values.mean(),
    "sorted": lambda: each().sort(descending=True).values[:4].mean(),
    "by index": lambda: (x := each())[x.detach().topk(6).indices].mean(),
    "gathered": lambda: (x := each()).gather(0, x.argsort(descending=True)[:6]).mean(),
    "selected": lambda: (x := each()).index_select(0, x.detach().sort().indices[:6]).mean(),
    "pixels": lambda: pixels().flatten().topk(50).values.mean(),
    "maximum": lambda: out().amax(0).mean(),
    "quantile": lambda: ((x := each()) - x.quantile(0.5)).relu().mean(),
    "hardest": hardest,
}


@pytest.mark.parametrize(
    ("loss", "wanted"),
    [
        *((ORDINARY[name], Coupling.NONE) for name in ORDINARY),
        *((COMPARING[name], Coupling.COMPARES) for name in COMPARING),
        *((SELECTING[name], Coupling.SELECTS) for name in SELECTING),
    ],
    ids=[*ORDINARY, *COMPARING, *SELECTING],
)
def test_samples_that_meet_are_found_and_no_others(loss: Loss, wanted: Coupling) -> None:
    made = loss()
    before = torch.get_rng_state()
    assert {find_coupling(made, SAMPLES, seed).coupling for seed in (1, 2, 4, 8)} == {wanted}
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in NET.parameters())
    made.backward()  # its graph is still there
    NET.zero_grad()


def reader() -> tuple[LossReader, list[str]]:
    lines: list[str] = []
    made = LossReader(lines.append, divided=True)
    made.samples = SAMPLES
    return made, lines


def test_it_is_said_once_and_to_one_who_has_a_part() -> None:
    read, lines = reader()
    read.divided = False
    for _ in range(3):
        read.read(clip())
    assert not lines
    read.divided = True
    for _ in range(5):
        read.read(clip())
    read.close()
    assert len(lines) == 1 and "compares the samples of a batch with each other" in lines[0]


def test_rows_of_samples_of_unlike_lengths_are_no_reason() -> None:
    read, lines = reader()
    for length in (16, 24, 40, 72, 32, 48, 56, 64):  # of all samples together, as a packed sequence has them
        read.read(SEQUENCE(noise(length, 6)).logsumexp(0).mean())
    read.close()
    assert not lines


def test_as_many_classes_as_samples_are_no_samples_of_a_piece_of_the_batch() -> None:
    read, lines = reader()
    for _ in range(8):
        piece = SAMPLES // 2
        read.read(F.cross_entropy(nn.Linear(6, SAMPLES)(X[:piece]), LABELS[:piece]))
    read.close()
    assert not lines


def test_a_loss_is_looked_at_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def look(_loss: Any, _samples: int, seed: int, **_options: Any) -> Any:
        looks.append(seed)
        return Coupling.NONE, 1

    monkeypatch.setattr("paceline.parameters.loss_reader.find_coupling", look)
    read, _ = reader()
    for _ in range(30):
        read.read(F.cross_entropy(out(), LABELS))
    read.close()
    assert looks == [1, 2, 4, 8]


def test_hooks_of_a_script_do_not_run_for_it() -> None:
    read, _ = reader()
    calls: list[int] = []
    for _ in range(4):
        x = out()
        x.register_hook(lambda _: calls.append(1))
        x.retain_grad()
        loss = F.cross_entropy(x, LABELS)
        read.read(loss)
        loss.backward()
        assert x.grad is not None and torch.equal(
            x.grad, torch.autograd.grad(F.cross_entropy(y := out(), LABELS), y)[0]
        )
    read.close()
    assert len(calls) == 4


def test_hooks_of_modules_do_not_run_for_it() -> None:
    read, _ = reader()
    calls: list[int] = []
    hook = NET.register_full_backward_hook(lambda *_: calls.append(1))
    for _ in range(4):
        loss = clip()
        read.read(loss)
        loss.backward()
    read.close()
    hook.remove()
    NET.zero_grad()
    assert len(calls) == 8  # two calls of the model each


def test_torch_is_as_it_was_after_it() -> None:
    before = torch.Tensor.register_hook, "retain_grad" in vars(torch.Tensor)
    first, second = reader()[0], reader()[0]
    first.close()
    first.close()
    assert torch.Tensor.register_hook is not before[0]
    second.close()
    assert (torch.Tensor.register_hook, "retain_grad" in vars(torch.Tensor)) == before
