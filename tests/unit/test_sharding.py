"""Each worker's optimizer on its shard does what plain torch does on whole parameters."""

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from paceline.parameters import pieces, reduction
from paceline.parameters.gradients import Gradients
from paceline.parameters.layout import Layout
from paceline.parameters.optimizers import ELEMENTWISE
from paceline.parameters.sharding import ShardedOptimizer
from paceline.parameters.versions import Versions
from paceline.transport import Memory

OPTIONS: dict[type[Optimizer], list[dict[str, Any]]] = {
    torch.optim.SGD: [
        {},
        {"weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"momentum": 0.8, "dampening": 0.3, "maximize": True},
    ],
    torch.optim.Adam: [{}, {"amsgrad": True, "weight_decay": 0.1}, {"betas": (0.5, 0.8), "maximize": True}],
    torch.optim.AdamW: [{}, {"amsgrad": True, "weight_decay": 0.2}, {"weight_decay": 0.0, "maximize": True}],
    torch.optim.NAdam: [
        {},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"momentum_decay": 0.1, "maximize": True},
    ],
    torch.optim.RAdam: [
        {"betas": (0.9, 0.7)},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"betas": (0.5, 0.6), "maximize": True},
    ],
    torch.optim.Adamax: [{}, {"weight_decay": 0.1, "maximize": True}],
    torch.optim.Adadelta: [{}, {"rho": 0.5, "weight_decay": 0.1, "maximize": True}],
    torch.optim.Adagrad: [
        {},
        {"lr_decay": 0.1, "initial_accumulator_value": 0.5, "weight_decay": 0.1},
        {"maximize": True},
    ],
    torch.optim.RMSprop: [
        {},
        {"centered": True, "momentum": 0.9},
        {"weight_decay": 0.1, "momentum": 0.5},
        {"centered": True, "maximize": True},
    ],
    torch.optim.Rprop: [{}, {"etas": (0.3, 1.7), "step_sizes": (1e-4, 2.0)}, {"maximize": True}],
    torch.optim.ASGD: [{}, {"t0": 2, "lambd": 0.1, "alpha": 0.5}, {"weight_decay": 0.1, "maximize": True}],
}
KINDS = [
    pytest.param(kind, options, id=f"{kind.__name__}-{'-'.join(options) or 'plain'}")
    for kind, sets in OPTIONS.items()
    for options in sets
]
WEIGHTS = {1: [1.0], 2: [0.25, 0.75], 3: [0.5, 0.2, 0.3], 4: [0.1, 0.2, 0.3, 0.4]}
Used = list[list[int]]
"""Per worker and parameter, whether it has a gradient."""


def parameters() -> list[torch.nn.Parameter]:
    source = torch.Generator().manual_seed(1)
    values = [
        torch.randn(7, 5, generator=source),
        torch.randn((), generator=source),
        torch.randn(4, 3, 2, 2, generator=source).to(memory_format=torch.channels_last),
        torch.randn(0, 3, generator=source),
        torch.randn(33, generator=source),
        torch.randn(11, 10, generator=source).t(),
    ]
    return [torch.nn.Parameter(value.double()) for value in values]


def make(kind: type[Optimizer], values: list[torch.nn.Parameter], options: dict[str, Any]) -> Optimizer:
    """Two groups of unlike rates."""
    groups = [{"params": values[:4]}, {"params": values[4:], "lr": 0.03}]
    return kind(groups, lr=0.01, **options)  # type: ignore[call-arg]


def shared(size: int) -> Memory:
    """Memory that nobody else will open."""
    memory = Memory.create(size)
    memory.close_descriptor()
    return memory


class Plain:
    """What must come out: torch on whole parameters."""

    def __init__(self, kind: type[Optimizer], options: dict[str, Any]) -> None:
        self.values = parameters()
        self.optimizer = make(kind, self.values, options)

    def step(self, gradients: list[torch.Tensor | None]) -> None:
        for value, gradient in zip(self.values, gradients, strict=True):
            value.grad = gradient
        self.optimizer.step()


class Sharded:
    """All workers of a team, one after the other in one process."""

    def __init__(
        self, kind: type[Optimizer], options: dict[str, Any], workers: int, start: Plain | None = None
    ) -> None:
        self.values = parameters() if start is None else copy.deepcopy(start.values)
        self.workers = workers
        self.layout = Layout([(str(index), value) for index, value in enumerate(self.values)], workers)
        versions = Versions(self.layout, shared(Versions.memory_size(self.layout)))
        versions.fill()
        versions.pull()
        memory = shared(Gradients.memory_size(self.layout, workers))
        self.gradients = [Gradients.shared(self.layout, memory, rank, workers) for rank in range(workers)]
        self.optimizers = [make(kind, self.values, options) for _ in range(workers)]
        self.shards = [
            ShardedOptimizer(optimizer, self.layout, versions, self.gradients[rank], rank, workers)
            for rank, optimizer in enumerate(self.optimizers)
        ]
        self.memory = shared(self.shards[0].memory_size())
        for shard, optimizer in zip(self.shards, self.optimizers, strict=True):
            shard.place(self.memory)
            shard.import_state(optimizer)

    def step(self, gradients: list[list[torch.Tensor]], used: Used | None) -> None:
        for rank, own in enumerate(gradients):
            for view, gradient in zip(self.layout.buffers(self.gradients[rank].own), own, strict=True):
                view.copy_(gradient)
        weights = list(enumerate(WEIGHTS[self.workers]))
        flags = None if used is None else [bytes(row) for row in used]
        for shard in self.shards:
            shard.update(weights, flags)

    def states(self) -> Iterator[torch.Tensor]:
        """Every tensor of state that the workers' own optimizers hold."""
        for shard in self.shards:
            for state in shard._inner.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def used_in(step: int, workers: int) -> Used | None:
    """A few steps in which all have everything, and a few in which some, or nobody, has some parameter."""
    if step in (1, 4):
        return None
    return [[int((step + rank + index) % 3 > 0 and index != step) for index in range(6)] for rank in range(workers)]


@functools.cache
def gradients_for(step: int, workers: int) -> list[list[torch.Tensor]]:
    """Not to be changed, as they are drawn only once."""
    source = torch.Generator().manual_seed(100 + step)
    return [
        [torch.randn(value.shape, generator=source, dtype=torch.float64) for value in parameters()]
        for _ in range(workers)
    ]


def mean(gradients: list[list[torch.Tensor]], used: Used | None) -> list[torch.Tensor | None]:
    """By weight, in the order of ranks; None where nobody has one."""
    weights = WEIGHTS[len(gradients)]
    means: list[torch.Tensor | None] = []
    for index in range(len(gradients[0])):
        parts = [
            gradients[rank][index] * weight for rank, weight in enumerate(weights) if used is None or used[rank][index]
        ]
        means.append(torch.stack(parts).sum(0) if parts else None)
    return means


def train(team: Sharded, plain: Plain, steps: range, *, some_unused: bool = False) -> None:
    for step in steps:
        used = used_in(step, team.workers) if some_unused else None
        gradients = gradients_for(step, team.workers)
        team.step(gradients, used)
        plain.step(mean(gradients, used))


def assert_same(values: list[torch.nn.Parameter], wanted: list[torch.nn.Parameter]) -> None:
    for value, other in zip(values, wanted, strict=True):
        torch.testing.assert_close(value.data, other.data, rtol=1e-12, atol=1e-14)


def continued(values: list[torch.nn.Parameter], kind: type[Optimizer], options: dict[str, Any], state: Any) -> Plain:
    """Plain torch from a checkpoint."""
    plain = Plain(kind, options)
    for own, value in zip(plain.values, values, strict=True):
        own.data.copy_(value.data)
    plain.optimizer.load_state_dict(copy.deepcopy(state))
    return plain


def test_there_are_options_for_every_elementwise_optimizer() -> None:
    assert set(OPTIONS) == ELEMENTWISE


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_shards_do_what_plain_torch_does(kind: type[Optimizer], options: dict[str, Any], workers: int) -> None:
    team, plain = Sharded(kind, options, workers), Plain(kind, options)
    train(team, plain, range(6))
    assert_same(team.values, plain.values)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_parameters_without_a_gradient_stay_as_plain_torch_leaves_them(
    kind: type[Optimizer], options: dict[str, Any], workers: int
) -> None:
    team, plain = Sharded(kind, options, workers), Plain(kind, options)
    for step in range(6):
        train(team, plain, range(step, step + 1), some_unused=True)
        assert_same(team.values, plain.values)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_parameters_larger_than_a_chunk_come_out_the_same(
    kind: type[Optimizer], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "CHUNK", 16 * 8)
    monkeypatch.setattr(reduction, "CHUNK", 16 * 8)
    team, plain = Sharded(kind, options, 3), Plain(kind, options)
    assert all(len(shard._chunks) > 2 for shard in team.shards)
    train(team, plain, range(6), some_unused=True)
    assert_same(team.values, plain.values)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_all_state_lies_in_shared_memory_and_stays_there(kind: type[Optimizer], options: dict[str, Any]) -> None:
    team, plain = Sharded(kind, options, 3), Plain(kind, options)
    begin = team.memory.tensor(0, 1, torch.uint8).data_ptr()
    train(team, plain, range(1))
    kept = len([value for state in plain.optimizer.state.values() for value in state.values()])
    places = [value.data_ptr() for value in team.states()]
    assert bool(places) == bool(kept)
    assert all(begin <= place < begin + team.memory.size for place in places)
    pieces = [(shard._inner.state, piece.parameter) for shard in team.shards for piece in shard._own]
    own = [value.data_ptr() for state, piece in pieces for value in state[piece].values()]
    assert len(set(own)) == len(own)
    train(team, plain, range(1, 6))
    # Neighbours that are updated as one have their state at the same places, seen as one.
    later = [value.data_ptr() for value in team.states()]
    assert set(places) <= set(later)
    assert all(begin <= place < begin + team.memory.size for place in later)


@pytest.mark.parametrize("some_unused", [False, True])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_the_exported_state_is_plain_torch_s_own(
    kind: type[Optimizer], options: dict[str, Any], some_unused: bool
) -> None:
    team, plain = Sharded(kind, options, 3), Plain(kind, options)
    train(team, plain, range(3), some_unused=some_unused)
    fresh = make(kind, team.values, options)
    team.shards[1].export_state(fresh)
    exported, wanted = fresh.state_dict()["state"], plain.optimizer.state_dict()["state"]
    empty = 3
    for index in set(wanted) - {empty}:
        assert set(exported[index]) == {name for name, value in wanted[index].items() if value is not None}
        for name, value in exported[index].items():
            torch.testing.assert_close(value, wanted[index][name], rtol=1e-12, atol=1e-14)
    assert set(exported) - {empty} == {index for index, state in wanted.items() if state and index != empty}


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_plain_torch_goes_on_from_an_exported_state(kind: type[Optimizer], options: dict[str, Any]) -> None:
    team, plain = Sharded(kind, options, 4), Plain(kind, options)
    train(team, plain, range(3), some_unused=True)
    fresh = make(kind, team.values, options)
    team.shards[0].export_state(fresh)
    from_team = continued(team.values, kind, options, fresh.state_dict())
    from_plain = continued(plain.values, kind, options, plain.optimizer.state_dict())
    for step in range(3, 6):
        gradient = mean(gradients_for(step, 2), None)
        from_team.step(gradient)
        from_plain.step(gradient)
    assert_same(from_team.values, from_plain.values)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_any_number_of_shards_goes_on_from_plain_torch_s_state(
    kind: type[Optimizer], options: dict[str, Any], workers: int
) -> None:
    plain = Plain(kind, options)
    for step in range(3):
        plain.step(mean(gradients_for(step, 2), used_in(step, 2)))
    team = Sharded(kind, options, workers, start=plain)
    for optimizer, shard in zip(team.optimizers, team.shards, strict=True):
        for value, own in zip(plain.values, team.values, strict=True):
            if value in plain.optimizer.state:
                optimizer.state[own] = copy.deepcopy(plain.optimizer.state[value])
        shard.import_state(optimizer)
        assert not optimizer.state
    train(team, plain, range(3, 6), some_unused=True)
    assert_same(team.values, plain.values)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_any_number_of_shards_goes_on_from_a_checkpoint(
    kind: type[Optimizer], options: dict[str, Any], workers: int
) -> None:
    before, plain = Sharded(kind, options, 2), Plain(kind, options)
    train(before, plain, range(3))
    fresh = make(kind, before.values, options)
    before.shards[0].export_state(fresh)
    checkpoint = copy.deepcopy(fresh.state_dict())
    team = Sharded(kind, options, workers, start=plain)
    for optimizer, shard in zip(team.optimizers, team.shards, strict=True):
        optimizer.load_state_dict(checkpoint)
        shard.import_state(optimizer)
    train(team, plain, range(3, 6))
    assert_same(team.values, plain.values)


@pytest.mark.parametrize(
    ("kind", "options"), [(torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}), (torch.optim.Adam, {})]
)
def test_an_imported_state_without_a_parameter_makes_it_start_anew(
    kind: type[Optimizer], options: dict[str, Any]
) -> None:
    team, plain = Sharded(kind, options, 2), Plain(kind, options)
    train(team, plain, range(3))
    beginning = Plain(kind, options).optimizer.state_dict()
    plain.optimizer.load_state_dict(beginning)
    for optimizer, shard in zip(team.optimizers, team.shards, strict=True):
        optimizer.load_state_dict(beginning)
        shard.import_state(optimizer)
    train(team, plain, range(3, 6))
    assert_same(team.values, plain.values)


def test_imported_state_lies_in_shared_memory_too() -> None:
    plain = Plain(torch.optim.Adam, {})
    plain.step(mean(gradients_for(0, 2), None))
    team = Sharded(torch.optim.Adam, {}, 2, start=plain)
    for optimizer, shard in zip(team.optimizers, team.shards, strict=True):
        for value, own in zip(plain.values, team.values, strict=True):
            optimizer.state[own] = plain.optimizer.state[value]
        shard.import_state(optimizer)
    begin = team.memory.tensor(0, 1, torch.uint8).data_ptr()
    places = [value.data_ptr() for value in team.states()]
    assert len(places) >= 3 * 5
    assert all(begin <= place < begin + team.memory.size for place in places)


def test_a_rate_changed_between_updates_counts_from_the_next_one() -> None:
    team, plain = Sharded(torch.optim.Adam, {}, 2), Plain(torch.optim.Adam, {})
    for step in range(4):
        for group in plain.optimizer.param_groups:
            group["lr"] /= step + 1
        for shard in team.shards:
            shard.set_hyperparameters([{"lr": group["lr"]} for group in plain.optimizer.param_groups])
        train(team, plain, range(step, step + 1))
    assert_same(team.values, plain.values)


def test_a_scale_multiplies_the_summed_gradient() -> None:
    team, plain = Sharded(torch.optim.SGD, {}, 2), Plain(torch.optim.SGD, {})
    gradients = gradients_for(0, 2)
    for rank in range(2):
        for view, gradient in zip(team.layout.buffers(team.gradients[rank].own), gradients[rank], strict=True):
            view.copy_(gradient)
    for shard in team.shards:
        shard.update(list(enumerate(WEIGHTS[2])), None, scale=0.125)
    plain.step([None if gradient is None else gradient * 0.125 for gradient in mean(gradients, None)])
    assert_same(team.values, plain.values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_momentum_in_half_precision_moves_every_element(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    start, gradient = torch.randn(100, dtype=dtype), torch.randn(100, dtype=dtype)
    plain, value = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    layout = Layout([("only", value)], 1)
    versions = Versions(layout, shared(Versions.memory_size(layout)))
    versions.fill()
    versions.pull()
    gradients = Gradients.shared(layout, shared(Gradients.memory_size(layout, 1)), 0, 1)
    shard = ShardedOptimizer(torch.optim.SGD([value], lr=0.1, momentum=0.9), layout, versions, gradients, 0, 1)
    shard.place(shared(shard.memory_size()))
    reference = torch.optim.SGD([plain], lr=0.1, momentum=0.9)
    for _ in range(3):
        layout.buffers(gradients.own)[0].copy_(gradient)
        shard.update([(0, 1.0)], None)
        plain.grad = gradient.clone()
        reference.step()
    assert torch.equal(value.data, plain.data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128])
def test_other_dtypes_beside_float64_are_updated_too(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    start = [torch.randn(40, dtype=dtype), torch.randn(5, 3, dtype=torch.float64)]
    gradient = [torch.randn_like(value) for value in start]
    plain = [torch.nn.Parameter(value.clone()) for value in start]
    values = [torch.nn.Parameter(value.clone()) for value in start]
    layout = Layout([("a", values[0]), ("b", values[1])], 2)
    versions = Versions(layout, shared(Versions.memory_size(layout)))
    versions.fill()
    versions.pull()
    memory = shared(Gradients.memory_size(layout, 2))
    gradients = [Gradients.shared(layout, memory, rank, 2) for rank in range(2)]
    shards = [
        ShardedOptimizer(torch.optim.Adam(values, lr=0.1), layout, versions, gradients[rank], rank, 2)
        for rank in range(2)
    ]
    state = shared(shards[0].memory_size())
    for shard in shards:
        shard.place(state)
    reference = torch.optim.Adam(plain, lr=0.1, fused=dtype.is_floating_point)
    for _ in range(3):
        for rank in range(2):
            for view, value in zip(layout.buffers(gradients[rank].own), gradient, strict=True):
                view.copy_(value)
        for shard in shards:
            shard.update([(0, 0.5), (1, 0.5)], None)
        for value, own in zip(plain, gradient, strict=True):
            value.grad = own.clone()
        reference.step()
    for value, wanted in zip(values, plain, strict=True):
        torch.testing.assert_close(value.data, wanted.data)


def test_a_worker_without_a_shard_does_no_harm() -> None:
    values = [torch.nn.Parameter(torch.ones(3, dtype=torch.float64))]
    layout = Layout([("only", values[0])], 4)
    versions = Versions(layout, shared(Versions.memory_size(layout)))
    versions.fill()
    versions.pull()
    memory = shared(Gradients.memory_size(layout, 4))
    gradients = [Gradients.shared(layout, memory, rank, 4) for rank in range(4)]
    shards = [
        ShardedOptimizer(torch.optim.SGD(values, lr=1.0), layout, versions, gradients[rank], rank, 4)
        for rank in range(4)
    ]
    state = shared(shards[0].memory_size())
    for shard, own in zip(shards, gradients, strict=True):
        shard.place(state)
        layout.buffers(own.own)[0].fill_(0.5)
    read = [shard.update([(rank, 0.25) for rank in range(4)], None) for shard in shards]
    assert values[0].tolist() == [0.5, 0.5, 0.5]
    assert sum(amount > 0 for amount in read) == 1


def test_groups_of_unlike_options_keep_to_their_own() -> None:
    def adam(values: list[torch.nn.Parameter]) -> torch.optim.Adam:
        groups = [{"params": values[:4], "amsgrad": True}, {"params": values[4:], "weight_decay": 0.1}]
        return torch.optim.Adam(groups, lr=0.05)

    team, plain = Sharded(torch.optim.Adam, {}, 3), Plain(torch.optim.Adam, {})
    plain.optimizer = adam(plain.values)
    versions = Versions(team.layout, shared(Versions.memory_size(team.layout)))
    versions.fill()
    versions.pull()
    team.shards = [
        ShardedOptimizer(adam(team.values), team.layout, versions, team.gradients[rank], rank, 3) for rank in range(3)
    ]
    team.memory = shared(team.shards[0].memory_size())
    for shard in team.shards:
        shard.place(team.memory)
    train(team, plain, range(6))
    assert_same(team.values, plain.values)
    fresh = adam(team.values)
    team.shards[2].export_state(fresh)
    exported, wanted = fresh.state_dict()["state"], plain.optimizer.state_dict()["state"]
    assert [set(exported[index]) for index in (0, 4)] == [set(wanted[index]) for index in (0, 4)]
