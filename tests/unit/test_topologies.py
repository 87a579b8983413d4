"""The topologies: their costs against the reference values, their shapes, and a new one."""

from __future__ import annotations

import math
import sys
from types import ModuleType

import pytest
import torch
from helpers.formulas import byteps_seconds, byteps_shares, lower_bound, textbook_tree
from helpers.in_memory import InMemoryChannel, run_in_memory
from hypothesis import given
from hypothesis import strategies as st

from paceline.collectives import algorithms
from paceline.collectives.algorithms.messages import Combine, outgoing, split
from paceline.config import parse_strategy
from paceline.config.distributions import Constant
from paceline.errors import UsageError
from paceline.planner.candidates import candidates
from paceline.planner.choose import Choice, rank, simplest
from paceline.simulate.cluster import SimulatedCluster
from paceline.simulate.predict import simulate
from paceline.topologies import (
    TOPOLOGIES,
    ExchangeCost,
    Link,
    Topology,
    choices,
    quickest,
    seconds,
    sharded_servers,
    tree,
)
from paceline.transport.channel import Channel


def test_the_formulas_give_the_values_of_the_reference() -> None:
    link = Link(latency=10e-6, bandwidth=12.5e9)
    for size, amount, wanted in (
        (64, 100e6, (17.01, 96.12, 15.87, 1024.0, 15.77)),
        (1024, 64e3, (20.47, 0.302, 0.210, 10.51, 0.030)),
    ):
        found = (
            seconds("ring", size, amount, link),
            textbook_tree(size, amount, link),
            seconds("halving-doubling", size, amount, link),
            sharded_servers(size, 1, amount, link),
            seconds("direct", size, amount, link),
        )
        assert [1000 * time for time in found] == pytest.approx(wanted, rel=1e-3, abs=0.0005)
        assert seconds("hub", size + 1, amount, link) == sharded_servers(size, 1, amount, link)


@given(st.sampled_from(list(TOPOLOGIES)), st.integers(1, 5000), st.floats(1, 1e9), st.floats(0, 1), st.floats(1, 1e12))
def test_nothing_beats_the_bound(topology: str, size: int, amount: float, latency: float, bandwidth: float) -> None:
    link = Link(latency=latency, bandwidth=bandwidth)
    assert seconds(topology, size, amount, link) >= lower_bound(size, amount, bandwidth) * (1 - 1e-12)


def test_ring_halving_doubling_and_direct_reach_the_bound_without_latency() -> None:
    link = Link(bandwidth=1e9)
    for topology in ("ring", "halving-doubling", "direct"):
        assert seconds(topology, 8, 1e6, link) == pytest.approx(lower_bound(8, 1e6, 1e9))
        assert lower_bound(8, 1e6, 1e9) == pytest.approx(1.75e-3)


def test_more_servers_help_until_the_workers_links_are_full() -> None:
    link = Link(latency=1.0, bandwidth=10.0)
    assert [sharded_servers(8, count, 100, link) for count in (1, 2, 4, 8, 16)] == [162, 82, 42, 22, 22]


def test_the_best_servers_take_the_times_of_the_reference() -> None:
    found = [byteps_seconds(8, spare, 1.0, 1.0) for spare in (0, 2, 4, 8, 20)]
    assert found == pytest.approx([1.750, 1.474, 1.273, 1.000, 1.000], abs=5e-4)
    assert byteps_seconds(1, 3, 1.0, 1.0) == 0
    assert byteps_seconds(8, 0, 1e6, 1e9) == pytest.approx(lower_bound(8, 1e6, 1e9))


@given(st.integers(1, 50), st.integers(0, 80))
def test_the_best_shares_hold_everything_once_and_load_all_links_alike(workers: int, spare: int) -> None:
    shares = byteps_shares(workers, spare, 1.0)
    assert spare * shares.spare + workers * shares.busy == pytest.approx(1)
    time = byteps_seconds(workers, spare, 1.0, 1.0)
    # A worker's machine sends all but what it serves itself, and what it serves to all other workers.
    assert (1 - shares.busy) + (workers - 1) * shares.busy == pytest.approx(time)
    assert workers * shares.spare <= time + 1e-9
    if 0 < spare <= workers > 1:
        assert workers * shares.spare == pytest.approx(time)


@pytest.mark.parametrize("size", range(1, 71))
def test_both_are_trees_of_least_depth_and_nobody_is_inner_twice(size: int) -> None:
    inner: list[set[int]] = []
    for which in tree.TREES:
        places = [tree.place(which, rank, size) for rank in range(size)]
        (level,) = [[rank] for rank in range(size) if places[rank].parent is None]
        seen: list[int] = []
        depth = 0
        while level:
            seen += level
            assert all(len(places[rank].children) <= 2 for rank in level)
            assert all(places[child].parent == rank for rank in level for child in places[rank].children)
            level = [child for rank in level for child in places[rank].children]
            depth += 1
        assert sorted(seen) == list(range(size))
        assert depth == math.ceil(math.log2(size + 1))
        inner.append({rank for rank in range(size) if places[rank].children})
    assert not inner[0] & inner[1]
    assert len(inner[0]) == len(inner[1]) == size // 2


def test_the_trees_of_seven_are_as_drawn() -> None:
    for which, (top, left, right, *leaves) in enumerate([(3, 1, 5, 0, 2, 4, 6), (2, 0, 4, 6, 1, 3, 5)]):
        assert tree.place(which, top, 7) == (None, (left, right))
        assert tree.place(which, left, 7) == (top, tuple(leaves[:2]))
        assert tree.place(which, right, 7) == (top, tuple(leaves[2:]))


# A new topology.


def chain(channel: Channel, tensor: torch.Tensor, combine: Combine) -> None:
    """Partial sums run in chunks from the last rank to the first, the results run back."""
    rank, last = channel.rank, channel.size - 1
    chunks = split(tensor, channel.size)
    with outgoing(channel) as send:
        for chunk in chunks:
            if rank < last:
                arriving = torch.empty_like(chunk)
                channel.receive(rank + 1, arriving)
                combine(chunk, arriving)
            if rank > 0:
                send(rank - 1, chunk)
        for chunk in chunks:
            if rank > 0:
                channel.receive(rank - 1, chunk)
            if rank < last:
                send(rank + 1, chunk)


def register(monkeypatch: pytest.MonkeyPatch, line: Topology) -> None:
    """What `collectives/algorithms/chain.py` and one line in `TOPOLOGIES` do before the package is imported."""
    file = ModuleType("paceline.collectives.algorithms.chain")
    file.all_reduce = chain  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, file.__name__, file)
    monkeypatch.setitem(TOPOLOGIES, "chain", line)
    monkeypatch.setitem(algorithms.ALGORITHMS, "chain", algorithms.operations("chain"))


def narrow() -> SimulatedCluster:
    return SimulatedCluster(workers=4, compute=Constant(0.1), size=100e6, link=Link(1e-4, 125e6))


def planned() -> list[Choice]:
    """The all-reduces among the candidates of a plan, ranked."""
    on = narrow()
    return rank(on, among=[one for one in candidates(on) if one.strategy.startswith("all-reduce")])


def test_a_new_topology_is_one_file_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, Topology(lambda size: ExchangeCost(2 * (size - 1), 4 * (size - 1) / size)))
    link = Link(10e-6, 1e9)

    def work(channel: InMemoryChannel) -> list[float]:
        tensor = torch.arange(60 * channel.size, dtype=torch.uint8) % 7
        algorithms.find("chain", "all_reduce")(channel, tensor, lambda total, term: total.add_(term))
        assert torch.equal(tensor, torch.arange(60 * channel.size, dtype=torch.uint8) % 7 * channel.size)
        return []

    for size in range(1, 8):
        assert run_in_memory(size, work, link)[1] == pytest.approx(seconds("chain", size, 60 * size, link), rel=1e-7)
    with pytest.raises(UsageError, match="the topology chain has no broadcast; these have: ring, tree, hub, direct"):
        algorithms.find("chain", "broadcast")
    assert choices()[-1] == "chain"
    assert str(parse_strategy("all-reduce:topology=chain")) == "all-reduce:topology=chain"
    told, _ = simulate("all-reduce:topology=chain", narrow(), updates=10)
    assert told.seconds_per_update == pytest.approx(0.1 + seconds("chain", 4, 100e6, narrow().link))
    assert "all-reduce:topology=chain" in {choice.strategy for choice in planned()}


def test_a_topology_without_a_formula_runs_but_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, Topology())
    assert algorithms.find("chain", "all_reduce") is chain
    assert str(parse_strategy("all-reduce:topology=chain")) == "all-reduce:topology=chain"
    with pytest.raises(UsageError, match="there is no formula for the topology 'chain'; there are ring, tree, "):
        simulate("all-reduce:topology=chain", narrow(), updates=10)
    assert quickest(4, 100e6, narrow().link) == "ring"
    ranked = planned()
    assert simplest(ranked) is not None
    assert "all-reduce:topology=chain" not in {choice.strategy for choice in ranked}
