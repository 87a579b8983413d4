"""Which layers of a model are split, found by its graph; and that a part of an operation is that part of its result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.split_models import Transformer
from torch import nn
from torch.nn import functional

from paceline.errors import UsageError
from paceline.tensor_parallel.layers import Role
from paceline.tensor_parallel.linear_layers import is_linear, multiply, output_dim
from paceline.tensor_parallel.partial_tensor import RULES, name_of
from paceline.tensor_parallel.placement import Placement, shard_of, unshard
from paceline.tensor_parallel.plans import find_plan
from paceline.tensor_parallel.rule_result import LocalRule, RuleRefusal, TensorSpec

WORKERS = 2


# -- placements ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [Placement(1, (6,)), Placement(1, (2, 4)), Placement(0, (4,))])
def test_parts_come_together_to_the_whole(placement: Placement) -> None:
    whole = torch.arange(24).view(4, 6)
    parts = [shard_of(whole, placement, rank, WORKERS) for rank in range(WORKERS)]
    assert torch.equal(unshard(parts, placement), whole)


# -- rules -----------------------------------------------------------------------------------------------------------


def in_parts(name: str, function: Any, args: list[Any], kwargs: dict[str, Any], cuts: dict[int, Placement]) -> Any:
    """What the workers make of an operation together; a refusal if they can not."""
    specs = [TensorSpec(a.shape, cuts.get(n)) if isinstance(a, torch.Tensor) else a for n, a in enumerate(args)]
    outcome = RULES[name](specs, kwargs, WORKERS)
    if isinstance(outcome, RuleRefusal):
        return outcome
    whole = {id(spec): arg for spec, arg in zip(specs, args, strict=True) if isinstance(spec, TensorSpec)}

    def part(value: Any, rank: int) -> Any:
        if isinstance(value, TensorSpec):
            own = whole[id(value)]
            return own if value.placement is None else shard_of(own, value.placement, rank, WORKERS)
        if hasattr(value, "placement"):
            return shard_of(whole[id(value.tensor)], value.placement, rank, WORKERS)
        if hasattr(value, "tensor"):
            return whole[id(value.tensor)]
        return [part(one, rank) for one in value] if isinstance(value, list) else value

    def run(rank: int) -> Any:
        own = {key: part(value, rank) for key, value in outcome.kwargs.items()}
        return (outcome.call or function)(*[part(value, rank) for value in outcome.args], **own)

    assert isinstance(outcome, LocalRule)
    made = [run(rank) for rank in range(WORKERS)]
    if isinstance(made[0], torch.Tensor):
        return unshard(made, outcome.out)  # type: ignore[arg-type]
    places = [outcome.out] * len(made[0]) if isinstance(outcome.out, Placement) else outcome.out
    return [unshard(parts, place) for parts, place in zip(zip(*made, strict=True), places, strict=True)]


X = torch.arange(2 * 3 * 24, dtype=torch.float64).view(2, 3, 24).sin()
HEADS = torch.arange(2 * 4 * 3 * 6, dtype=torch.float64).view(2, 4, 3, 6).cos()
LAST, THREE = Placement(2, (24,)), Placement(2, (8, 8, 8))
HEAD = Placement(1, (4,))


@pytest.mark.parametrize(
    ("name", "function", "args", "kwargs", "cuts"),
    [
        ("gelu", functional.gelu, [X], {}, {0: LAST}),
        ("add", torch.add, [X, X[0, 0]], {}, {0: LAST}),
        ("add", torch.add, [X, X[:, :, :1]], {}, {0: LAST}),
        ("mul", torch.mul, [X, X], {}, {0: LAST, 1: LAST}),
        ("where", torch.where, [X > 0, X, X], {}, {0: LAST, 1: LAST, 2: LAST}),
        ("view", torch.reshape, [X, (2, 3, 4, 6)], {}, {0: LAST}),
        ("view", torch.reshape, [X, (2, 3, 3, 4, 2)], {}, {0: THREE}),
        ("reshape", torch.reshape, [X.view(2, 3, 4, 6), (2, 3, 24)], {}, {0: Placement(2, (4,))}),
        ("reshape", torch.reshape, [X.view(2, 3, 3, 4, 2), (2, 3, 24)], {}, {0: Placement(3, (4,))}),
        ("flatten", torch.flatten, [HEADS, 1], {}, {0: HEAD}),
        ("unflatten", torch.unflatten, [X, 2, (4, -1)], {}, {0: LAST}),
        ("unsqueeze", torch.unsqueeze, [X, 1], {}, {0: LAST}),
        ("transpose", torch.transpose, [HEADS, 1, 2], {}, {0: HEAD}),
        ("permute", torch.permute, [HEADS, (2, 0, 1, 3)], {}, {0: HEAD}),
        ("split", torch.split, [X, 8], {"dim": 2}, {0: THREE}),
        ("chunk", torch.chunk, [X, 3, -1], {}, {0: THREE}),
        ("chunk", torch.chunk, [X, 3, 1], {}, {0: LAST}),
        ("unbind", torch.unbind, [X], {}, {0: LAST}),
        ("__getitem__", torch.Tensor.__getitem__, [X, (slice(None), 0)], {}, {0: LAST}),
        ("__getitem__", torch.Tensor.__getitem__, [X, (..., None)], {}, {0: LAST}),
        ("select", torch.select, [X, 1, 2], {}, {0: LAST}),
        ("slice", torch.ops.aten.slice.Tensor, [X, 1, 1, 3], {}, {0: LAST}),
        ("slice", torch.ops.aten.slice.Tensor, [X, 2, 0, 1 << 40], {}, {0: LAST}),
        ("softmax", torch.softmax, [HEADS, -1], {}, {0: HEAD}),
        ("var", torch.var, [HEADS, -1], {"correction": 0}, {0: HEAD}),
        ("mean", torch.mean, [HEADS, (0, 2)], {}, {0: HEAD}),
        ("matmul", torch.matmul, [HEADS, HEADS.mT], {}, {0: HEAD, 1: HEAD}),
        ("matmul", torch.matmul, [HEADS, HEADS.mT], {}, {0: HEAD}),
        ("matmul", torch.matmul, [X, X[0].T], {}, {0: Placement(0, (2,))}),
        ("scaled_dot_product_attention", functional.scaled_dot_product_attention, [HEADS] * 3, {}, {0: HEAD, 1: HEAD}),
        ("layer_norm", functional.layer_norm, [HEADS, (6,)], {}, {0: HEAD}),
        ("max_pool2d", functional.max_pool2d, [HEADS, 2], {}, {0: HEAD}),
        ("glu", functional.glu, [X], {}, {0: Placement(2, (12, 12))}),
    ],
)
def test_parts_of_an_operation_are_parts_of_its_result(
    name: str, function: Any, args: list[Any], kwargs: dict[str, Any], cuts: dict[int, Placement]
) -> None:
    found, wanted = in_parts(name, function, args, kwargs, cuts), function(*args, **kwargs)
    wanted = wanted if isinstance(wanted, torch.Tensor) else list(wanted)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_the_operators_of_a_trace_have_the_names_of_functions() -> None:
    assert name_of(torch.ops.aten.add_.Tensor) == name_of(torch.Tensor.add_) == "add_"
    assert name_of(torch.ops.aten.scaled_dot_product_attention.default) == "scaled_dot_product_attention"


@pytest.mark.parametrize(
    ("name", "args", "cuts"),
    [
        ("softmax", [X, -1], {0: LAST}),
        ("mean", [X, -1], {0: LAST}),
        ("var", [HEADS, -1, False], {0: HEAD}),  # unbiased, not keepdim
        ("slice", [X, 2, 0, 12], {0: LAST}),
        ("layer_norm", [X, (24,)], {0: LAST}),
        ("matmul", [X, X.mT], {0: LAST}),
        ("view", [X, (2, 3, 3, 8)], {0: LAST}),
        ("split", [X, 8, 2], {0: LAST}),
        ("add", [X, X], {0: LAST, 1: THREE}),
    ],
)
def test_what_needs_the_whole_is_refused(name: str, args: list[Any], cuts: dict[int, Placement]) -> None:
    assert isinstance(in_parts(name, None, args, {}, cuts), RuleRefusal)


# -- plans -----------------------------------------------------------------------------------------------------------


def roles(model: nn.Module, *inputs: torch.Tensor, workers: int = 2, **wishes: Any) -> dict[str, str]:
    found = find_plan(model, inputs, workers, wishes.get("plan"), sequence=False)
    return {name: role.name for name, role in found.items()}


def test_attention_and_mlp_are_found_by_what_flows_where() -> None:
    found = roles(Transformer(), torch.zeros(2, 12, dtype=torch.long))
    for block in range(3):
        assert found[f"blocks.{block}.attend"] == found[f"blocks.{block}.think.0"] == "column"
        assert found[f"blocks.{block}.join"] == found[f"blocks.{block}.think.2"] == "row"


def test_queries_keys_and_values_of_one_layer_are_each_cut() -> None:
    found = find_plan(Transformer(), [torch.zeros(2, 12, dtype=torch.long)], 2, None, sequence=False)
    assert found["blocks.0.attend"] == Role("column", (16, 16, 16))


def test_names_do_not_matter() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(8, 32), nn.Linear(32, 8)  # named the wrong way round

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(torch.relu(self.down(x)) * 2)

    assert roles(Odd(), torch.zeros(2, 8)) == {"down": "column", "up": "row"}


def test_convolutions_are_paired_through_norm_and_pooling() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 6, 3), nn.ReLU()
    )
    assert roles(model, torch.zeros(2, 3, 16, 16)) == {"0": "column", "1": "channels", "4": "row"}


def test_a_convolution_alone_is_cut_by_its_outputs() -> None:
    assert roles(nn.Conv2d(3, 8, 3), torch.zeros(2, 3, 16, 16)) == {"": "column"}


def test_torchs_own_attention_is_cut_by_heads() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    found = roles(layer, torch.zeros(2, 5, 16))
    assert found == {"self_attn": "heads", "self_attn.out_proj": "row", "linear1": "column", "linear2": "row"}


def test_heads_that_do_not_divide_stay_whole_and_the_rest_is_split() -> None:
    layer = nn.TransformerEncoderLayer(15, 3, 32, batch_first=True)
    assert roles(layer, torch.zeros(2, 5, 15)) == {"linear1": "column", "linear2": "row"}


def test_tied_weights_are_cut_alike_or_not_at_all() -> None:
    class Tied(nn.Module):
        def __init__(self, words: int) -> None:
            super().__init__()
            self.words, self.inner = nn.Embedding(words, 64), nn.Linear(64, 64)
            self.head = nn.Linear(64, words, bias=False)
            self.head.weight = self.words.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.softmax(self.inner(self.words(x)), -1))

    x = torch.zeros(64, 16, dtype=torch.long)
    assert roles(Tied(512), x)["words"] == "vocabulary"
    assert "words" not in roles(Tied(511), x)


def test_the_user_has_the_last_word() -> None:
    model = Transformer()
    x = torch.zeros(2, 12, dtype=torch.long)
    found = roles(model, x, plan={"blocks.0.*": "replicated", "blocks.1.think.0": "column"})
    assert not any(name.startswith("blocks.0.") for name in found)
    assert found["blocks.1.think.0"] == "column"


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ({"nowhere": "column"}, "plan names 'nowhere', but the model has no such layer"),
        ({"0": "sideways"}, "plan says 'sideways' of '0'; it must be 'column', 'row'"),
        ({"0": "column"}, "layer '0' can not be split over 2 workers: its 5 do not divide by 2"),
    ],
)
def test_a_wrong_plan_is_one_sentence(plan: dict[str, str], sentence: str) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4))
    with pytest.raises(UsageError, match=sentence.replace("(", r"\(")):
        roles(model, torch.zeros(2, 4), plan=plan)


def test_nothing_to_split_says_what_would_do() -> None:
    with pytest.raises(UsageError, match=r"nothing in this model can be split over 2 workers: .* degree=3 would do"):
        roles(nn.Linear(3, 3), torch.zeros(2, 3))
    with pytest.raises(UsageError, match="no other degree up to 16 would do either"):
        roles(nn.Sequential(nn.LayerNorm(4)), torch.zeros(2, 4))


class Product(nn.Module):
    """A layer with a weight that is not torch's, whose values say nothing: all are zero."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(6, 6)), nn.Parameter(torch.zeros(6))
        self.how = how

    def forward(self, x: torch.Tensor) -> Any:
        return self.how(x, self.weight, self.bias)


@pytest.mark.parametrize(
    ("how", "dim"),
    [
        (lambda x, w, b: torch.addmm(b, x.flatten(0, -2), w).unflatten(0, x.shape[:-1]), 1),
        (lambda x, w, b: x @ w.T + b, 0),
        (lambda x, w, b: x @ w + 2 * b, None),
        (lambda x, w, b: x @ w.softmax(0) + b, None),
        (lambda x, w, b: x, None),
        (lambda x, w, b: w[x], None),
    ],
)
def test_a_layer_of_another_class_is_linear_if_it_computes_that(how: Any, dim: int | None) -> None:
    layer = Product(how)
    assert is_linear(layer) == (dim is not None)
    if dim is not None:
        assert output_dim(layer) == dim
        x = torch.randn(2, 3, 6)
        nn.init.normal_(layer.weight)
        torch.testing.assert_close(multiply(layer, x, layer.bias), layer(x))
