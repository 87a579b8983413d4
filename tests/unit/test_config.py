import math
import statistics

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import config, policies
from paceline.config import (
    AllReduce,
    Launch,
    Pipeline,
    Place,
    Slowness,
    Strategy,
    Timeouts,
    check_workers,
    one_of,
    parse_slowness,
    parse_strategy,
    positive,
    workers_of,
)
from paceline.errors import UsageError


class Pack(Strategy):
    spec = "pack"
    riders: int
    gap: float = 0.5
    early: bool = False
    shape: str = "line"


@pytest.fixture(autouse=True)
def with_a_strategy_that_has_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(config.STRATEGIES, "pack", f"{__name__}:Pack")


# -- strategies ------------------------------------------------------------------------------------------------------


def test_a_name_alone_is_a_strategy() -> None:
    assert parse_strategy("all-reduce") == AllReduce()


def test_a_strategy_stays_what_it_is() -> None:
    strategy = Pack(riders=3)
    assert parse_strategy(strategy) is strategy


def test_options_take_the_types_of_their_attributes() -> None:
    strategy = parse_strategy("pack:riders=4,gap=0.25,early=true,shape=echelon")
    assert strategy == Pack(riders=4, gap=0.25, early=True, shape="echelon")


@pytest.mark.parametrize(
    "strategy",
    [AllReduce(), Pack(riders=1), Pack(riders=7, gap=1e-3), Pack(riders=2, early=True, shape="echelon")],
)
def test_what_a_strategy_says_of_itself_is_its_spec(strategy: Strategy) -> None:
    assert parse_strategy(str(strategy)) == strategy


def test_a_spec_leaves_out_what_is_default() -> None:
    assert str(AllReduce()) == "all-reduce"
    assert str(Pack(riders=3)) == "pack:riders=3"


@pytest.mark.parametrize("name", ["ring", "", "All-Reduce", "all-reduce "])
def test_an_unknown_strategy_is_answered_with_those_there_are(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_strategy(name)
    message = str(caught.value)
    assert f"'{name}'" in message
    assert all(f"'{known}'" in message for known in config.STRATEGIES)


def test_an_unknown_option_is_answered_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="'pack' has no option 'wheels'; it takes 'riders', 'gap', 'early' or 'shape'"):
        parse_strategy("pack:riders=2,wheels=3")
    with pytest.raises(UsageError, match="'all-reduce' has no option 'k'; it takes 'topology'"):
        parse_strategy("all-reduce:k=3")
    with pytest.raises(UsageError, match="'sync' has no option 'k'; it takes 'servers', "):
        parse_strategy("sync:k=3")


def test_a_topology_is_one_of_those_there_are() -> None:
    assert str(parse_strategy("all-reduce:topology=ring")) == "all-reduce:topology=ring"
    assert str(parse_strategy("all-reduce:topology=auto")) == "all-reduce"
    with pytest.raises(UsageError, match="'topology' of strategy 'all-reduce' is 'star'; it must be 'auto', 'ring', "):
        parse_strategy("all-reduce:topology=star")


@pytest.mark.parametrize("spec", ["pack:riders", "pack:riders=", "pack:gap=1,riders="])
def test_an_option_without_a_value_is_answered_with_how_to_write_it(spec: str) -> None:
    with pytest.raises(UsageError, match="option 'riders' of strategy 'pack' has no value; write riders=VALUE"):
        parse_strategy(spec)


@pytest.mark.parametrize(
    ("spec", "option", "value", "allowed"),
    [
        ("pack:riders=many", "riders", "many", "a whole number"),
        ("pack:riders=1.5", "riders", "1.5", "a whole number"),
        ("pack:riders=1,gap=x", "gap", "x", "a number"),
        ("k-sync:k=most", "k", "most", "a whole number"),
        ("k-batch-sync:k=2.5", "k", "2.5", "a whole number"),
        ("k-async:k=ten", "k", "ten", "a whole number"),
        ("k-batch-async:k=true", "k", "true", "a whole number"),
        ("ssp:s=+", "s", "+", "a whole number"),
        ("groups:size=two", "size", "two", "a whole number"),
        ("groups:size=2,staleness=old", "staleness", "old", "a whole number"),
        ("adaptive:start=k", "start", "k", "a whole number"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(spec: str, option: str, value: str, allowed: str) -> None:
    name = spec.partition(":")[0]
    with pytest.raises(UsageError) as caught:
        parse_strategy(spec)
    assert str(caught.value) == f"option '{option}' of strategy '{name}' is '{value}'; it must be {allowed}"


@pytest.mark.parametrize(
    ("spec", "option"),
    [
        ("pack:gap=1", "riders"),
        ("k-sync", "k"),
        ("k-batch-sync:", "k"),
        ("k-async", "k"),
        ("k-batch-async", "k"),
        ("ssp", "s"),
        ("groups", "size"),
        ("groups:between=async", "size"),
    ],
)
def test_an_option_that_is_missing_is_named(spec: str, option: str) -> None:
    name = spec.partition(":")[0]
    with pytest.raises(UsageError) as caught:
        parse_strategy(spec)
    assert str(caught.value) == f"strategy '{name}' needs the option '{option}'; write {name}:{option}=NUMBER"


@pytest.mark.parametrize(
    ("spec", "allowed"),
    [
        ("sync:k=2", ""),
        ("async:s=2", ""),
        ("k-sync:s=2", "'k', "),
        ("k-batch-sync:n=2", "'k', "),
        ("k-async:K=2", "'k', "),
        ("k-batch-async:size=2", "'k', "),
        ("ssp:k=2", "'s', "),
        ("groups:size=2,k=2", "'size', 'between', 'staleness', "),
        ("adaptive:k=2", "'of', 'start', "),
    ],
)
def test_an_option_that_a_policy_does_not_have_is_answered_with_those_it_has(spec: str, allowed: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_strategy(spec)
    assert str(caught.value).startswith(f"strategy '{spec.partition(':')[0]}' has no option ")
    assert str(caught.value).endswith(f"it takes {allowed}'servers', 'corrections' or 'compress'")


@pytest.mark.parametrize(
    ("spec", "strategy"),
    [
        ("sync", policies.Sync()),
        ("k-sync:k=3", policies.KSync(k=3)),
        ("k-batch-sync:k=2", policies.KBatchSync(k=2)),
        ("async", policies.Async()),
        ("k-async:k=1", policies.KAsync(k=1)),
        ("k-batch-async:k=12", policies.KBatchAsync(k=12)),
        ("ssp:s=0", policies.Ssp(s=0)),
        ("groups:size=2", policies.Groups(size=2)),
        ("groups:size=2,between=k-sync:k=2", policies.Groups(size=2, between="k-sync:k=2")),
        ("groups:size=4,between=ssp:s=1,staleness=3", policies.Groups(size=4, between="ssp:s=1", staleness=3)),
        ("groups:size=4,staleness=0", policies.Groups(size=4, staleness=0)),
        ("adaptive", policies.Adaptive()),
        ("adaptive:of=k-sync,start=2", policies.Adaptive(of="k-sync", start=2)),
    ],
)
def test_every_policy_is_a_strategy_and_its_spec_leads_back_to_it(spec: str, strategy: Strategy) -> None:
    assert parse_strategy(spec) == strategy
    assert str(strategy) == spec


def test_a_policy_between_groups_may_have_several_options() -> None:
    groups = policies.Groups(size=2, between="adaptive:of=k-sync,start=2")
    assert parse_strategy(str(groups)) == groups


def test_what_is_default_may_be_written_out() -> None:
    assert parse_strategy("groups:size=2,between=async") == parse_strategy("groups:size=2")
    assert parse_strategy("adaptive:of=k-async,start=1") == parse_strategy("adaptive")


def test_a_strategy_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="'pack:riders=1' cannot be changed; make another Pack"):
        Pack(riders=1).riders = 2
    with pytest.raises(AttributeError):
        Pack(riders=1).wheels = 2  # type: ignore[attr-defined]


def test_strategies_compare_by_their_options_and_can_be_keys() -> None:
    assert policies.KSync(k=2) == policies.KSync(k=2) != policies.KSync(k=3)
    assert policies.KSync(k=2) != policies.KAsync(k=2)
    assert {policies.KSync(k=2): "yes"}[policies.KSync(k=2)] == "yes"


@pytest.mark.parametrize(
    ("strategy", "spec"),
    [
        (config.Mesh(data=2, sync=policies.KSync(k=1)), "mesh:data=2,sync=k-sync:k=1"),
        (config.Mesh(data=2), "mesh:data=2"),
        (policies.Groups(size=2, between=policies.KAsync(k=2)), "groups:size=2,between=k-async:k=2"),
        (policies.Adaptive(of=policies.KSync), "adaptive:of=k-sync"),
        (
            config.Mesh(data=4, sync=policies.Groups(size=2, between=policies.Adaptive(start=2), staleness=3)),
            "mesh:data=4,sync=groups:size=2,between=adaptive:start=2,staleness=3",
        ),
        (policies.KSync(k=3, servers=2, compress="int8"), "k-sync:k=3,servers=2,compress=int8"),
        (policies.Async(servers="0:1,2:1"), "async:servers=0:1,2:1"),
        (
            policies.Async(corrections=["drop:above=8", "distance:c=1e+5,max=3"], servers="lead"),
            "async:servers=lead,corrections=drop:above=8+distance:c=1e+5,max=3",
        ),
        (
            config.Tensor(degree=2, plan={"blocks.*.up": "column", "head": "replicated"}, sequence_parallel=True),
            "tensor:degree=2,plan=blocks.*.up:column+head:replicated,sequence_parallel=True",
        ),
    ],
)
def test_strategies_nest_as_values_and_as_text(strategy: Strategy, spec: str) -> None:
    assert str(strategy) == spec
    assert parse_strategy(spec) == strategy


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("groups:size=2,between=ring", "option 'between' of strategy 'groups': unknown strategy 'ring'"),
        ("groups:size=2,between=all-reduce", "option 'between' of .* 'all-reduce': it is no policy of a parameter"),
        ("groups:size=2,between=groups:size=1", "option 'between' of strategy 'groups' is 'groups:size=1'; it must be"),
        ("groups:size=2,between=k-sync", "option 'between' of .*: strategy 'k-sync' needs the option 'k'"),
        ("groups:size=2,between=async:servers=2", "option 'between' of .* 'servers' is an option of the groups"),
        ("adaptive:of=sync", "option 'of' of strategy 'adaptive' is 'sync'; it must be one of 'k-sync', 'k-async'"),
        ("adaptive:of=mesh", "option 'of' of strategy 'adaptive' is 'mesh'; it must be one of 'k-sync', 'k-async'"),
        ("mesh:data=2,sync=ring", "unknown strategy 'ring'"),
        ("k-sync:k=2,servers=none", "servers is 'none'; it must be a number of processes"),
        ("k-sync:k=2,compress=zip", "compress is 'zip'; it must be 'none', "),
        ("k-sync:k=2,corrections=hope", "unknown correction 'hope'"),
        ("all-reduce:servers=2", "'all-reduce' has no option 'servers'; it takes 'topology'"),
        ("pipeline:stages=2,compress=int8", "'pipeline' has no option 'compress'"),
        ("mesh:data=2,plan=up:column", "option 'plan' of strategy 'mesh' is about layers that are split"),
        ("tensor:degree=2,plan=up", "option 'plan' of strategy 'tensor' is 'up'; write PATTERN:ROLE"),
    ],
)
def test_an_option_that_cannot_be_is_refused_where_it_is_written(spec: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_strategy(spec)


# -- workers that share a stage --------------------------------------------------------------------------------------


def test_a_stage_has_one_worker_unless_said_otherwise() -> None:
    assert Pipeline(stages=3).by_stage == (1, 1, 1)
    assert not Pipeline(stages=3).shared and not Pipeline(stages=2, workers="1+1").shared
    shared = parse_strategy("pipeline:stages=2,workers=1+2")
    assert isinstance(shared, Pipeline) and shared.shared and shared.by_stage == (1, 2)
    assert str(shared) == "pipeline:stages=2,workers=1+2"
    assert parse_strategy(str(shared)) == shared
    assert workers_of(shared) == 3


@pytest.mark.parametrize("workers", ["2", "1+2+1", "1+0", "1+-1", "1+x", "1+", "+", "1.5+1", "1 + 2", "01+1"])
def test_workers_are_a_number_for_each_stage(workers: str) -> None:
    with pytest.raises(UsageError, match=r"it must be how many workers each of the 2 stages has, .* as in 1\+2$"):
        parse_strategy(f"pipeline:stages=2,workers={workers}")


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble", "zero-bubble-2p"])
def test_a_stage_is_shared_only_under_schedules_that_let_it(schedule: str) -> None:
    words = f"under the schedule '{schedule}' a stage has one worker; several share one under 'gpipe' or '1f1b'"
    with pytest.raises(UsageError, match=words):
        parse_strategy(f"pipeline:stages=2,schedule={schedule},workers=1+2")
    parse_strategy(f"pipeline:stages=2,schedule={schedule},workers=1+1")


def test_there_is_a_microbatch_for_everybody() -> None:
    with pytest.raises(UsageError, match="3 workers cannot share 2 microbatches; write microbatches=3 or more"):
        parse_strategy("pipeline:stages=2,microbatches=2,workers=1+3")


def test_workers_of_the_stages_add_up_to_the_team() -> None:
    strategy = parse_strategy("pipeline:stages=2,workers=1+2")
    check_workers(strategy, 3)
    with pytest.raises(UsageError, match="needs 3 workers, the sum of its option 'workers'; this team has 4: start 3"):
        check_workers(strategy, 4)


# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["join", "barrier", "notice", "stop"])
@pytest.mark.parametrize("seconds", [0, -1.0])
def test_a_timeout_that_is_not_positive_is_refused_where_it_is_read(field: str, seconds: float) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({field: seconds}, Timeouts)


# -- slowness --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "slow"),
    [
        ("1:4", {1: Slowness(factor=4.0)}),
        ("0:1", {0: Slowness(factor=1.0)}),
        ("2:1.5", {2: Slowness(factor=1.5)}),
        ("0:2e1", {0: Slowness(factor=20.0)}),
        ("all:exp(0.1)", dict.fromkeys(range(3), Slowness(length="exp(0.1)"))),
        ("all:0.05+exp(0.05)", dict.fromkeys(range(3), Slowness(length="0.05+exp(0.05)"))),
        ("2:pareto(0.02,2.5)", {2: Slowness(length="pareto(0.02,2.5)")}),
        (" 2 : pareto( 0.02, 2.5 ) ", {2: Slowness(length="pareto(0.02,2.5)")}),
        ("1:1e-3+exp(.5)", {1: Slowness(length="1e-3+exp(.5)")}),
        ("1:constant(0.05)", {1: Slowness(length="constant(0.05)")}),
        ("1:gamma(2,0.01)@backward", {1: Slowness(length="gamma(2,0.01)", where="backward")}),
        ("0:lognormal(0.02,0.5)", {0: Slowness(length="lognormal(0.02,0.5)")}),
    ],
)
def test_every_form_of_slowness_is_understood(spec: str, slow: dict[int, Slowness]) -> None:
    assert parse_slowness([spec], 3) == slow


def test_nobody_is_slow_unless_asked() -> None:
    assert parse_slowness([], 4) == {}


def test_a_later_word_about_a_worker_wins() -> None:
    slow = parse_slowness(["1:2", "all:3", "0:4", "0:5"], 2)
    assert slow == {0: Slowness(factor=5.0), 1: Slowness(factor=3.0)}


@pytest.mark.parametrize("who", ["3", "-1", "one", "", "1.0", "ALL", "0,1"])
def test_a_rank_that_is_not_there_is_named_with_those_that_are(who: str) -> None:
    with pytest.raises(UsageError, match="is not a rank from 0 to 2, nor 'all'") as caught:
        parse_slowness([f"{who}:2"], 3)
    assert f"'{who}'" in str(caught.value)


@pytest.mark.parametrize(
    "what",
    [
        "0.5",
        "0",
        "0.999",
        "-2",
        "",
        "x",
        "nan",
        "inf",
        "1e999",
        "exp(0)",
        "exp()",
        "exp(-1)",
        "exp(1e999)",
        "1+exp",
        "0.1+pareto(1,2)",
        "pareto(1)",
        "pareto(0,2)",
        "pareto(1,0)",
        "pareto(1,2",
        "4x",
    ],
)
def test_a_slowness_that_cannot_be_is_answered_with_the_allowed_forms(what: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_slowness([f"0:{what}"], 1)
    message = str(caught.value)
    assert f"'{what}'" in message
    assert all(form in message for form in ("factor of at least 1", "exp(MEAN)", "SHIFT+exp(MEAN)", "pareto("))


slownesses = st.one_of(
    st.builds(Slowness, factor=st.floats(1, 50)),
    st.builds(lambda a, b: Slowness(length=f"{a:.6f}+exp({b:.6f})"), st.floats(0, 2), st.floats(0.001, 2)),
    st.builds(lambda a, b: Slowness(length=f"pareto({a:.6f},{b:.6f})"), st.floats(0.001, 2), st.floats(0.5, 5)),
)


@given(slownesses, st.floats(0, 10), st.integers(0, 1000))
def test_a_slow_step_never_lasts_less_than_its_computing(slow: Slowness, computing: float, seed: int) -> None:
    source = np.random.default_rng(seed)
    assert all(slow.seconds(computing, source) >= computing for _ in range(5))


@given(st.floats(1, 50), st.floats(0, 10))
def test_a_factor_multiplies_computing(factor: float, computing: float) -> None:
    assert Slowness(factor=factor).seconds(computing, np.random.default_rng(0)) == factor * computing


@pytest.mark.parametrize(
    ("slow", "least", "mean", "deviation"),
    [
        (Slowness(length="exp(0.1)"), 0.0, 0.1, 0.1),
        (Slowness(length="0.05+exp(0.05)"), 0.05, 0.1, 0.05),
        (Slowness(length="pareto(0.02,4)"), 0.02, 0.02 * 4 / 3, 0.02 * (4 / (9 * 2)) ** 0.5),
        (Slowness(length="pareto(0.5,3)"), 0.5, 0.75, 0.5 * (3 / 4) ** 0.5),
        (Slowness(length="gamma(4,0.02)"), 0.0, 0.08, 0.04),
        (
            Slowness(length="lognormal(0.1,0.5)"),
            0.0,
            0.1 * math.exp(0.125),
            0.1 * (math.exp(0.5) - math.exp(0.25)) ** 0.5,
        ),
        (Slowness(length="constant(0.3)"), 0.3, 0.3, 1e-9),
    ],
)
def test_drawn_steps_are_as_long_as_theory_says(slow: Slowness, least: float, mean: float, deviation: float) -> None:
    source = np.random.default_rng(20)
    count = 40_000
    drawn = [slow.seconds(0.0, source) for _ in range(count)]
    assert min(drawn) >= least
    assert statistics.fmean(drawn) == pytest.approx(mean, abs=5 * deviation / count**0.5)


def test_the_same_seed_draws_the_same_steps() -> None:
    slow = Slowness(length="exp(0.1)")
    one, other = np.random.default_rng((3, 1)), np.random.default_rng((3, 1))
    assert [slow.seconds(0, one) for _ in range(20)] == [slow.seconds(0, other) for _ in range(20)]


# -- environment -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "launch",
    [
        Launch(),
        Launch(
            strategy="all-reduce",
            timeouts=Timeouts(join=1.5, barrier=2.5, notice=0.5, stop=0.25),
            slow={0: Slowness(factor=2.0), 11: Slowness(length="pareto(0.1,2)")},
            seed=17,
            folder="runs/über 1",
            control=5,
        ),
    ],
)
def test_a_launch_reaches_the_workers_as_it_was(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = launch.to_environment()
    assert list(variables) == [Launch.VARIABLE]
    monkeypatch.setenv(Launch.VARIABLE, variables[Launch.VARIABLE])
    assert Launch.from_environment() == launch


def test_without_a_launcher_all_is_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(Launch.VARIABLE, raising=False)
    assert Launch.from_environment() == Launch()


PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def place(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Place:
    for name in PLACE:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return Place.from_environment()


def test_plain_python_is_a_team_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place(monkeypatch) == Place(rank=0, local_rank=0, world_size=1, local_world_size=1)


def test_a_place_is_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    found = place(monkeypatch, RANK="5", LOCAL_RANK="1", WORLD_SIZE="8", LOCAL_WORLD_SIZE="4")
    assert found == Place(rank=5, local_rank=1, world_size=8, local_world_size=4)


def test_without_local_values_all_are_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = place(monkeypatch, RANK="1", WORLD_SIZE="2")
    assert found == Place(rank=1, local_rank=1, world_size=2, local_world_size=2)


@pytest.mark.parametrize("name", PLACE)
@pytest.mark.parametrize("value", ["", "one", "-1", "1.5", " 1"])
def test_a_place_that_is_no_number_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=f"^{name} is '{value}' in the environment; it must be a whole number"):
        place(monkeypatch, **{name: value})


@pytest.mark.parametrize(("rank", "world_size"), [("2", "2"), ("7", "1"), ("0", "0")])
def test_a_rank_beyond_the_world_is_refused(rank: str, world_size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=f"RANK is {rank} and WORLD_SIZE {world_size}"):
        place(monkeypatch, RANK=rank, WORLD_SIZE=world_size)


# -- small checks ----------------------------------------------------------------------------------------------------


def test_a_choice_that_is_not_there_is_answered_with_those_that_are() -> None:
    assert one_of("gradients", "local", ("local", "visible")) == "local"
    with pytest.raises(UsageError, match="gradients is 'own'; it must be one of 'local', 'visible'"):
        one_of("gradients", "own", ("local", "visible"))


@pytest.mark.parametrize("value", [0, -3, 1.0, True, "2", None, float("inf")])
def test_what_is_not_a_whole_positive_number_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match=r"global_batch is .*; it must be a whole number of at least 1"):
        positive("global_batch", value)  # type: ignore[arg-type]
