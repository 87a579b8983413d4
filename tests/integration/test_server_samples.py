"""Every sample is trained on, also in loops with several loaders, epochs left early and workers that come late."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.load import allowed
from helpers.teams import run_team
from helpers.training import BATCH, Values, apart, build, data, sgd, under, values
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from paceline import Team
from paceline.errors import Mismatch
from paceline.events import LeaseGiven, Push, read
from paceline.events.summary import merge

pytestmark = pytest.mark.usefixtures("warm")


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_an_evaluation_in_the_middle_of_an_epoch_loses_no_sample(strategy: str) -> None:
    def work(team: Team) -> tuple[list[int], list[int]]:
        model: Any = nn.Linear(1, 1)
        dataset = TensorDataset(torch.arange(40).float().unsqueeze(1))
        trained, tested = DataLoader(dataset, batch_size=4), DataLoader(dataset, batch_size=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        model, optimizer, trained, tested = team.setup(model, optimizer, trained, tested)
        seen: list[int] = []
        evaluated: list[int] = []
        for number, (x,) in enumerate(trained):
            seen += [int(value) for value in x]
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 3:
                with torch.no_grad():
                    for (z,) in tested:
                        model(z)
                        evaluated += [int(value) for value in z]
        return seen, evaluated

    results = run_team(work, 2, launch=under(strategy, barrier=30.0), timeout=40.0)
    assert sorted(itertools.chain(*(seen for seen, _ in results))) == list(range(40))
    # Under async a worker may have had fewer batches of two samples than it takes to come to the evaluation.
    assert [evaluated for _, evaluated in results] == [list(range(40)) if len(seen) >= 8 else [] for seen, _ in results]
    assert strategy == "async" or all(evaluated for _, evaluated in results)


def unhurried(team: Team, when: str) -> tuple[Values, int]:
    """Rank 1 takes its time at the end of an epoch, when the other is in the next one already."""
    model = build(seed=team.rank)
    loader = DataLoader(data(192), batch_size=BATCH)
    held_out = DataLoader(data(4), batch_size=1)
    model, optimizer, loader, held_out = team.setup(model, sgd(model.parameters()), loader, held_out)
    late = 0.2 * (team.rank == 1)
    for _ in range(3):
        for number, (x, y) in enumerate(loader):
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 3 and when != "evaluates":
                time.sleep(late)
            if number == 3 and when == "leaves":
                break
            if number == 1 and when == "evaluates":
                with torch.no_grad():
                    for z, _ in held_out:
                        model(z)
                        time.sleep(late / 4)
    trainer: Any = team._trainer
    return values(model), trainer.version


@pytest.mark.parametrize("when", ["ends", "leaves", "evaluates"])
def test_a_worker_that_comes_late_to_the_end_of_an_epoch_is_waited_for_in_the_next(when: str) -> None:
    model = build()
    optimizer = sgd(model.parameters())
    for x, y in itertools.chain(*(DataLoader(data(192), batch_size=BATCH) for _ in range(3))):
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for result, version in run_team(unhurried, 2, when, launch=under("sync", barrier=30.0), timeout=40.0):
        assert version == 12
        assert apart(result, values(model)) < 1e-12


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_two_loaders_at_once_keep_their_samples_apart(strategy: str) -> None:
    def work(team: Team) -> tuple[list[int], list[int]]:
        model: Any = nn.Linear(1, 1)
        small = DataLoader(TensorDataset(torch.arange(24).float().unsqueeze(1)), batch_size=4)
        large = DataLoader(TensorDataset(torch.arange(100, 172).float().unsqueeze(1)), batch_size=12)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        model, optimizer, small, large = team.setup(model, optimizer, small, large)
        seen: tuple[list[int], list[int]] = ([], [])
        for (x,), (z,) in zip(small, large, strict=False):
            seen[0].extend(int(value) for value in x)
            seen[1].extend(int(value) for value in z)
            (model(x).mean() + model(z).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return seen

    results = run_team(work, 2, launch=under(strategy, barrier=30.0), timeout=40.0)
    assert sorted(itertools.chain(*(first for first, _ in results))) == list(range(24))
    other = sorted(itertools.chain(*(second for _, second in results)))
    assert set(other) <= set(range(100, 172)) and len(set(other)) == len(other)


@pytest.mark.parametrize("strategy", ["sync", "async", "k-batch-async:k=2", "k-async:k=2", "k-batch-sync:k=2"])
def test_an_epoch_may_be_left_in_its_middle(strategy: str) -> None:
    """Also by a worker whose gradient the server still holds."""

    def work(team: Team) -> list[int]:
        model: Any = nn.Linear(1, 1)
        loader: Any = DataLoader(TensorDataset(torch.arange(40).float().unsqueeze(1)), batch_size=6)
        model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=1e-9), loader)
        seen: list[int] = []
        for epoch in range(3):
            for number, (x,) in enumerate(loader):
                with team.step():
                    model(x).mean().backward()
                    optimizer.step()
                    if epoch == 2:
                        seen += [int(value) for value in x]
                optimizer.zero_grad()
                if epoch < 2 and number == team.rank:
                    break
        return seen

    results = run_team(work, 3, launch=under(strategy, barrier=30.0), timeout=40.0)
    seen = sorted(itertools.chain(*results))
    assert set(seen) == set(range(40))


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_a_script_may_make_several_updates_from_one_batch(strategy: str) -> None:
    def work(team: Team) -> list[int]:
        model: Any = nn.Linear(1, 1)
        loader: Any = DataLoader(TensorDataset(torch.arange(24).float().unsqueeze(1)), batch_size=4)
        model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=1e-9), loader)
        seen: list[int] = []
        for (x,) in loader:
            seen += [int(value) for value in x]
            for _ in range(3):
                model(x).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return seen

    results = run_team(work, 2, launch=under(strategy, barrier=30.0), timeout=40.0)
    assert sorted(itertools.chain(*results)) == list(range(24))


def test_a_worker_that_comes_when_the_others_have_left_the_epoch_finds_it_over() -> None:
    def work(team: Team) -> list[list[int]]:
        model: Any = nn.Linear(1, 1)
        loader: Any = DataLoader(TensorDataset(torch.arange(8).float().unsqueeze(1)), batch_size=2)
        model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=1e-9), loader)
        seen: list[list[int]] = [[], []]
        for epoch in range(2):
            if team.rank == 1 and epoch == 0:
                team.barrier()
            for (x,) in loader:
                if team.rank == 0 and epoch == 1 and not seen[1]:
                    team.barrier()
                seen[epoch].append(int(x))
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if epoch == 0:
                    break
        return seen

    first, second = run_team(work, 2, launch=under("async", barrier=30.0), timeout=40.0)
    assert (first[0], second[0]) == ([0], [])
    assert sorted([*first[1], *second[1]]) == list(range(8))


@pytest.mark.parametrize("strategy", ["ssp:s=0", "groups:size=1,between=ssp:s=0", "k-async:k=2", "k-batch-sync:k=3"])
def test_nobody_waits_for_those_who_find_no_more_samples(strategy: str) -> None:
    def work(team: Team) -> int:
        model: Any = nn.Linear(1, 1)
        loader: Any = DataLoader(TensorDataset(torch.arange(2).float().unsqueeze(1)), batch_size=3)
        model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=1e-9), loader)
        count = 0
        for _ in range(3):
            if team.rank == 2:
                time.sleep(0.2)  # so that the others have taken all samples when it comes
            for (x,) in loader:
                count += 1
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return count

    assert sum(run_team(work, 3, launch=under(strategy, barrier=30.0), timeout=40.0)) == 6


def test_a_gradient_that_is_held_counts_also_when_its_worker_leaves_the_epoch() -> None:
    def work(team: Team) -> tuple[list[int], float]:
        model: Any = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        loader: Any = DataLoader(TensorDataset(torch.arange(8).float().unsqueeze(1)), batch_size=2)
        model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)
        seen: list[int] = []
        for (x,) in loader:
            if team.rank == 1 and not seen:
                team.barrier()
            seen.append(int(x))
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if team.rank == 0:
                break
        if team.rank == 0:
            team.barrier()
        team.barrier()
        team.close()
        return seen, float(model.weight)

    (first, weight), (second, _) = run_team(work, 2, launch=under("k-batch-async:k=2", barrier=30.0), timeout=40.0)
    assert sorted([*first, *second]) == list(range(8))
    assert weight == pytest.approx(-sum(range(8)) / 2)


def picky(team: Team, how: str) -> Values:
    """Does not train on all that it gets."""
    model = build(seed=team.rank)
    loader, held_out = DataLoader(data(44), batch_size=8), DataLoader(data(8), batch_size=4)
    model, optimizer, loader, held_out = team.setup(model, sgd(model.parameters()), loader, held_out)
    for _ in range(2):
        for number, (x, y) in enumerate(loader):
            if how == "skips" and number % 2 == team.rank:
                continue
            if how == "breaks" and number == 2 + team.rank:
                break
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        if how == "evaluates" and team.rank == 0:
            sum(float(cross_entropy(model(x), y)) for x, y in held_out)
    return values(model)


@pytest.mark.parametrize("how", ["skips", "breaks", "evaluates"])
def test_what_a_script_passes_over_has_no_weight_in_a_later_gradient(how: str, tmp_path: Path) -> None:
    launch = under("async", barrier=30.0, folder=str(tmp_path))
    run_team(picky, 2, how, launch=launch, timeout=40.0)
    merge(tmp_path, 2)
    events = list(read(tmp_path / "events.jsonl"))
    sizes = {event.number: event.samples for event in events if isinstance(event, LeaseGiven)}
    pushes = [event for event in events if isinstance(event, Push)]
    assert pushes
    assert all(len(push.leases) == 1 for push in pushes)
    assert all(push.samples == sum(sizes[number] for number in push.leases) for push in pushes)


def one_evaluates(team: Team, who: int, how: str) -> tuple[list[int], list[int]]:
    """Between epochs, one worker looks at the samples that are held out; the others know nothing of it."""
    model: Any = nn.Linear(1, 1)
    dataset = TensorDataset(torch.arange(24).float().unsqueeze(1))
    trained, tested = DataLoader(dataset, batch_size=6), DataLoader(dataset, batch_size=12, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    model, optimizer, trained, tested = team.setup(model, optimizer, trained, tested)
    seen: list[int] = []
    evaluated: list[int] = []
    for _ in range(2):
        for (x,) in trained:
            seen += [int(value) for value in x]
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if team.rank == who:
            with torch.set_grad_enabled(how == "carelessly"):
                for (z,) in tested:
                    model(z)
                    evaluated += [int(value) for value in z]
    return seen, evaluated


@pytest.mark.parametrize("how", ["without gradients", "carelessly"])
@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("strategy", ["sync", "async", "k-async:k=2"])
def test_one_worker_may_evaluate_by_itself(strategy: str, who: int, how: str) -> None:
    results = run_team(one_evaluates, 3, who, how, launch=under(strategy, barrier=8.0), timeout=30.0)
    assert sorted(itertools.chain(*(seen for seen, _ in results))) == sorted([*range(24), *range(24)])
    assert [sorted(evaluated) for _, evaluated in results] == [
        sorted([*range(24), *range(24)]) if rank == who else [] for rank in range(3)
    ]


@pytest.mark.parametrize("strategy", ["sync", "ssp:s=1", "k-async:k=2"])
def test_scripts_that_wait_for_different_things_are_told_so_at_once(strategy: str) -> None:
    def work(team: Team) -> tuple[str, float]:
        model: Any = nn.Linear(1, 1)
        loader = DataLoader(TensorDataset(torch.arange(24).float().unsqueeze(1)), batch_size=4)
        model, optimizer, loader = team.setup(model, torch.optim.SGD(model.parameters(), lr=1e-9), loader)
        start = time.monotonic()
        try:
            for (x,) in loader:
                if team.rank == 1:
                    team.barrier()
                model(x).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        except Mismatch as error:
            return str(error), time.monotonic() - start
        return "", 0.0

    for message, seconds in run_team(work, 2, launch=under(strategy, barrier=120.0), timeout=30.0):
        assert "nobody can go on" in message
        assert "rank 1 for a barrier" in message
        assert seconds < allowed(10)
