"""A plan names what suits a cluster, says why, and gives the line to run."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.main import assemble
from paceline.config import check_workers, parse_strategy
from paceline.config.distributions import Constant, Exponential
from paceline.errors import UsageError
from paceline.events import Metric
from paceline.graph.costs import Cost
from paceline.graph.model_profile import ModelProfile
from paceline.planner import choose
from paceline.planner.candidates import Candidate, candidates
from paceline.planner.choose import best_policy, rank, simplest, worth
from paceline.planner.learn import learn
from paceline.policies import Policy
from paceline.simulate import predict
from paceline.simulate.cluster import SimulatedCluster
from paceline.simulate.convergence import Convergence, ObservedRun, fit
from paceline.simulate.predict import simulate
from paceline.simulate.replica import Model
from paceline.topologies import Link


@pytest.fixture
def at_a_glance(monkeypatch: pytest.MonkeyPatch) -> None:
    """What could turn out to be the best is looked at again, but not for longer."""
    monkeypatch.setattr(choose, "_STEPS", choose._GLANCE)


def learned(gain: float, penalty: float, noise: float = 0.0) -> Convergence:
    """Fitted to losses that fall just so."""

    def run(gradients: float, staleness: float) -> ObservedRun:
        versions = np.linspace(0, 400, 60)
        x = versions * gradients**gain / (1 + penalty * staleness)
        losses = 0.1 + noise / gradients + 2.0 / (1 + x / 50)
        return ObservedRun(versions, losses, 0.002 * np.ones_like(losses), gradients, staleness)

    return fit([run(1.0, 0.0), run(1.0, 3.0), run(4.0, 0.0), run(2.0, 1.0)])


def best(cluster: SimulatedCluster, convergence: Convergence, goal: float = 0.5) -> str:
    found = simplest(rank(cluster, convergence=convergence, goal=goal))
    assert found is not None
    return found.strategy


def test_even_workers_whose_gradients_add_up_go_together() -> None:
    even = SimulatedCluster(workers=4, compute=Constant(0.1))
    assert best(even, learned(gain=0.95, penalty=1.0)) in ("all-reduce", "sync")


def test_where_staleness_costs_nothing_nobody_waits() -> None:
    jitter = SimulatedCluster(workers=4, compute=Exponential(0.05, 0.05))
    assert best(jitter, learned(gain=0.05, penalty=0.001)) == "async"


def test_steps_without_memory_lose_nothing_when_they_are_cancelled() -> None:
    # As many updates as async makes, and none of them stale.
    memoryless = SimulatedCluster(workers=4, compute=Exponential(0.1))
    assert best(memoryless, learned(gain=0.05, penalty=0.3)) == "k-sync:k=1"


@pytest.mark.usefixtures("at_a_glance")
def test_a_straggler_is_left_out_where_staleness_hurts() -> None:
    straggler = SimulatedCluster(workers=4, compute=Exponential(0.002, 0.03), factors=(1.0, 1.0, 10.0, 1.0))
    choices = rank(straggler, convergence=learned(gain=0.9, penalty=3.0), goal=0.5)
    # Its small share of the work is hardly worth having: to leave it out and to give it little are about as good.
    first = {(one.strategy, one.balance) for one in choices[:3]}
    assert first == {("k-sync:k=3", False), ("k-batch-sync:k=3", False), ("all-reduce", True)}
    assert [one.strategy for one in choices].index("sync") > 8


def test_jitter_wants_minibatches_from_whomever() -> None:
    jitter = SimulatedCluster(workers=8, compute=Exponential(0.1))
    choices = rank(jitter, convergence=learned(gain=0.9, penalty=0.3), goal=0.5)
    assert choices[0].strategy.startswith(("k-batch", "k-sync", "k-async"))
    assert choices[0].gain is not None
    assert choices[0].gain > 1.3


def test_throughput_is_best_where_nobody_waits() -> None:
    jitter = SimulatedCluster(workers=4, compute=Exponential(0.1), batch=16)
    choices = rank(jitter)
    assert choices[0].waiting < 0.01
    assert choices[0].samples_per_second == pytest.approx(640, rel=0.05)
    assert [one.score for one in choices] == sorted(one.score or 0.0 for one in choices)


@pytest.mark.usefixtures("at_a_glance")
def test_of_equals_the_simplest_is_named() -> None:
    even = SimulatedCluster(workers=4, compute=Constant(0.1))
    assert simplest(rank(even)) is not None
    assert simplest(rank(even)).strategy == "all-reduce"  # type: ignore[union-attr]


def test_what_travels_over_narrow_links_is_spread() -> None:
    narrow = SimulatedCluster(workers=8, compute=Constant(0.1), size=100e6, link=Link(1e-4, 125e6))
    choices = rank(narrow, among=[one for one in candidates(narrow) if one.strategy.startswith(("all-reduce", "sync"))])
    shown = {(one.strategy, one.servers): one.seconds_per_update for one in choices}
    assert shown["sync", "all"] < shown["sync", "2"] < shown["sync", "1"]
    assert any(one.strategy.startswith("all-reduce:topology=") and not one.runnable for one in choices)


def test_smaller_batches_for_slow_workers_are_considered() -> None:
    uneven = SimulatedCluster(workers=4, compute=Constant(0.1), factors=(1.0, 1.0, 1.0, 4.0))
    among = [one for one in candidates(uneven) if one.strategy == "all-reduce"]
    balanced = next(one for one in rank(uneven, among=among) if one.balance)
    # The three and a quarter that they are together.
    assert balanced.seconds_per_update == pytest.approx(0.1 * 4 / 3.25, rel=0.01)
    assert "smaller batches" in balanced.reason


@pytest.mark.usefixtures("at_a_glance")
def test_a_limit_of_memory_leaves_things_out() -> None:
    on = SimulatedCluster(workers=4, compute=Exponential(0.1), size=1e9)
    among = [Candidate(strategy) for strategy in ("all-reduce", "sync", "async", "k-sync:k=2", "ssp:s=3")]
    everything = rank(on, among=among)
    most, least = max(one.memory for one in everything), min(one.memory for one in everything)
    assert least == 6e9
    assert most > least
    assert {one.memory for one in rank(on, among=among, memory=6.5e9)} == {6e9}
    with pytest.raises(UsageError, match="nothing fits into 1 MB"):
        rank(on, among=among, memory=1e6)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6, 8, 16, 64])
def test_every_candidate_can_be_followed(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "_STEPS", 20)
    factors = (2.0,) + (1.0,) * (workers - 1)
    on = SimulatedCluster(workers=workers, compute=Constant(0.1), factors=factors, size=1.0, link=Link(0, 1e6))
    found = candidates(on, split=True)
    assert len({(one.strategy, one.servers, one.balance) for one in found}) == len(found) < 80
    for one in found:
        strategy = parse_strategy(one.strategy)
        if one.runnable:
            check_workers(parse_strategy(one.strategy), workers)
        if isinstance(strategy, Policy):
            strategy.for_workers(range(workers))
        simulate(one.strategy, on, updates=2)


def test_a_split_model_is_known_by_its_operations() -> None:
    # Twelve linear layers, of which the last four take as long as the others together.
    costs = [Cost(1e-3, 2e-3, 1000, 10)] * 8 + [Cost(2e-3, 4e-3, 1000, 10)] * 4
    sheet = ModelProfile(
        names=[f"layer{number}" for number in range(12)],
        kinds=["Linear"] * 12,
        inputs=[[number - 1] for number in range(12)],
        costs=costs,
        cuts=list(range(1, 12)),
        crossing=[[number - 1] for number in range(12)],
        batch=64,
        microbatch=8,
    )
    model, cuts = learn(sheet, 8)
    assert (model.layers, model.activations) == (3, 8000.0)
    assert model.forward == pytest.approx(1 / 3)
    assert cuts[2].before == ["layer8"]
    assert cuts[2].spoken == "cut before 'layer8' (stages 50% / 50%)"
    assert sorted(cuts) == [2, 4, 8]


def test_a_pipeline_is_as_slow_as_its_longest_stage() -> None:
    on, spec = SimulatedCluster(workers=2, compute=Constant(0.1)), "pipeline:stages=2,microbatches=50"
    models = (Model(), Model(stages={2: (1.5, 0.5)}))
    even, uneven = (simulate(spec, on, updates=2, model=one)[0].seconds_per_update for one in models)
    assert uneven / even == pytest.approx(1.5, rel=0.03)


def test_a_goal_needs_something_to_go_by() -> None:
    with pytest.raises(UsageError, match="needs runs"):
        rank(SimulatedCluster(), goal=0.5)


# -- what a server does by itself ------------------------------------------------------------------------------------


def steps(*means: float, count: int = 12, jitter: float = 0.05) -> dict[int, list[float]]:
    source = np.random.default_rng(0)
    return {rank: (mean * (1 + jitter * source.standard_normal(count))).tolist() for rank, mean in enumerate(means)}


@pytest.mark.usefixtures("at_a_glance")
def test_a_server_chooses_by_the_steps_that_it_saw() -> None:
    straggler = best_policy(steps(0.1, 0.1, 0.1, 1.0), 0.001)
    assert straggler.strategy in ("async", "k-async:k=2", "k-async:k=3", "k-batch-async:k=2", "k-batch-async:k=3")
    assert "worker 3 takes 1" in straggler.reason
    two = best_policy(steps(0.1, 0.1), 0.001)
    assert isinstance(parse_strategy(two.strategy), Policy)


def test_more_gradients_are_worth_more_and_old_ones_less() -> None:
    assert worth(1, 0) == 1.0
    assert worth(8, 0) > worth(4, 0) > worth(4, 3) > worth(1, 3)


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two recorded runs, as `plan` would make them, that report a loss."""
    folders = []
    on = SimulatedCluster(workers=4, compute=Exponential(0.01, 0.03), factors=(1.0, 1.0, 1.0, 3.0), batch=8)
    for strategy in ("async", "sync"):
        told, trace = simulate(strategy, on, updates=600, trace=True)
        assert trace is not None
        gradients = 1.0 if strategy == "async" else 4.0
        for version in range(0, 600, 4):
            loss = 0.2 + 2.0 / (1 + version * gradients**0.5 / (1 + 0.05 * told.staleness.mean) / 40)
            trace.events.append(Metric(0, version * told.seconds_per_update, version, {"loss": loss}))
        folders.append(tmp_path_factory.mktemp(strategy))
        trace.write(folders[-1], {})
    return folders


def invoke(*words: str) -> str:
    outcome = CliRunner().invoke(assemble(None), ["plan", *words], catch_exceptions=False)
    assert outcome.exit_code == 0
    return outcome.stdout


@pytest.mark.usefixtures("at_a_glance")
def test_it_prints_a_ranking_and_the_line_to_run(runs: list[Path]) -> None:
    told = invoke("--from", str(runs[0]), "--from", str(runs[1]), "--goal", "loss=0.4")
    uneven = re.search(r"persistently uneven: worker 3 × ([\d.]+);", told)
    assert uneven is not None
    assert float(uneven[1]) == pytest.approx(3.0, rel=0.05)
    assert "seconds to a loss of 0.4" in told
    assert "paceline run SCRIPT --workers 4 --strategy" in told.splitlines()[-1]


@pytest.mark.usefixtures("at_a_glance")
def test_it_is_one_object_with_json(runs: list[Path]) -> None:
    told = json.loads(invoke("--from", str(runs[0]), "--from", str(runs[1]), "--json", "--workers", "6"))
    assert told["goal"] == "loss"
    assert told["learned"]["uneven"]["3"] == pytest.approx(3.0, rel=0.1)
    assert told["run"].startswith("paceline run SCRIPT --workers 6 --strategy " + told["strategy"])
    assert {"strategy", "score", "low", "high", "gain", "reason"} <= set(told["choices"][0])
    scores = [one["score"] for one in told["choices"] if one["score"] is not None]
    assert scores == sorted(scores)


@pytest.mark.usefixtures("at_a_glance")
def test_throughput_needs_no_loss(runs: list[Path]) -> None:
    told = json.loads(invoke("--from", str(runs[0]), "--goal", "throughput", "--json"))
    assert told["goal"] == "throughput"
    assert told["loss"] is None


@pytest.mark.usefixtures("at_a_glance")
def test_split_models_can_be_run(runs: list[Path]) -> None:
    told = json.loads(invoke("--from", str(runs[0]), "--goal", "throughput", "--split", "--json"))
    split = [one for one in told["choices"] if one["strategy"].startswith(("pipeline", "tensor", "mesh"))]
    assert {one["strategy"].partition(":")[0] for one in split} == {"pipeline", "tensor", "mesh"}
    assert all(one["runnable"] for one in split)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "give either a script"),
        (["--from", "nowhere"], "there is no run at nowhere"),
        (["nothing.py"], "there is no script at nothing.py"),
        (["nothing.py", "--from", "x"], "give either a script"),
        (["nothing.py", "--seconds", "0"], "above 0"),
        (["nothing.py", "--goal", "soon"], "--goal is 'soon'"),
        (["nothing.py", "--goal", "loss=low"], "loss=NUMBER"),
        (["nothing.py", "--memory", "much"], "--memory is 'much'"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as refused:
        typer.main.get_command(assemble(None)).main(["plan", *words], standalone_mode=False)
    assert "\n" not in str(refused.value)


@pytest.mark.usefixtures("at_a_glance")
def test_a_loss_that_nothing_reaches_is_said_to_be(runs: list[Path]) -> None:
    words = ["plan", "--from", str(runs[0]), "--from", str(runs[1]), "--goal", "loss=-5"]
    with pytest.raises(UsageError, match="no strategy reaches"):
        typer.main.get_command(assemble(None)).main(words, standalone_mode=False)
