"""Scripts of the kinds that people write train in a team as in one process, or are refused in one sentence."""

from __future__ import annotations

import pytest
from zoo.cells import COUPLING, plain, run_cell
from zoo.random_cases import check_cases
from zoo.scripts import SCRIPTS
from zoo.table import COUPLED, KNOWN, REFUSED, columns_in_ci, expected, run_row


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_strategy_does_with_it_what_the_table_says(script: str) -> None:
    row = run_row(script, columns_in_ci(script))
    unlike = {column: cell for column, cell in row.items() if cell.kind != expected(script, column)}
    assert not unlike
    for column, cell in row.items():
        said = any(COUPLING in line for line in cell.said)
        assert not said or (script in COUPLED and column not in ("pipeline", "tensor"))
        if cell.kind == "refused":
            assert "\n" not in cell.text
            assert len(cell.text) > 40  # what is wrong, and what to do


def test_the_table_speaks_of_scripts_that_there_are() -> None:
    assert {name for name, _ in KNOWN} | set(REFUSED) <= set(SCRIPTS)


WIDER = {"all-reduce": 3, "sync": 4, "mesh:data=2,tensor=2": 4, "pipeline:stages=3,microbatches=2": 3, "mesh:data=3": 3}


@pytest.mark.parametrize("strategy", WIDER)
@pytest.mark.parametrize(
    "script", ["resnet", "class weights", "gpt with loader", "vae", "accumulation with rest", "resumed"]
)
def test_more_workers_train_as_one_process(script: str, strategy: str) -> None:
    cell = run_cell(SCRIPTS[script], strategy, plain(SCRIPTS[script]), WIDER[strategy])
    assert cell.kind == "equal", cell.text


def test_random_models_losses_and_loops_train_as_in_one_process() -> None:
    assert not check_cases(range(25))
