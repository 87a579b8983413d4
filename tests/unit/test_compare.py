"""The winner of a comparison: by the time to the loss that all runs reach, else by throughput."""

from typing import Any

from paceline.report.compare import compare


def run(name: str, rate: float | None, losses: list[float], every: float = 1.0) -> dict[str, Any]:
    seconds = [every * number for number in range(len(losses))]
    curve = {"seconds": seconds, "updates": seconds, "values": losses}
    return {"name": name, "samples_per_second": rate, "curves": {"metrics": {"loss": curve} if losses else {}}}


def test_the_loss_that_all_reach_decides() -> None:
    quick = run("async", 900.0, [4.0, 3.0, 2.5, 2.0, 1.9], 1.0)
    good = run("sync", 300.0, [4.0, 2.0, 1.0, 0.5], 1.5)
    found = compare([quick, good])
    assert found["winner"] == 1 and found["level"] == 1.9 and found["seconds_to_loss"] == [4.0, 3.0]
    assert found["sentence"] == (
        "sync is the quickest, 1.33 times as quick as the next, async, to the loss of 1.9, which all runs reach: "
        "3 s, against 4 s."
    )


def test_without_a_loss_throughput_decides() -> None:
    found = compare([run("a", 100.0, []), run("b", 150.0, []), run("c", 120.0, [3.0, 1.0])])
    assert found["winner"] == 1 and found["sentence"].startswith(
        "b is the quickest, 1.25 times as quick as the next, c,"
    )
    assert "150 samples per second, against 120" in found["sentence"]


def test_runs_that_are_equal_are_not_ranked() -> None:
    assert compare([run("a", 100.0, []), run("b", 101.0, [])])["sentence"].startswith("b and a are equally quick")


def test_where_nothing_is_known_nothing_is_said() -> None:
    assert compare([run("a", None, []), run("b", None, [])]) == {
        "winner": None,
        "sentence": "",
        "seconds_to_loss": None,
        "level": None,
    }


def test_a_loss_that_one_run_has_from_the_start_decides_nothing() -> None:
    rising = run("a", 100.0, [1.0, 2.0, 3.0])
    falling = run("b", 50.0, [9.0, 5.0, 4.0])
    assert compare([rising, falling])["seconds_to_loss"] is None
