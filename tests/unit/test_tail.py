"""A model's own loss is computed from the results of its last stage, and divided into terms of microbatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from paceline.graph.model_profile import model_profile, undivided
from paceline.graph.trace import GraphTrace
from paceline.pipeline.deferred import Deferred
from paceline.pipeline.microbatch_loss import MicrobatchLoss, microbatch_sizes
from paceline.pipeline.model_loss import loss_is_divisible

Tensor = torch.Tensor
BATCH, LENGTH, WIDTH, WORDS = 6, 5, 4, 7


class Speaker(nn.Module):
    """A language model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.register_buffer("rarity", torch.linspace(0.5, 1.5, WORDS))

    def logits(self, tokens: Tensor) -> Tensor:
        made: Tensor = self.head(torch.tanh(self.layer(self.embed(tokens))))
        return made

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        logits = self.logits(tokens)
        labels = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return functional.cross_entropy(logits.view(-1, WORDS), labels.view(-1)), logits


class OnlyLoss(Speaker):
    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        return functional.cross_entropy(self.logits(tokens).flatten(0, 1), labels.flatten(), weight=self.rarity)


class Masked(Speaker):
    """Sizes from shapes, labels that it changes in place, a sum that it divides itself."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        logits = self.logits(tokens)
        samples, length, words = logits.shape
        labels = labels.clone()
        labels[labels == 1] = -100
        each = functional.cross_entropy(logits.view(samples * length, words), labels.view(-1), reduction="none")
        return {"loss": each.sum() / (labels != -100).sum(), "logits": logits, "samples": samples}


class Flat(Speaker):
    """Flattens tokens before its last layer."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        hidden = torch.tanh(self.layer(self.embed(tokens))).reshape(-1, WIDTH)
        return functional.cross_entropy(self.head(hidden), labels.reshape(-1))


class Two(Speaker):
    """Two terms, one of an other kind of loss."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        logits = self.logits(tokens)
        near = functional.mse_loss(logits[:, 0, 0], labels[:, 0].clamp(0).float())
        return (functional.cross_entropy(logits.transpose(1, 2), labels) + 0.5 * near) / 2, logits


class Rooted(Speaker):
    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        loss, logits = super().forward(tokens, labels)
        return loss.sqrt(), logits


class Contrasted(Speaker):
    """Compares the samples of the batch."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        logits = self.logits(tokens)
        return (logits - logits.flip(0)).square().mean()


class Penalised(Speaker):
    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        loss, logits = super().forward(tokens, labels)
        return loss + self.head.weight.square().sum(), logits


class Guessing(Speaker):
    """Draws its own targets."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        logits = self.logits(tokens)
        return functional.cross_entropy(logits.flatten(0, 1), torch.randint_like(labels, 0, WORDS).flatten()), logits


def traced(kind: type[Speaker]) -> tuple[GraphTrace, Speaker, list[Tensor]]:
    torch.manual_seed(0)
    model = kind()
    tokens = torch.randint(0, WORDS, (BATCH, LENGTH))
    labels = torch.where(torch.arange(LENGTH) < torch.tensor([[5], [1], [4], [2], [3], [5]]), tokens, -100)
    return GraphTrace(model, (tokens, labels), {}), model, [tokens, labels]


def results(trace: GraphTrace, inputs: list[Tensor]) -> list[Tensor]:
    part = trace.part(0, len(trace.operations))
    values = {-1 - number: value for number, value in enumerate(inputs)}
    values.update(zip(part.outputs, part.run([values[one] for one in part.inputs]), strict=True))
    return [values[number] for number in trace.results]


class Run:
    finished = False


@pytest.mark.parametrize("kind", [Speaker, OnlyLoss, Masked, Flat, Two])
@pytest.mark.parametrize("microbatches", [2, 4])
def test_terms_of_microbatches_add_up_to_the_models_own_loss(kind: type[Speaker], microbatches: int) -> None:
    trace, model, inputs = traced(kind)
    assert trace.has_tail and not trace.reduces_batch
    metas = [one.to("meta") for one in trace.infer(inputs)]
    assert loss_is_divisible(trace, metas, inputs, microbatches, tried=True)
    run: Any = Run()
    deferred = [Deferred.result(run, meta, index) for index, meta in enumerate(metas)]
    loss = next(one for one in pytree.tree_leaves(trace.returned(deferred, inputs)) if isinstance(one, Tensor))
    divided = MicrobatchLoss(BATCH, microbatch_sizes(BATCH, microbatches))
    total = torch.zeros(())
    for number in range(len(divided.sizes)):
        rows = [divided.rows(one, number) for one in inputs]
        total = total + divided.term(loss, results(trace, rows), number)
    wanted = next(one for one in pytree.tree_leaves(model(*inputs)) if isinstance(one, Tensor))
    torch.testing.assert_close(total, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(total, list(model.parameters())), torch.autograd.grad(wanted, list(model.parameters()))
    )


@pytest.mark.parametrize("kind", [Speaker, OnlyLoss, Masked, Flat, Two, Rooted, Penalised])
def test_a_model_returns_what_it_returns_with_and_without_its_tail(kind: type[Speaker]) -> None:
    trace, model, inputs = traced(kind)
    few = [one[:4] for one in inputs]
    torch.testing.assert_close(trace.returned(results(trace, few), few), model(*few))
    trace.drop_tail()
    assert trace.reduces_batch and not trace.has_tail
    torch.testing.assert_close(trace.returned(results(trace, few), few), model(*few))


class Graph(torch.nn.Module):
    """Nodes whose edges lead to any others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        result: Tensor = self.linear(nodes).index_add(0, edges[1], nodes[edges[0]])
        return result


def test_a_graph_whose_edges_lead_out_of_a_part_is_not_divided() -> None:
    model, inputs = Graph(), (torch.randn(BATCH, 4), torch.tensor([[BATCH - 1, 0, 1], [0, BATCH - 1, 2]]))
    trace = GraphTrace(model, inputs, {})
    model_profile(trace, model, inputs, {}, 2, "batch")
    assert trace.mixes_samples


@pytest.mark.parametrize("kind", [Rooted, Contrasted, Penalised, Guessing])
def test_a_loss_that_is_no_sum_over_samples_is_not_divided(kind: type[Speaker]) -> None:
    trace, model, inputs = traced(kind)
    metas = [one.to("meta") for one in trace.infer(inputs)]
    if not loss_is_divisible(trace, metas, inputs, 2, tried=True):
        trace.drop_tail()
    model_profile(trace, model, tuple(inputs), {}, 2, "batch")
    assert trace.mixes_samples if kind is Contrasted else trace.reduces_batch
    assert "not cut into microbatches" in undivided(model, trace, "batch")
