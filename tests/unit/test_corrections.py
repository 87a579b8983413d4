"""Corrections for stale gradients do what their formulas say."""

import math
from typing import Any

import pytest
import torch

from paceline.config import (
    DcAsgd,
    DcAsgdAdaptive,
    DropAbove,
    DuttaRate,
    RateOverStaleness,
    RunSpec,
    Timeouts,
    parse_compression,
    parse_correction,
    parse_servers,
)
from paceline.errors import UsageError
from paceline.parameters.corrections import Corrections
from paceline.parameters.gradients import Gradients
from paceline.parameters.kept_version import KeptVersion
from paceline.parameters.layout import Layout
from paceline.parameters.sharding import ShardedOptimizer
from paceline.parameters.versions import Versions
from paceline.server.memory import RunMemory
from paceline.server.messages import AddGradient, ApplyUpdate, GradientRef
from paceline.server.record import ServerRecord
from paceline.server.shard import Shard, describe_optimizers, describe_parameters, memory_sizes
from paceline.transport import Memory


def corrections(*specs: str) -> Corrections:
    return Corrections(parse_correction(spec) for spec in specs)


# -- on the learning rate --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("staleness", "factor"), [(0, 1.0), (1, 1.0), (2, 0.5), (5, 0.2), (40, 0.025)])
def test_the_rate_is_divided_by_the_staleness(staleness: int, factor: float) -> None:
    assert corrections("lr/staleness").rate(staleness, 3.0, 0.1) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("most", [None, 0.05, 0.2])
@pytest.mark.parametrize("distance", [1e-9, 0.03, 1.0, 40.0])
def test_the_rate_is_c_over_the_squared_distance_but_at_most_max(
    rate: float, most: float | None, distance: float
) -> None:
    spec = "distance:c=0.02" if most is None else f"distance:c=0.02,max={most}"
    wanted = min(0.02 / distance, rate if most is None else most)
    assert rate * corrections(spec).rate(7, distance, rate) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(("spec", "wanted"), [("distance:c=0.02", 0.1), ("distance:c=0.02,max=0.4", 0.4)])
def test_at_no_distance_the_rate_is_the_largest_allowed(spec: str, wanted: float) -> None:
    assert 0.1 * corrections(spec).rate(0, 0.0, 0.1) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("spec", ["distance:c=0.02", "distance:c=0.02,max=0.4", "lr/staleness"])
@pytest.mark.parametrize("distance", [0.0, 0.5])
def test_a_rate_of_nought_stays_nought(spec: str, distance: float) -> None:
    """A schedule may begin or end there."""
    factor = corrections(spec).rate(3, distance, 0.0)
    assert math.isfinite(factor) and 0.0 * factor == 0.0


def test_factors_multiply() -> None:
    both = corrections("lr/staleness", "distance:c=0.02,max=0.05")
    assert both.rate(4, 1.0, 0.1) == pytest.approx(0.02 / 0.1 / 4, rel=1e-12)
    assert both.needs_distance and not both.compensates
    assert corrections().rate(9, 2.0, 0.1) == 1.0
    assert corrections("dc-asgd", "drop:above=3").rate(9, 2.0, 0.1) == 1.0


def test_the_tightest_bound_counts() -> None:
    assert corrections("drop:above=8", "lr/staleness", "drop:above=3").bound() == 3
    assert corrections("drop:above=0").bound() == 0
    assert corrections("lr/staleness", "dc-asgd").bound() is None


# -- on the gradient -------------------------------------------------------------------------------------------------


def naive_plain(gradient: list[float], newest: list[float], base: list[float], strength: float) -> list[float]:
    return [g + strength * g * g * (w - b) for g, w, b in zip(gradient, newest, base, strict=True)]


class NaiveAdaptive:
    """Element by element, as in the paper."""

    def __init__(self, count: int, strength: float = 2.0, mean: float = 0.95) -> None:
        self.squares = [0.0] * count
        self.strength, self.mean = strength, mean

    def __call__(self, gradient: list[float], newest: list[float], base: list[float]) -> list[float]:
        result = []
        for place, (g, w, b) in enumerate(zip(gradient, newest, base, strict=True)):
            self.squares[place] = self.mean * self.squares[place] + (1 - self.mean) * g * g
            result.append(g + self.strength / math.sqrt(self.squares[place] + 1e-7) * g * g * (w - b))
        return result


def drawn(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("spec", "strength"), [("dc-asgd", 0.04), ("dc-asgd:lambda=1.5", 1.5)])
def test_the_gradient_is_extrapolated_to_the_newest_version(spec: str, strength: float) -> None:
    compensate = corrections(spec).compensator([(50, torch.float64)])
    assert compensate is not None
    for seed in range(3):
        gradient, newest, base = (drawn(50, 3 * seed + part) for part in range(3))
        got = compensate(gradient, newest, base, 0, 0, 50)
        assert got.tolist() == pytest.approx(
            naive_plain(gradient.tolist(), newest.tolist(), base.tolist(), strength), rel=1e-12
        )


@pytest.mark.parametrize(
    ("spec", "options"),
    [("dc-asgd-adaptive", {}), ("dc-asgd-adaptive:lambda=0.5,mean=0.8", {"strength": 0.5, "mean": 0.8})],
)
def test_adaptively_it_is_so_the_less_the_larger_the_gradients_were(spec: str, options: dict[str, Any]) -> None:
    compensate = corrections(spec).compensator([(40, torch.float64), (8, torch.float64)])
    assert compensate is not None
    naive, other = NaiveAdaptive(40, **options), NaiveAdaptive(8, **options)
    for seed in range(6):
        gradient, newest, base = (drawn(40, 3 * seed + part) for part in range(3))
        wanted = naive(gradient.tolist(), newest.tolist(), base.tolist())
        parts = [
            compensate(gradient[start:stop], newest[start:stop], base[start:stop], 0, start, stop)
            for start, stop in ((0, 13), (13, 40))
        ]
        assert torch.cat(parts).tolist() == pytest.approx(wanted, rel=1e-12)
        small = compensate(gradient[:8], newest[:8], base[:8], 1, 0, 8)
        assert small.tolist() == pytest.approx(
            other(gradient[:8].tolist(), newest[:8].tolist(), base[:8].tolist()), rel=1e-12
        )


def test_only_these_change_the_gradient() -> None:
    assert corrections("lr/staleness", "distance:c=1", "drop:above=2").compensator([(4, torch.float32)]) is None
    assert corrections("lr/staleness", "dc-asgd").compensates


# -- where a server uses them ----------------------------------------------------------------------------------------


class OneShard:
    """The only shard of a run of two workers, with plain gradient descent."""

    COUNT = 48

    def __init__(self, *specs: str, compress: str = "none") -> None:
        parameter = torch.nn.Parameter(torch.zeros(self.COUNT, dtype=torch.float64))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        named = [("weight", parameter)]
        self.layout = Layout(named, 1)
        spec = RunSpec(
            machines=((0, 1),),
            capacity=2,
            servers=(0,),
            strategy="async",
            timeouts=Timeouts(),
            optimizers=describe_optimizers(optimizer),
            parameters=describe_parameters(named, optimizer),
            corrections=specs,
            compress=compress,
        )
        gradients, versions, table, flags, buffers = map(Memory.create, memory_sizes(spec, self.layout))
        self.versions = Versions(self.layout, versions, spec.versions)
        self.gradients = Gradients.shared(self.layout, gradients, 0, spec.gradients)
        state = ShardedOptimizer(optimizer, self.layout, self.versions, self.gradients, 0, 1)
        kept = Memory.create(KeptVersion.memory_size(self.layout, state.memory_size()))
        record = Memory.create(ServerRecord.memory_size(self.layout, 1, state.undo_size()))
        ServerRecord.lay_out(record, self.layout, state.undo_size())
        own = Memory.create(state.memory_size())
        memory = RunMemory(gradients, versions, table, flags, buffers, own, kept, record)
        self.shard = Shard(spec, 0, memory)

    def put(self, worker: int, gradient: torch.Tensor) -> None:
        self.gradients.flats[worker][0].copy_(gradient)

    def value(self, buffer: int) -> torch.Tensor:
        return self.versions.buffers[buffer][0].clone()


@pytest.mark.parametrize("collected", [False, True])
def test_a_stale_gradient_is_compensated_once_and_a_fresh_one_is_left_as_it_is(collected: bool) -> None:
    one = OneShard("dc-asgd:lambda=0.5")
    start, newest = drawn(48, 1), drawn(48, 2)
    one.versions.buffers[0][0].copy_(start)
    one.versions.buffers[1][0].copy_(newest)
    fresh, stale = drawn(48, 3), drawn(48, 4)
    one.put(0, fresh)
    one.put(1, stale)
    sources = [GradientRef(0, 0.25, 1), GradientRef(1, 0.75, 0)]
    if collected:
        for source in sources:
            one.shard.add(AddGradient(source, 1))
        one.put(0, torch.full((48,), torch.nan))
        one.put(1, torch.full((48,), torch.nan))
        sources = [GradientRef(one.shard.collected, 1.0)]
    one.shard.apply(ApplyUpdate(sources, 1, 2, None))
    extrapolated = torch.tensor(naive_plain(stale.tolist(), newest.tolist(), start.tolist(), 0.5), dtype=torch.float64)
    torch.testing.assert_close(
        one.value(2), newest - 0.1 * (0.25 * fresh + 0.75 * extrapolated), rtol=1e-12, atol=1e-14
    )
    assert torch.equal(one.value(0), start) and torch.equal(one.value(1), newest)


def test_the_mean_square_is_of_all_gradients_also_of_fresh_ones() -> None:
    one = OneShard("dc-asgd-adaptive")
    naive = NaiveAdaptive(48)
    versions = [drawn(48, 1), drawn(48, 2)]
    for buffer, value in enumerate(versions):
        one.versions.buffers[buffer][0].copy_(value)
    for seed, base in ((10, 1), (11, 1), (12, 0)):
        gradient = drawn(48, seed)
        one.put(0, gradient)
        one.shard.apply(ApplyUpdate([GradientRef(0, 1.0, base)], 1, 2, None))
        wanted = naive(gradient.tolist(), versions[1].tolist(), versions[base].tolist())
        expected = versions[1] - 0.1 * torch.tensor(wanted, dtype=torch.float64)
        torch.testing.assert_close(one.value(2), expected, rtol=1e-10, atol=1e-12)


# -- how they are written --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        ("lr/staleness", RateOverStaleness()),
        ("drop:above=8", DropAbove(above=8)),
        ("dc-asgd", DcAsgd(strength=0.04)),
        ("dc-asgd:lambda=0.1", DcAsgd(strength=0.1)),
        ("dc-asgd-adaptive", DcAsgdAdaptive(strength=2.0, mean=0.95)),
        ("dc-asgd-adaptive:mean=0.5,lambda=1", DcAsgdAdaptive(strength=1.0, mean=0.5)),
        ("distance:c=0.1", DuttaRate(c=0.1, max=None)),
        ("distance:c=0.1,max=0.05", DuttaRate(c=0.1, max=0.05)),
    ],
)
def test_a_correction_is_a_name_with_options(spec: str, value: Any) -> None:
    assert parse_correction(spec) == value


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("", "unknown correction ''; there is 'lr/staleness', 'drop', 'dc-asgd', 'dc-asgd-adaptive' or 'distance'"),
        ("dcasgd", "unknown correction 'dcasgd'"),
        ("drop", "correction 'drop' needs the option 'above'; write drop:above=NUMBER"),
        ("drop:above=-1", "above is -1; it must be a number of updates, 0 or more"),
        ("drop:above=2.5", "option 'above' of correction 'drop' is '2.5'; it must be a whole number"),
        ("drop:below=2", "correction 'drop' has no option 'below'; it takes 'above'"),
        ("drop:above=", "option 'above' of correction 'drop' has no value; write above=VALUE"),
        ("lr/staleness:c=1", "correction 'lr/staleness' has no option 'c'; it takes no options"),
        ("dc-asgd:lambda=much", "option 'lambda' of correction 'dc-asgd' is 'much'; it must be a number"),
        ("dc-asgd-adaptive:mean=1", "mean is 1; it must be from 0 to below 1"),
        ("distance", "correction 'distance' needs the option 'c'"),
        ("distance:c=0", "c and max must be above 0"),
        ("distance:c=1,max=-1", "c and max must be above 0"),
        ("distance:c=nan", "c and max must be above 0"),
    ],
)
def test_a_wrong_correction_is_one_sentence(spec: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_correction(spec)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", ["dc-asgd:lambda=nan", "dc-asgd:lambda=inf", "dc-asgd-adaptive:lambda=nan"])
def test_a_strength_that_is_no_number_is_refused(spec: str) -> None:
    with pytest.raises(UsageError, match="lambda"):
        parse_correction(spec)


@pytest.mark.parametrize("spec", ["", "bf32", "topk:0", "topk:1.5", "topk:-1", "topk:nan", "bf16:2"])
def test_a_wrong_compression_is_one_sentence(spec: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_compression(spec)
    assert str(caught.value).startswith(f"compress is '{spec}'; ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", ["", "0", "-1", "1.5", "none", "leads", "²"])
def test_a_wrong_number_of_servers_is_one_sentence(spec: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_servers(spec)
    wanted = f"servers is '{spec}'; it must be a number of processes, at least 1, or 'lead' or 'all', "
    wanted += "or over machines 'each', or MACHINE:COUNT,… as in 0:1,2:1"
    assert str(caught.value) == wanted


def test_servers_are_a_number_or_a_place() -> None:
    assert [parse_servers(text) for text in ("1", "12", "lead", "0:1,2:1")] == [1, 12, "lead", "0:1,2:1"]
