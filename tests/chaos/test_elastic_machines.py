"""All-reduce over machines that goes on with whoever is left: a worker dies, a machine dies, at any moment."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hosts import hosts
from helpers.machines import Failure, Spread
from helpers.support import wait_until
from helpers.teams import run_spread
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.collectives.inter_machine import InterMachineReduce
from paceline.config import Launch, Timeouts
from paceline.events import Compute, Join, Leave, Lost, Roster, Wait
from paceline.parameters.sharding import ShardedOptimizer
from paceline.transport import BarrierKind

SAMPLES, BATCH, AT = 97, 4, 5
MOMENTS = ["before", "exchange", "inside", "after"]
"""Before the update that makes version AT + 1; in its exchange; in its optimizer; at its end."""


def _model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1)).double()


def _data() -> TensorDataset:
    inputs = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    return TensorDataset(torch.arange(SAMPLES), inputs, inputs.sum(1, keepdim=True))


_how = signal.SIGKILL
"""What happens to a worker that is lost."""


def _die(*_: Any) -> None:
    os.kill(os.getpid(), _how)


def _prepare(trainer: Any, when: str) -> None:
    """Let this worker be killed at a moment of the update that follows version AT."""

    def at_last(real: Any, second: bool = False) -> Any:
        calls = 0

        def instead(*arguments: Any) -> Any:
            nonlocal calls
            calls += trainer.version == AT
            if calls == 1 + second:
                if second:  # with its second shard half done, and the state of it
                    shard = arguments[0]
                    real(*arguments)
                    start, stop = shard._layout.flats[0].shards[shard._rank]
                    for tensor in [*shard.state(), *trainer._shards.versions.buffers[trainer._shards.buffer ^ 1]]:
                        tensor[start : (start + stop) // 2] = float("nan")
                _die()
            return real(*arguments)

        return instead

    if when == "exchange":
        InterMachineReduce.all_reduce = at_last(InterMachineReduce.all_reduce)  # type: ignore[method-assign]
    if when == "inside":
        ShardedOptimizer.update = at_last(ShardedOptimizer.update, second=True)  # type: ignore[method-assign]
    if when == "after":
        meet = trainer._barrier.wait

        def late(intent: BarrierKind, length: int = 0) -> BarrierKind:
            if intent is BarrierKind.PUBLISH and trainer.version == AT:
                _die()
            found: BarrierKind = meet(intent, length)
            return found

        trainer._barrier.wait = late


def work(
    team: Any, victims: dict[int, str], clip: bool = False, epochs: int = 2, reduction: str = "mean"
) -> dict[str, Any]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    model, optimizer, loader = team.setup(model, optimizer, DataLoader(_data(), batch_size=BATCH * team.world_size))
    trainer = team._trainer
    when = victims.get(team.rank, "")
    _prepare(trainer, when)
    seen = []
    for _ in range(epochs):
        keys_seen: list[int] = []
        for keys, x, y in loader:
            mse_loss(model(x), y, reduction=reduction).backward()
            if clip:
                team.clip_grad_norm_(0.05)
            if when == "before" and trainer.version == AT:
                _die()
            optimizer.step()
            keys_seen += keys.tolist()
            optimizer.zero_grad()
        seen.append(keys_seen)
    state = optimizer.state_dict()["state"]
    return {
        "values": [parameter.detach().flatten().clone() for parameter in model.parameters()],
        "finite": all(bool(torch.isfinite(value).all()) for one in state.values() for value in one.values()),
        "seen": seen,
        "size": team.world_size,
        "version": trainer.version,
    }


def plain(rounds: list[list[int]], clip: bool = False, reduction: str = "mean") -> list[torch.Tensor]:
    """The same updates in one process: each the mean over the samples of a round."""
    model, (_, inputs, outputs) = _model(), _data().tensors
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    for keys in rounds:
        optimizer.zero_grad()
        mse_loss(model(inputs[keys]), outputs[keys], reduction=reduction).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return [parameter.detach().flatten() for parameter in model.parameters()]


def rounds_of(workers: int, victims: set[int], counted: bool, epochs: int = 2) -> list[list[int]]:
    """Which samples make which update when these are lost at one."""
    rounds: list[list[int]] = []
    size = BATCH * workers
    for _ in range(epochs):
        order, left = list(range(SAMPLES)), []
        while order:
            if len(order) < size:  # what the lost ones had goes with what is left
                order, left = order + left, []
            keys, order = order[:size], order[size:]
            if len(rounds) == AT and not counted:
                left = [key for index, key in enumerate(keys) if index // BATCH in victims]
                keys = [key for key in keys if key not in left]
            rounds.append(keys)
    return rounds


def spread(places: str, victims: dict[int, str], **options: Any) -> list[Any]:
    launch = Launch(strategy="all-reduce", elastic=True, timeouts=Timeouts(barrier=20.0, join=20.0))
    results = run_spread(_with(options), places, victims, launch=launch, may_die=list(victims))
    return [result for rank, result in enumerate(results) if rank not in victims]


def _with(options: dict[str, Any]) -> Any:
    return lambda team, victims: work(team, victims, **options)


def well(ends: list[Any]) -> None:
    for end in ends:
        assert end["finite"]
        assert end["version"] == ends[0]["version"]
        assert all(torch.equal(a, b) for a, b in zip(end["values"], ends[0]["values"], strict=True))


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(ours, theirs, strict=True))


def _silenced(team: Any, victim: int, when: str, notes: str) -> dict[str, Any]:
    """A worker is stopped; where its machine has no other worker, rank 0 wakes it when all is done."""
    global _how
    _how = signal.SIGSTOP
    pid = Path(notes, "pid")
    if team.rank == victim:
        pid.write_text(str(os.getpid()))
    found = work(team, {victim: when})
    if team.rank == 0:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid.read_text()), signal.SIGCONT)
    return found


@pytest.mark.parametrize(("places", "victim", "when"), [("ABB", 1, "inside"), ("ABC", 2, "before")])
def test_a_silent_worker_is_evicted_and_its_waking_changes_nothing(
    places: str, victim: int, when: str, tmp_path: Path
) -> None:
    launch = Launch(strategy="all-reduce", elastic=True, timeouts=Timeouts(barrier=4.0, join=20.0))
    results = run_spread(_silenced, places, victim, when, str(tmp_path), launch=launch, may_die=[victim])
    lost = results.pop(victim)
    well(results)
    expected = rounds_of(3, {victim}, places == "ABB")
    assert results[0]["version"] == len(expected)
    assert same(results[0]["values"], plain(expected))
    # Where another worker shares its memory, that one has ended it.
    assert ("ended without a word" in lost) == (places == "ABB"), lost
    assert ("WorkerLost" in lost) == (places == "ABC"), lost


CASES = [(places, victim, when) for places, victim in (("ABB", 1), ("ABC", 2)) for when in MOMENTS]
CASES += [("AAB", 1, "exchange"), ("AAB", 1, "after"), ("ABB", 2, "inside"), ("AAB", 2, "exchange")]


@pytest.mark.parametrize(("places", "victim", "when"), CASES)
def test_the_others_go_on_as_a_smaller_team_would(places: str, victim: int, when: str) -> None:
    ends = spread(places, {victim: when})
    well(ends)
    # A gradient that lies in the memory of a machine where somebody is left still counts.
    counted = when != "before" and places.count(places[victim]) > 1
    expected = rounds_of(3, {victim}, counted)
    assert ends[0]["version"] == len(expected)
    assert same(ends[0]["values"], plain(expected))
    assert {end["size"] for end in ends} <= {1, 2}  # one may have left before the other has ended
    assert sorted(key for end in ends for key in end["seen"][1]) == list(range(SAMPLES))
    assert len({key for end in ends for key in end["seen"][0]}) == sum(len(end["seen"][0]) for end in ends)


def test_a_whole_machine_is_lost_in_an_exchange() -> None:
    ends = spread("AABB", {2: "exchange", 3: "exchange"})
    well(ends)
    assert same(ends[0]["values"], plain(rounds_of(4, {2, 3}, False)))


def test_one_after_the_other_is_lost() -> None:
    ends = spread("ABCD", {1: "before", 2: "exchange", 3: "after"})
    well(ends)
    assert sorted(ends[0]["seen"][1]) == list(range(SAMPLES))


@pytest.mark.parametrize(("places", "victim"), [("ABB", 1), ("ABC", 2)])
def test_the_mean_is_clipped_as_before(places: str, victim: int) -> None:
    ends = spread(places, {victim: "inside"}, clip=True)
    well(ends)
    expected = rounds_of(3, {victim}, places == "ABB")
    assert ends[0]["version"] == len(expected)
    # A gradient that is lost with its machine after the clipping has been in the factor.
    assert same(ends[0]["values"], plain(expected, clip=True)) == (places == "ABB")


def test_of_sums_each_sample_adds_what_it_did_before() -> None:
    ends = spread("ABC", {2: "exchange"}, reduction="sum")
    well(ends)
    assert same(ends[0]["values"], plain(rounds_of(3, {2}, False), reduction="sum"))


def test_nobody_lost_is_a_run_as_any_other() -> None:
    ends = spread("AABBB", {})
    well(ends)
    assert same(ends[0]["values"], plain(rounds_of(5, set(), True)))


def test_without_rank_0_nobody_goes_on() -> None:
    launch = Launch(strategy="all-reduce", elastic=True, timeouts=Timeouts(barrier=20.0, join=20.0))
    results = run_spread(_ending, "ABB", launch=launch, may_die=[0])
    for kind, message, ranks in results[1:]:
        assert kind == "WorkerLost"
        assert message.startswith("rank 0 on 127.0.0.1, to whom all come in an elastic run over machines, died")
        assert ranks == [0]


def _ending(team: Any) -> Any:
    try:
        work(team, {0: "before"})
    except paceline.TeamError as error:
        return type(error).__name__, str(error), list(error.ranks)
    return "", "", []


def paced(team: Any, steps: int, mark: str) -> tuple[int, list[float]]:
    torch.manual_seed(1)
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = team.setup(model, optimizer)
    for number in range(steps):
        x = torch.randn(4, 300, generator=torch.Generator().manual_seed(number * 10 + team.rank))
        model(x).square().mean().backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
        if number == 3:
            Path(f"{mark}-{team.rank}").touch()
    return team.world_size, [float(parameter.detach().double().sum()) for parameter in model.parameters()]


@pytest.mark.parametrize("victims", [[2], [2, 3]])
def test_workers_of_real_hosts_are_killed_at_any_moment(victims: list[int], tmp_path: Path) -> None:
    launch = Launch(strategy="all-reduce", elastic=True, timeouts=Timeouts(barrier=20.0, join=20.0))
    mark = tmp_path / "begun"
    with hosts(2) as made, Spread(paced, made, 2, 60, str(mark), launch=launch, folder=tmp_path / "run") as team:
        for rank in range(4):
            wait_until(Path(f"{mark}-{rank}").exists, 40, f"the first steps of rank {rank}")
        time.sleep(random.Random(str(victims)).random() * 0.3)
        for victim in victims:
            team.processes[victim].kill()
        results = team.results(60)
        recorded = team.events()
    survivors = [rank for rank in range(4) if rank not in victims]
    assert [type(results[rank]) for rank in victims] == [Failure] * len(victims)
    assert all(results[rank][1] == results[0][1] for rank in survivors), results
    assert sorted(event.rank for event in recorded if isinstance(event, Lost)) == victims
    assert [event.workers for event in recorded if isinstance(event, Roster)][-1] == survivors
    # What they recorded has come home, from the other host, too; the last half second of one that is killed has not.
    assert {event.rank for event in recorded if isinstance(event, Join)} >= set(survivors)
    assert sorted(event.rank for event in recorded if isinstance(event, Leave)) == survivors
    for rank in survivors:
        assert sum(isinstance(event, Compute) and event.rank == rank for event in recorded) == 60
    streams = [path for path in (tmp_path / "run").rglob("*.jsonl") if path.parent.parent != tmp_path / "run"]
    assert {int(path.stem) for path in streams if path.stem.isdecimal()} <= set(victims)


def test_a_host_that_is_cut_off_is_given_up_and_does_not_go_on_by_itself(tmp_path: Path) -> None:
    launch = Launch(strategy="all-reduce", elastic=True, timeouts=Timeouts(barrier=3.0, join=20.0))
    mark = tmp_path / "begun"
    with hosts(3) as made, Spread(paced, made, 1, 60, str(mark), launch=launch, folder=tmp_path / "run") as team:
        for rank in range(3):
            wait_until(Path(f"{mark}-{rank}").exists, 40, f"the first steps of rank {rank}")
        made[2].cable(False)
        results = team.results(60)
        recorded = team.events()
    assert results[0][1] == results[1][1]
    assert isinstance(results[2], Failure)
    assert results[2].kind in ("TeamTimeout", "WorkerLost")
    assert f"rank 0 on {made[0].address}" in results[2].message
    long = [event for event in recorded if isinstance(event, Wait) and event.seconds > 2.5]
    assert {event.rank for event in long} == {0, 1}
    assert {event.on for event in long} == {2}, "nobody but the lost one was waited for"
