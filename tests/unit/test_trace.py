"""A traced model, cut anywhere it may be cut, computes what the model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.split_models import Transformer, chain, convnet, images, vectors, words
from torch import nn

from paceline.config import parse_strategy
from paceline.errors import UsageError
from paceline.events import Pass
from paceline.events.bubbles import Bubbles
from paceline.graph.costs import Cost, measure
from paceline.graph.model_profile import ModelProfile, model_profile
from paceline.graph.opaque_layers import OpaqueLayers
from paceline.graph.partition import Device, partition
from paceline.graph.trace import ChainTrace, GraphTrace, ModelTrace, trace
from paceline.schedules import bubble


def through(traced: ModelTrace, bounds: list[int], inputs: list[Any]) -> Any:
    """Run the parts one after the other."""
    values: dict[int, Any] = {-1 - number: value for number, value in enumerate(inputs)}
    for first, last in zip([0, *bounds[:-1]], bounds, strict=True):
        part = traced.part(first, last)
        values.update(zip(part.outputs, part.run([values[one] for one in part.inputs]), strict=True))
    return traced.returned([values[one] for one in traced.results], inputs)


@pytest.mark.parametrize("kind", ["transformer", "convnet", "chain"])
def test_every_cut_gives_what_the_model_gives(kind: str) -> None:
    torch.manual_seed(0)
    model, data = {"transformer": (Transformer(), words), "convnet": (convnet(), images), "chain": (chain(), vectors)}[
        kind
    ]
    model.eval()
    x = data(6).tensors[0]
    traced = GraphTrace(model, (x,), {}) if kind == "transformer" else trace(model, (x,), {}, 2)
    few = x[:5]  # another number of samples than it was traced with
    with torch.no_grad():
        right = model(few)
        whole = len(traced.operations)
        for cut in traced.cuts():
            assert torch.allclose(through(traced, [cut, whole], [few]), right, atol=1e-6), traced.operations[cut]
        third = whole // 3
        cuts = traced.cuts()
        first, second = (min(cuts, key=lambda cut: abs(cut - place)) for place in (third, 2 * third))
        assert torch.allclose(through(traced, [first, second, whole], [few]), right, atol=1e-6)


def test_a_layer_that_changes_its_input_stays_with_the_one_before() -> None:
    traced = ChainTrace(nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2), nn.ReLU()))
    assert traced.cuts() == [2, 3]


class Counted(nn.Module):
    """Has buffers: it changes one in training, and only reads the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.scale
        if self.training:
            self.calls += 1
        return self.last(x)


@pytest.mark.parametrize("kind", ["batch norm", "instance norm", "counted"])
def test_it_is_known_which_part_changes_buffers(kind: str) -> None:
    norm = nn.BatchNorm1d(4) if kind == "batch norm" else nn.InstanceNorm1d(4, track_running_stats=True)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), norm, nn.Tanh(), nn.Linear(4, 4))
    model = Counted() if kind == "counted" else layers
    x = torch.randn(6, 4) if kind != "instance norm" else torch.randn(6, 4, 4)
    traces: list[ModelTrace] = [GraphTrace(model, (x,), {})] + [ChainTrace(layers)] * (kind != "counted")
    for traced in traces:
        whole = len(traced.operations)
        assert traced.changes_buffers(0, whole)
        assert not traced.changes_buffers(0, 1)
        assert not traced.changes_buffers(whole - 1, whole) or kind == "counted"  # there that is the last thing done
    model.eval()
    assert not GraphTrace(model, (x,), {}).changes_buffers(0, whole)
    assert not ChainTrace(layers).changes_buffers(0, 5) or kind == "counted"


def test_only_what_draws_is_random() -> None:
    deterministic, drawing = Transformer(dropout=0.0), Transformer(dropout=0.5)
    x = words(4).tensors[0]
    assert not GraphTrace(deterministic, (x,), {}).part(0, 3).random
    for model, random in ((deterministic, False), (drawing, True)):
        traced = GraphTrace(model, (x,), {})
        assert traced.part(0, len(traced.operations)).random is random
    drawing.eval()
    quiet = GraphTrace(drawing, (x,), {})
    assert not quiet.part(0, len(quiet.operations)).random


def test_measuring_changes_nothing() -> None:
    model = convnet()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = images(4).tensors[0]
    traced = trace(model, (x,), {}, 2)
    state = torch.get_rng_state()
    costs = measure(traced, model, [x], repeats=1)
    assert all(cost.forward > 0 for cost in costs)
    assert sum(cost.parameters for cost in costs) == sum(parameter.nbytes for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_is_measured_is_what_is_cut() -> None:
    wide = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)), *(nn.Linear(256, 256) for _ in range(3)))
    args = (torch.ones(64, 256),)
    sheet = model_profile(trace(wide, args, {}, 2), wide, args, {}, 2, "batch")
    assert sheet.batch == 64 and sheet.microbatch == 32
    assert partition(sheet.problem(), [Device(), Device(pace=0.2)]).bounds[0] > 3


def test_it_is_cut_where_all_is_whole_if_it_can_be() -> None:
    costs = [Cost(1.0), Cost(1.0, whole=False), Cost(1.0), Cost(1.0)]
    names = ["a", "b", "c", "d"]
    known = ModelProfile(
        names=names,
        kinds=names,
        inputs=[[number - 1] for number in range(4)],
        costs=costs,
        cuts=[1, 2, 3],
        crossing=[[], [0], [1], [2]],
        batch=1,
        microbatch=1,
    )
    assert known.problem(2).points == known.problem(3).points == [0, 1, 3, 4]
    assert known.problem(4).points == [0, 1, 2, 3, 4]


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of not rounding."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


class Rounding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Straight.apply(self.layer(x))  # type: ignore[no-any-return]


def test_a_gradient_of_ones_own_is_never_lost() -> None:
    with pytest.raises(UsageError, match="a custom gradient in Straight"):
        trace(Rounding(), (torch.ones(3, 2),), {}, 2)
    layers = trace(nn.Sequential(Rounding(), Rounding()), (torch.ones(3, 2),), {}, 2)
    assert isinstance(layers, ChainTrace)
    assert Straight.apply(torch.ones(2)).tolist() == [1.0, 1.0]


# -- layers that are opaque ------------------------------------------------------------------------------------------


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.inner = nn.Linear(8, 16)
        self.pool = nn.Conv1d(16, 4, 3, padding=1, groups=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + self.attend(x, x, x, need_weights=False)[0])
        return self.pool(torch.relu(self.inner(x)).mT)


def test_a_sealed_layer_is_one_operation_and_computes_what_it_does() -> None:
    torch.manual_seed(0)
    model, x = Attending(), torch.randn(6, 5, 8)
    names = ("attend", "inner", "pool")
    opaque = OpaqueLayers({name: model.get_submodule(name) for name in names})
    with opaque.hidden():
        traced = GraphTrace(model, (x,), {})
        weights = {name: value.detach().to("meta") for name, value in model.named_parameters()}
        assert torch.func.functional_call(model, weights, (x.to("meta"),)).shape == (6, 4, 5)
    kinds = [operation.kind for operation in traced.operations]
    assert [one for one in kinds if one[0].isupper()] == ["MultiheadAttention", "Linear", "Conv1d"]
    used = {name for operation in traced.operations for name in operation.parameters}
    assert used == {name for name, _ in model.named_parameters()}
    parts = [traced.part(0, 4), traced.part(4, len(kinds))]
    assert [part.random for part in parts] == [True, False]  # attention drops
    model.eval()
    with opaque.hidden():
        quiet = GraphTrace(model, (x,), {})
    few = x[:4]
    with torch.no_grad():
        for cut in quiet.cuts():
            found = through(quiet, [cut, len(quiet.operations)], [few])
            assert torch.allclose(found, model(few), atol=1e-6), quiet.operations[cut]


# -- bubbles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "chunks", "share"),
    [
        ("gpipe", 8, 32, 1, 7 / 39),
        ("1f1b", 8, 32, 1, 7 / 39),
        ("interleaved", 8, 32, 4, (7 / 4) / (32 + 7 / 4)),
        ("zero-bubble", 8, 32, 1, (7 / 3) / (32 + 7 / 3)),
        ("zero-bubble-2p", 8, 32, 1, 0.0),
    ],
)
def test_the_formulas(schedule: str, stages: int, microbatches: int, chunks: int, share: float) -> None:
    assert bubble(schedule, stages, microbatches, chunks) == pytest.approx(share)


def test_a_bubble_is_what_devices_idle_of_a_step() -> None:
    bubbles = Bubbles()
    assert bubbles.measured() is None
    for version in range(3):
        for rank in range(2):
            for microbatch in range(2):
                start = 100.0 * version + 1.0 * rank + microbatch
                bubbles.add(Pass(rank, start, 1.0, "F", rank, 0, microbatch, 4, version))
    assert bubbles.measured() == pytest.approx(1 / 3)
    spec = "pipeline:stages=2,microbatches=8"
    assert parse_strategy(spec) is not None
    assert bubbles.formula(spec) == pytest.approx(1 / 3)  # of the two microbatches that there were
    assert bubbles.formula("all-reduce") is None


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.drop(self.second(self.drop(torch.relu(self.first(value)))))


def test_what_is_drawn_does_not_depend_on_where_the_model_is_cut() -> None:
    x = torch.randn(4, 8)
    chain = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))
    for known in (GraphTrace(Dropping(), (x,), {}), ChainTrace(chain)):
        results = []
        for cut in range(1, len(known.operations)):
            value: Any = [x]
            for first, last in ((0, cut), (cut, len(known.operations))):
                torch.manual_seed(7 << 40)
                value = known.part(first, last).run(value)
            results.append(value[0])
        assert (results[0] == 0).any()
        assert all(torch.equal(result, results[0]) for result in results)
