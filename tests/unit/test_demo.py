"""The last lines of `make demo` say what its runs have measured."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from site_pages import ROOT

from paceline.config import parse_strategy
from paceline.events import Event, Metric, Update


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, speed: float, seconds: float | None) -> dict[str, object]:
    return {"name": name, "samples_per_second": speed, "seconds_to_goal": seconds}


def test_three_lines_tell_cost_winner_and_where_to_look(demo: ModuleType) -> None:
    runs = [run(demo.EVEN, 4000, 1.0), run("all-reduce", 1000, 4.25), run("async", 3000, None), run("k-sync:k=3", 3, 2)]
    cost, winner, where = demo.story(runs)
    assert (
        cost == "A worker that is 4 times slower costs all-reduce 75% of its speed: 1,000 samples/s instead of 4,000."
    )
    assert winner.startswith("First at 95% accuracy with that worker: k-sync:k=3, after 2.00 s; all-reduce: 4.25 s")
    assert "runs/demo.html" in where
    assert demo.story([run(demo.EVEN, 2, 1.0), run("all-reduce", 1, None)])[1].startswith("No strategy has reached 95%")


def test_the_time_to_the_goal_is_from_the_first_update(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events: list[Event] = [
        Metric(0, 9.0, 0, {"accuracy": 0.5}),
        Update(0, 10.0, 0.1, 1),
        Metric(0, 11.0, 1, {"loss": 1}),
    ]
    events += [Metric(0, 12.5, 2, {"accuracy": 0.96}), Metric(0, 14.0, 3, {"accuracy": 0.99})]
    monkeypatch.setattr(demo, "read", lambda _path: events)
    assert demo.seconds_to_goal(tmp_path) == 2.5
    monkeypatch.setattr(demo, "read", lambda _path: events[:3])
    assert demo.seconds_to_goal(tmp_path) is None


def test_its_strategies_exist(demo: ModuleType) -> None:
    assert len(demo.WAYS) == 12
    for way in demo.WAYS:
        parse_strategy(way.partition(", ")[0] if way.startswith("all-reduce") else way)
