import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.parameters import reduction
from paceline.parameters.gradients import Gradients
from paceline.parameters.layout import Layout
from paceline.parameters.reduction import SharedReduction, weighted_sum
from paceline.transport import Memory


class Team:
    """All workers' gradients, in one process."""

    def __init__(self, workers: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        values = [
            torch.randn(9, 7, dtype=torch.float64),
            torch.randn(50),
            torch.randn((), dtype=torch.float64),
            torch.randn(0, 2),
            torch.randn(3, 2, 4, 4).to(memory_format=torch.channels_last),
            torch.randn(40, dtype=torch.float64),
        ]
        named = [(str(index), torch.nn.Parameter(value)) for index, value in enumerate(values)]
        self.layout = Layout(named, workers)
        memory = Memory.create(Gradients.memory_size(self.layout, workers))
        self.gradients = [Gradients.shared(self.layout, memory, rank, workers) for rank in range(workers)]
        self.before = []
        for own in self.gradients:
            for flat in own.own:
                flat.normal_()
            self.before.append([view.clone() for view in self.views(own)])
        self.reductions = [SharedReduction(self.layout, own, rank) for rank, own in enumerate(self.gradients)]

    def views(self, gradients: Gradients) -> list[torch.Tensor]:
        return self.layout.buffers(gradients.own)

    def reduce(self, weights: list[tuple[int, float]], used: list[bytes] | None = None) -> None:
        for one in self.reductions:
            one.shard(weights, used)
        for one in self.reductions:
            one.gather()

    def mean(self, weights: list[tuple[int, float]], index: int, used: list[bytes] | None = None) -> torch.Tensor:
        parts = [self.before[rank][index] * weight for rank, weight in weights if not used or used[rank][index]]
        return torch.stack(parts).sum(0)


@pytest.mark.parametrize("chunk", [64, 8 * 24, 512 * 1024])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_everybody_gets_the_weighted_sum(workers: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "CHUNK", chunk)
    team = Team(workers)
    weights = [(rank, (rank + 1) / 10) for rank in range(workers)]
    team.reduce(weights)
    for own in team.gradients:
        for index, view in enumerate(team.views(own)):
            tight = view.dtype == torch.float64
            wanted = team.mean(weights, index)
            torch.testing.assert_close(view, wanted, rtol=1e-13 if tight else 1e-5, atol=1e-14 if tight else 1e-6)


@given(st.integers(2, 4), st.integers(0, 1000))
def test_everybody_gets_the_same_bits(workers: int, seed: int) -> None:
    team = Team(workers, seed)
    team.reduce([(rank, 1 / workers) for rank in range(workers)])
    first, *others = [team.views(own) for own in team.gradients]
    for other in others:
        assert all(torch.equal(view, same) for view, same in zip(first, other, strict=True))


def test_the_same_gradients_give_the_same_bits_in_whatever_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for chunk in (64, 1024, 512 * 1024):
        monkeypatch.setattr(reduction, "CHUNK", chunk)
        team = Team(3)
        team.reduce([(0, 0.2), (1, 0.3), (2, 0.5)])
        results.append(team.views(team.gradients[2]))
    for other in results[1:]:
        assert all(torch.equal(view, same) for view, same in zip(results[0], other, strict=True))


def test_a_worker_that_brought_nothing_gets_the_sum_of_the_others() -> None:
    team = Team(3)
    weights = [(0, 0.25), (2, 0.75)]
    team.reduce(weights)
    for own in team.gradients:
        torch.testing.assert_close(team.views(own)[0], team.mean(weights, 0), rtol=1e-13, atol=1e-14)


def test_a_gradient_counts_only_from_those_who_have_it() -> None:
    team = Team(3)
    weights = [(0, 0.5), (1, 0.3), (2, 0.2)]
    used = [bytes([1, 0, 1, 1, 0, 1]), bytes([1, 1, 0, 1, 0, 1]), bytes([1, 0, 0, 1, 1, 0])]
    team.reduce(weights, used)
    for own in team.gradients:
        for index, view in enumerate(team.views(own)):
            wanted = team.mean(weights, index, used)
            torch.testing.assert_close(view, wanted, rtol=1e-5, atol=1e-6)


def test_what_a_worker_without_a_gradient_left_behind_is_never_read() -> None:
    team = Team(2)
    team.views(team.gradients[1])[0].fill_(float("nan"))
    used = [bytes([1] * 6), bytes([0, 1, 1, 1, 1, 1])]
    team.reduce([(0, 0.5), (1, 0.5)], used)
    for own in team.gradients:
        torch.testing.assert_close(team.views(own)[0], team.before[0][0] * 0.5, rtol=1e-13, atol=0)


def test_the_bytes_read_are_those_of_the_others() -> None:
    team = Team(4)
    weights = [(rank, 0.25) for rank in range(4)]
    read = [one.shard(weights, None) for one in team.reductions]
    assert sum(read) == 3 * team.layout.size
    copied = [one.gather() for one in team.reductions]
    assert sum(copied) == 3 * team.layout.size


@pytest.mark.parametrize("kind", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("used", [None, bytes([1, 1, 0, 1, 1, 0])])
@pytest.mark.parametrize("workers", [1, 3])
def test_norms_of_shards_come_together_to_the_whole(kind: float, used: bytes | None, workers: int) -> None:
    team = Team(workers)
    weights = [(rank, 1 / workers) for rank in range(workers)]
    for one in team.reductions:
        one.shard(weights, None)
    parts = [one.norm(kind, used) for one in team.reductions]
    total = max(parts) if kind == float("inf") else sum(parts) ** (1 / kind)
    chosen = [team.mean(weights, index).double() for index in range(6) if used is None or used[index]]
    whole = torch.cat([gradient.reshape(-1) for gradient in chosen])
    assert total == pytest.approx(float(torch.linalg.vector_norm(whole, kind)), rel=1e-5)


@pytest.mark.parametrize("kind", [2.0, float("inf")])
def test_a_norm_is_not_finite_if_a_gradient_is_not(kind: float) -> None:
    team = Team(2)
    for own in team.gradients:
        team.views(own)[0][0, 0] = float("nan")
    assert any(math.isnan(one.norm(kind, None)) for one in team.reductions)


def test_another_s_gradient_can_take_the_place_of_one_s_own() -> None:
    team = Team(3)
    team.reductions[2].adopt(1)
    for rank, source in ((0, 0), (1, 1), (2, 1)):
        for view, wanted in zip(team.views(team.gradients[rank]), team.before[source], strict=True):
            assert torch.equal(view, wanted)


def test_a_weighted_sum_reads_only_whom_it_was_told() -> None:
    total = torch.empty(3)
    parts = (torch.full((3,), float("nan")), torch.ones(3), torch.full((3,), 4.0))
    weighted_sum(total, parts, [(1, 0.5), (2, 0.25)], scale=2.0)
    assert total.tolist() == [3.0, 3.0, 3.0]
