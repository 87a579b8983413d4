"""All-reduce over machines that goes on with whoever is left: a worker dies, a machine dies, at any moment."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hosts import hosts
from helpers.load import allowed
from helpers.machines import Failure, Spread
from helpers.support import wait_until
from helpers.teams import run_spread
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.collectives.inter_machine import InterMachineReduce
from paceline.config import Launch, Timeouts
from paceline.events import Compute, Join, Leave, Lost, Roster, Update, Wait
from paceline.parameters.exchange_lanes import ExchangeLanes
from paceline.parameters.sharding import ShardedOptimizer
from paceline.transport import BarrierKind, elastic_barrier
from paceline.transport.barrier import SLOT
from paceline.transport.peer_connections import FrameKind

SAMPLES, BATCH, AT = 97, 4, 5
MOMENTS = ["before", "overlap", "exchange", "inside", "after"]
"""Before the update that makes version AT + 1; when its first bucket leaves, before all have come; in the exchange
after that; in its optimizer; at its end."""
TABLES = [f"{kind}:{told}" for kind in ("UPDATE", "PUBLISH") for told in ("", "1", "2")]
"""The hub dies at a barrier of that update when it has sent the notes of all to this rank alone, or to none."""


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
    """Let this worker be killed at a moment of the update that follows version AT, or some updates later."""
    when, _, later = when.partition("+")
    last = AT + int(later or 0)

    def at_last(real: Any, second: bool = False) -> Any:
        calls = 0

        def instead(*arguments: Any) -> Any:
            nonlocal calls
            calls += trainer.version == last
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
        ExchangeLanes.confirm = at_last(ExchangeLanes.confirm)  # type: ignore[method-assign]
    if when == "overlap":
        InterMachineReduce.all_reduce = at_last(InterMachineReduce.all_reduce)  # type: ignore[method-assign]
    if when == "inside":
        ShardedOptimizer.update = at_last(ShardedOptimizer.update, second=True)  # type: ignore[method-assign]
    if when == "after":
        meet = trainer._barrier.wait

        def late(intent: BarrierKind, length: int = 0) -> BarrierKind:
            if intent is BarrierKind.PUBLISH and trainer.version == last:
                _die()
            found: BarrierKind = meet(intent, length)
            return found

        trainer._barrier.wait = late
    if when == "follow":
        trainer._barrier._follow_next = _die
    if ":" in when:
        kind, told = when.split(":")
        barrier = trainer._barrier
        pack = elastic_barrier.pack_notes

        def packed(number: int, last_rank: int, ranks: Any, slots: Any, departed: Any) -> Any:
            table = pack(number, last_rank, ranks, slots, departed)
            if trainer.version == last and SLOT.unpack_from(slots[0])[0] == BarrierKind[kind]:
                if told:
                    barrier._star.connections[int(told)].send(FrameKind.TABLE, b"".join(table))
                _die()
            return table

        elastic_barrier.pack_notes = packed


def work(
    team: Any, victims: dict[int, str], clip: bool = False, epochs: int = 2, late: float = 0.0, reduction: str = "mean"
) -> dict[str, Any]:
    """late: seconds by which the hub comes later than others to the update in which one is lost."""
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
            if when == "overlap" and trainer.version == AT:
                time.sleep(60.0)  # in which a thread exchanges what the backward pass has announced
            if trainer.version == AT and team.rank == 0:
                time.sleep(late)
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


def rounds_of(workers: int, victims: set[int], counted: bool, epochs: int = 2, at: int = AT) -> list[list[int]]:
    """Which samples make which update when these are lost at one."""
    rounds: list[list[int]] = []
    size = BATCH * workers
    for _ in range(epochs):
        order, left = list(range(SAMPLES)), []
        while order:
            if len(order) < size:  # what the lost ones had goes with what is left
                order, left = order + left, []
            keys, order = order[:size], order[size:]
            if len(rounds) == at and not counted:
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


def _silenced(team: Any, victim: int, when: str, late: float, notes: str) -> dict[str, Any]:
    """A worker is stopped; where its machine has no other worker, the lead wakes it when all is done."""
    global _how
    _how = signal.SIGSTOP
    pid = Path(notes, "pid")
    if team.rank == victim:
        pid.write_text(str(os.getpid()))
    found = work(team, {victim: when}, late=late)
    if team.is_lead:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid.read_text()), signal.SIGCONT)
    return found


@pytest.mark.parametrize(
    ("places", "victim", "when", "late"),
    [
        ("ABB", 1, "inside", 0.0),
        ("ABC", 2, "before", 2.5),  # the others do not give up a hub that waits
        ("AAB", 0, "inside", 0.0),
        ("ABC", 0, "before", 0.0),
    ],
)
def test_a_silent_worker_is_evicted_and_its_waking_changes_nothing(
    places: str, victim: int, when: str, late: float, tmp_path: Path
) -> None:
    launch = Launch(strategy="all-reduce", elastic=True, timeouts=Timeouts(barrier=4.0, join=20.0))
    results = run_spread(_silenced, places, victim, when, late, str(tmp_path), launch=launch, may_die=[victim])
    lost = results.pop(victim)
    well(results)
    expected = rounds_of(3, {victim}, places != "ABC")
    assert results[0]["version"] == len(expected)
    assert same(results[0]["values"], plain(expected))
    # Where another worker shares its memory, that one has ended it.
    assert ("ended without a word" in lost) == (places != "ABC"), lost
    assert ("WorkerLost" in lost) == (places == "ABC"), lost
    assert ("1 of the run's 3 machines: only a majority goes on" in lost) == (places == "ABC"), lost


CASES = [(places, victim, when) for places, victim in (("ABB", 1), ("ABC", 2)) for when in MOMENTS]
CASES += [("ABC", 0, when) for when in MOMENTS + TABLES] + [("AAB", 0, "before"), ("AAB", 0, "PUBLISH:2")]
CASES += [
    ("AAB", 1, "exchange"),
    ("AAB", 1, "after"),
    ("ABB", 2, "inside"),
    ("AAB", 2, "exchange"),
    ("AAB", 1, "overlap"),
]


@pytest.mark.parametrize(("places", "victim", "when"), CASES)
def test_the_others_go_on_as_a_smaller_team_would(places: str, victim: int, when: str) -> None:
    ends = spread(places, {victim: when})
    well(ends)
    # A gradient that lies in the memory of a machine where somebody is left still counts.
    counted = when not in ("before", "overlap") and places.count(places[victim]) > 1
    # If one of the others knows from the lost hub that the update was complete, it was lost in the next one.
    later = when in TABLES[-2:]
    expected = rounds_of(3, {victim}, counted and not later, at=AT + later)
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
    ends = spread("ABCD", {1: "before", 0: "exchange+1", 3: "after+3"})
    well(ends)
    assert sorted(ends[0]["seen"][1]) == list(range(SAMPLES))


def test_the_next_hub_is_lost_as_it_takes_over() -> None:
    ends = spread("ABCDE", {0: "before", 1: "follow"})
    well(ends)
    assert sorted(key for end in ends for key in end["seen"][1]) == list(range(SAMPLES))


def test_a_minority_does_not_go_on() -> None:
    launch = Launch(strategy="all-reduce", elastic=True, timeouts=Timeouts(barrier=20.0, join=20.0))
    results = run_spread(_ending, "ABC", {1: "exchange", 2: "exchange"}, launch=launch, may_die=[1, 2])
    kind, message, ranks = results[0]
    assert (kind, ranks) == ("WorkerLost", [1, 2])
    assert "reaches 1 of the run's 3 machines: only a majority goes on" in message


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


def test_of_two_machines_the_one_without_rank_0_does_not_go_on() -> None:
    launch = Launch(strategy="all-reduce", elastic=True, timeouts=Timeouts(barrier=20.0, join=20.0))
    results = run_spread(_ending, "ABB", {0: "before"}, launch=launch, may_die=[0])
    for kind, message, ranks in results[1:]:
        assert kind == "WorkerLost"
        assert message.startswith("rank 1 on 127.0.0.1 has lost rank 0 on 127.0.0.1, and reaches 1 of the run's 2")
        assert ranks == [0]


def _ending(team: Any, victims: dict[int, str]) -> Any:
    try:
        work(team, victims)
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


@pytest.mark.parametrize("victim", [2, 0])
def test_a_host_that_is_cut_off_is_given_up_and_does_not_go_on_by_itself(victim: int, tmp_path: Path) -> None:
    launch = Launch(strategy="all-reduce", elastic=True, timeouts=Timeouts(barrier=5.0, join=20.0))
    mark, folder = tmp_path / "begun", tmp_path / "run"
    with hosts(3) as made, Spread(paced, made, 1, 60, str(mark), launch=launch, folder=folder) as team:
        for rank in range(3):
            wait_until(Path(f"{mark}-{rank}").exists, 40, f"the first steps of rank {rank}")
        made[victim].cable(False)
        results = team.results(60)
        if not victim:  # the record of those who went on is on the machine of the new lead
            team.folder = folder / "machine-1"
        recorded = team.events()
    lead, other = (0, 1) if victim else (1, 2)
    assert results[lead][1] == results[other][1]
    assert isinstance(results[victim], Failure)
    assert results[victim].kind == "WorkerLost"
    assert "reaches 1 of the run's 3 machines: only a majority goes on" in results[victim].message
    for rank in (lead, other):
        assert sum(isinstance(event, Compute) and event.rank == rank for event in recorded) == 60
    # Empty if the cable was pulled during an exchange: then most of the time was waited there.
    long = [event for event in recorded if isinstance(event, Wait) and event.seconds > 2.5]
    assert {event.on for event in long} <= {victim}, "nobody but the lost one was waited for"
    starts = sorted(event.start for event in recorded if isinstance(event, Update))
    gap = max(after - before for before, after in itertools.pairwise(starts))
    assert 4.0 < gap < 5.0 + allowed(3.0)  # the timeout and a little
