"""`paceline simulate` answers in numbers, or in one sentence."""

import json

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.errors import UsageError


def simulate(arguments: str) -> str:
    outcome = CliRunner().invoke(app, ["simulate", *arguments.split()], catch_exceptions=False)
    assert outcome.exit_code == 0
    return outcome.stdout


def test_one_strategy_is_one_object_with_the_promised_keys() -> None:
    told = json.loads(simulate("--strategy k-sync:k=4 --workers 8 --compute exp(1) --updates 20000 --seed 1 --json"))
    assert told["seconds_per_update"] == pytest.approx(0.635, rel=0.02)
    assert told["staleness"]["mean"] == 0.0
    assert told["updates"] == 20_000
    low, high = told["seconds_per_update_interval"]["low"], told["seconds_per_update_interval"]["high"]
    assert low < told["seconds_per_update"] < high


def test_several_strategies_are_a_list_with_the_formulas_beside() -> None:
    told = json.loads(simulate("-s async -s k-async:k=2 -w 4 --compute 1+exp(1) --updates 2000 --theory --json"))
    assert [one["strategy"] for one in told] == ["async", "k-async:k=2"]
    assert told[0]["theory"] == {"seconds_per_update": 0.5, "staleness": 3.0}
    assert told[1]["theory"] == {"seconds_per_update": None, "staleness": 1.0}


def test_people_get_a_table() -> None:
    lines = simulate("-s sync -s ssp:s=2 --workers 3 --compute 0.5 --updates 50 --slow 2:3").splitlines()
    assert lines[1].split()[:2] == ["sync", "1.5"]
    assert lines[2].split()[0] == "ssp:s=2"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--strategy k-sync:k=9 --workers 4", "k is 9"),
        ("--strategy nonsense", "nonsense"),
        ("--workers 0", "there must be at least 1"),
        ("--updates 0", "there must be at least 1"),
        ("--compute never", "is not a distribution of seconds"),
        ("--slow 9:2", "a rank from 0 to 3"),
        ("--slow 1:fast", "RANK:FACTOR"),
    ],
)
def test_what_cannot_be_simulated_is_one_sentence(arguments: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as refused:
        typer.main.get_command(app).main(["simulate", *arguments.split()], standalone_mode=False)
    assert "\n" not in str(refused.value)
