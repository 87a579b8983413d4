"""Under `sync` an update has the gradients of whole batches, or the team is told why it has not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from zoo.cells import Cell, plain, run_cell
from zoo.data import alternate, step
from zoo.loops import start
from zoo.random_cases import Case, train
from zoo.scripts import SCRIPTS, Result, Script, state


def ended(train: Any, workers: int, strategy: str = "sync") -> Cell:
    """How a script ends in a team."""
    script = Script("of this test", train, "", torch.float64, 1e-7)
    SCRIPTS[script.name] = script
    try:
        return run_cell(script, strategy, plain(script), workers)
    finally:
        del SCRIPTS[script.name]


def summing(samples: int, *, clip: bool = False) -> Any:
    """A script that sums the gradients of 3 batches of 7, the rest of an epoch at its end."""
    case = Case("sync", 3, 2, 8, "tanh", "mean", "momentum", 7, samples, 3, clip, shuffle=True, drop_last=False)
    return lambda team: train(team, case)


@pytest.mark.parametrize(("samples", "clip"), [(15, False), (16, False), (15, True)])
def test_an_update_without_gradients_that_a_worker_has_summed_is_refused(samples: int, clip: bool) -> None:
    cell = ended(summing(samples, clip=clip), 3)
    assert cell.kind == "refused"
    assert "has no part of the epoch's last one" in cell.text
    assert "drop_last=True" in cell.text


def test_a_worker_that_has_no_summed_gradients_is_not_needed_for_the_last_batch() -> None:
    assert ended(summing(22), 3).kind == "equal"


def test_workers_that_are_at_different_loaders_are_named() -> None:
    cell = ended(lambda team: alternate(team, 13, 6), 2)
    assert cell.kind == "refused"
    assert "workers must" in cell.text


def test_it_is_said_that_a_worker_updates_after_the_script_of_another_has_ended(capfd: Any) -> None:
    cell = ended(lambda team: alternate(team, 13, 5), 2)
    assert "an update has no whole batch" in cell.text + capfd.readouterr().err


def careless(team: Any) -> Result:
    """One worker evaluates after an epoch by itself, with gradients, so it takes samples as if to train on them."""
    model, optimizer, loader, test = start(team)
    for _ in range(2):
        for x, y in loader:
            step(model, optimizer, F.cross_entropy(model(x), y))
        for x, _ in test if team is not None and team.rank == 1 else ():
            model(x)
    return state(model), []


def test_it_is_said_that_others_update_without_a_worker_that_is_at_a_loader_by_itself() -> None:
    cell = ended(careless, 2)
    assert cell.kind == "said", cell.text
    assert "an update has no whole batch" in cell.text


def counting_steps(team: Any) -> Result:
    """Ends after 5 of its steps, of which a worker without a part of an epoch's last batch makes fewer in an epoch."""
    model, optimizer, loader, _ = start(team, samples=17)
    steps = 0
    while steps < 5:
        for x, y in loader:
            step(model, optimizer, F.cross_entropy(model(x), y))
            steps += 1
            if steps == 5:
                break
    return state(model), []


@pytest.mark.parametrize("attempt", range(2))
def test_it_is_said_that_a_worker_trains_on_what_another_has_left(attempt: int, capfd: Any) -> None:
    cell = ended(counting_steps, 2)
    # The lead says it, or the server once the lead has gone.
    assert "an update has no whole batch" in cell.text + capfd.readouterr().err
