"""Runs that are hurt at drawn points lose no sample and apply none twice; `benchmarks/faults.py` draws many more."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.faulted import SCENARIOS, Case, Scenario, judge, run_bits, run_case

SEEDS = 2
"""Runs of each kind of fault."""


@pytest.mark.parametrize("place", range(SEEDS))
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name.replace(" ", "-"))
def test_a_run_that_is_hurt_trains_on_every_sample_exactly_once(scenario: Scenario, place: int, tmp_path: Path) -> None:
    seed = SCENARIOS.index(scenario) + len(SCENARIOS) * place  # another policy and another point for each
    verdict = run_case(scenario.case(seed), tmp_path)
    assert verdict.fired, f"the fault did not happen: {verdict.case}"
    assert verdict.code == 0, f"{verdict.case}: {verdict.said}"
    assert (verdict.lost, verdict.doubled) == (0, 0), verdict.case
    assert verdict.wrong == [], verdict.case


@pytest.mark.parametrize("seed", [0, 3])
def test_a_server_killed_inside_an_update_changes_no_bit(seed: int, tmp_path: Path) -> None:
    verdict = run_bits(seed, tmp_path)
    assert verdict.case.faults[0].point == "chunk.written"  # where a part of the optimizer's state must be undone
    assert verdict.fired == [str(verdict.case.faults[0])]
    assert verdict.code == 0, verdict.said
    assert verdict.wrong == [], verdict.case


def test_the_judge_finds_what_is_lost_and_what_is_doubled() -> None:
    assert judge([[2.0, 2.0, 2.0]], 2) == (0, 0)
    assert judge([[2.0, 2.0, 2.0], [1.0, 2.0, 4.0]], 2) == (1, 2)
    assert judge([], 2)[0] > 0


def test_a_seed_is_always_the_same_case() -> None:
    cases = [scenario.case(seed) for scenario in SCENARIOS for seed in range(30)]
    assert cases == [scenario.case(seed) for scenario in SCENARIOS for seed in range(30)]
    assert isinstance(cases[0], Case)
    for scenario in SCENARIOS:
        drawn = [scenario.case(seed) for seed in range(len(scenario.strategies) * len(scenario.points))]
        pairs = {(case.strategy, case.faults[0].point) for case in drawn}
        assert len(pairs) == len(scenario.strategies) * len(scenario.points), "every point under every policy"
