"""Relays that are killed and come back; `benchmarks/faults.py` draws many more such runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.faulted import Case
from helpers.faulted_hosts import HOST_SCENARIOS, run_on_hosts

from paceline.failpoints import parse_faults


@pytest.mark.parametrize(
    ("strategy", "servers", "faults"),
    [
        ("async", "each", "relay1/relay.chunk:9:kill"),
        ("sync", "1", "relay0/relay.taken:17:kill,relay1/relay.answer:9:kill"),
        ("k-batch-async:k=2", "each", "relay0/relay.stored:11:kill"),
    ],
)
def test_a_relay_that_is_killed_comes_back_and_nothing_is_lost_or_doubled(
    strategy: str, servers: str, faults: str, tmp_path: Path
) -> None:
    case = Case("relay killed", 0, strategy, ("--servers", servers), tuple(parse_faults(faults)), 0.0, 1)
    verdict = run_on_hosts(case, tmp_path)
    assert verdict.fired == faults.split(",")
    assert verdict.code == 0, verdict.said
    assert (verdict.lost, verdict.doubled) == (0, 0)
    assert verdict.wrong == []


def test_a_seed_is_always_the_same_run_on_hosts() -> None:
    for scenario in HOST_SCENARIOS:
        assert [scenario.case(seed) for seed in range(30)] == [scenario.case(seed) for seed in range(30)]
