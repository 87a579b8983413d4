"""`paceline simulate` answers in numbers, or in one sentence."""

import json

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli import quantities
from paceline.cli.main import assemble
from paceline.errors import UsageError


def simulate(arguments: str) -> str:
    outcome = CliRunner().invoke(assemble(None), ["simulate", *arguments.split()], catch_exceptions=False)
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
        ("--slow 1:-2", "RANK:FACTOR"),
        ("--compute -1", "is not a distribution of seconds"),
        ("--compute exp(-1)", "is not a distribution of seconds"),
        ("--compute exp(0)", "is not a distribution of seconds"),
        ("--compute 1e400", "more seconds than can be simulated"),
        ("--compute exp(1e308)", "more seconds than can be simulated"),
        ("--compute pareto(1,0.001)", "would never end"),
        ("--compute lognormal(1,1e6)", "would never end"),
        ("--failures 1s,1e300s", "at most 1e"),
        ("--workers 99999999999999", "at most 1,000,000"),
        ("--updates 99999999999999", "at most 10,000,000"),
        ("--strategy k-batch-async:k=1000 --workers 1000 --updates 9999999", "simulate fewer updates"),
        ("--batch 0", "at least 1"),
        ("--latency soon", "--latency is 'soon'"),
        ("--latency -1ms", "--latency is '-1ms'"),
        ("--bandwidth 0", "must be above 0"),
        ("--bandwidth 1Gbit", "--bandwidth is '1Gbit'"),
        ("--size many", "--size is 'many'"),
        ("--link 9:1ms,1GB/s", "a rank from 0 to 3"),
        ("--link 1:1ms", "RANK:LATENCY,BANDWIDTH"),
        ("--spells 4", "FACTOR,EVERY,LASTING"),
        ("--spells 0.5,1s,1s", "factor of at least 1"),
        ("--failures 1h", "EVERY,RESTART"),
        ("--failures 0,1s", "above 0"),
        ("--servers nowhere", "servers is 'nowhere'"),
        ("--compress zip", "compress is 'zip'"),
        ("--per-machine 0", "at least 1"),
        ("--cores 0", "there must be at least 1"),
        ("--overlap 2", "below 1"),
        ("--goal 0.5", "--goal needs --from"),
        ("--from nowhere", "there is no run at nowhere"),
        ("--strategy pipeline:stages=3", "one each"),
        ("--strategy mesh:data=3", "the product"),
    ],
)
def test_what_cannot_be_simulated_is_one_sentence(arguments: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as refused:
        typer.main.get_command(assemble(None)).main(["simulate", *arguments.split()], standalone_mode=False)
    assert "\n" not in str(refused.value)


def test_links_and_servers_are_described_in_units() -> None:
    words = "-s sync -s all-reduce:topology=ring -w 4 --compute 1 --size 100MB --bandwidth 1Gbit/s --latency 1ms"
    told = json.loads(simulate(f"{words} --updates 50 --theory --json"))
    for one in told:
        assert one["seconds_per_update"] == pytest.approx(one["theory"]["seconds_per_update"])
    assert told[0]["seconds_per_update"] == pytest.approx(1 + 0.002 + 8 * 0.8)
    assert told[0]["traffic"]["server_in"] == [50 * 4 * 100e6]


def test_cores_are_shared_by_the_workers_of_a_machine() -> None:
    assert json.loads(simulate("-s sync -w 4 --compute 1 --cores 2 --updates 9 --json"))["seconds_per_update"] == 2.0
    told = json.loads(simulate("-s sync -w 4 --compute 1 --cores 2 --per-machine 2 --updates 9 --json"))
    assert told["seconds_per_update"] == 1.0


def test_trouble_is_described_in_units() -> None:
    words = "-s async -w 4 --compute 0.1 --spells 4,10s,500ms --failures 1min,2s --updates 4000 --seed 3 --json"
    told = json.loads(simulate(words))
    assert told["failures"] > 3
    assert told["seconds_per_update"] > 0.1 / 4


def test_who_is_never_used_is_said_in_words() -> None:
    assert "no gradient of rank 2 is ever used" in simulate("-s k-sync:k=2 -w 3 --compute 1 --slow 2:5 --updates 20")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2", 2.0), ("3ms", 0.003), ("50us", 5e-5), ("50 µs", 5e-5), ("1.5h", 5400.0), ("2min", 120.0)],
)
def test_times_have_units(text: str, seconds: float) -> None:
    assert quantities.seconds("x", text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1Gbit/s", 125e6), ("10 Mbit/s", 1.25e6), ("12.5GB/s", 12.5e9), ("1e9", 1e9), ("1MiB/s", 2.0**20)],
)
def test_rates_have_units(text: str, value: float) -> None:
    assert quantities.rate("x", text) == pytest.approx(value)
