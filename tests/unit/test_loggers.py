"""Loggers are given the run's values, and what becomes of one hurts nothing else."""

from __future__ import annotations

import importlib
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.gateway import gateway
from helpers.load import allowed
from helpers.preloaded import Preloaded
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.errors import UsageError
from paceline.events import Compute, Event, Join, Leave, Lost, Metric, Push, Roster, Setup, Update, Wait
from paceline.events.scalars import RunScalars, Values
from paceline.loggers import LOGGERS, Logger, logger_class, parse_loggers
from paceline.loggers.delivery import Delivery, finish_all
from paceline.loggers.process import Logging, check_gateway
from paceline.report.aggregate import RunAggregate
from paceline.report.facts import facts
from paceline.report.push import MetricsPush

VALUES = [Values(1, 1000.0, {"loss": 2.0, "a odd|name": 1.0}), Values(3, 1001.5, {"loss": math.nan})]
CONFIG = {"strategy": "k-sync:k=2", "world_size": 2, "optimizer.lr": 0.1, "arguments": ["--a", "b|c"]}


def joined(*ranks: int) -> list[Event]:
    return [Join(rank, 0.0, 1, "host", "cpu", "sync", 500.0) for rank in ranks]


# -- values ----------------------------------------------------------------------------------------------------------


def test_the_lead_s_metrics_are_logged_at_their_version_and_time() -> None:
    scalars = RunScalars()
    events = [*joined(0, 1), Metric(1, 1.0, 4, {"loss": 9.0}), Metric(0, 2.5, 4, {"loss": 2.0, "lr": 0.1})]
    assert scalars.add(events) == [Values(4, 502.5, {"loss": 2.0, "lr": 0.1})]


def test_a_value_that_is_not_finite_is_logged_as_such() -> None:
    ((_, _, values),) = RunScalars().add([*joined(0), Metric(0, 1.0, 1, {"loss": None})])
    assert math.isnan(values["loss"])


@pytest.mark.parametrize("loss", [Lost(0, 2.0), Roster(1, 2.0, [1, 2], 5)])
def test_after_the_lead_is_lost_the_lowest_rank_left_is_the_lead(loss: Event) -> None:
    scalars = RunScalars()
    scalars.add([*joined(0, 1, 2), loss])
    assert scalars.add([Metric(2, 3.0, 6, {"loss": 1.0}), Metric(1, 3.0, 6, {"loss": 3.0})])[0].values == {"loss": 3.0}


def test_the_run_s_own_values_are_those_of_a_window() -> None:
    scalars = RunScalars()
    events = joined(0, 1)
    for number in range(40):
        start = 0.1 * number
        events += [Compute(rank, start, 0.06, number, 1, 8) for rank in (0, 1)]
        events += [Wait(0, start + 0.06, 0.02, 1)]
        events += [Update(rank, start + 0.08, 0.01, number + 1, 64, 2) for rank in (0, 1)]
    assert scalars.add(events) == []
    first, *rest = scalars.settle(2.0)
    assert rest == [] and first.version == 20 and first.wall == 502.0
    assert first.values == pytest.approx(
        {
            "paceline/updates": 20,
            "paceline/updates_per_second": 10.0,
            "paceline/samples_per_second": 160.0,
            "paceline/staleness": 0.0,
            "paceline/waiting": 0.1,
        }
    )
    (last,) = scalars.settle()
    assert last.version == 40
    assert last.values["paceline/updates_per_second"] == pytest.approx(20 / 1.99)


def test_with_a_server_samples_and_staleness_are_those_of_used_pushes() -> None:
    scalars = RunScalars()
    outcomes = [("used", 0), ("held", 3), ("dropped", 9)]
    events = [*joined(0), Compute(0, 0.0, 1.0, 0, 1, 1000)]
    events += [Push(0, 0.5, ticket, 0, age, 10, [], 1, 0, how, "") for ticket, (how, age) in enumerate(outcomes)]
    scalars.add(events)
    ((_, _, values),) = scalars.settle()
    assert values["paceline/samples_per_second"] == 20.0
    assert values["paceline/staleness"] == 1.5


def test_an_event_that_comes_too_late_for_its_window_counts_in_the_next() -> None:
    scalars = RunScalars()
    scalars.add([*joined(0), Compute(0, 0.0, 1.0, 0, 1, 8)])
    assert len(scalars.settle(2.0)) == 1
    scalars.add([Compute(0, 0.5, 0.5, 0, 1, 8), Compute(0, 2.0, 1.0, 0, 1, 8)])
    (later,) = scalars.settle()
    assert later.values["paceline/samples_per_second"] == 16.0


def test_the_configuration_is_that_of_the_setup() -> None:
    scalars = RunScalars()
    scalars.add([*joined(0, 1), Setup(0, 1.0, "Net", 22, "SGD", {"lr": 0.1}, None, 2), Leave(0, 2.0)])
    assert scalars.config == {
        "strategy": "sync",
        "world_size": 2,
        "model": "Net",
        "parameters": 22,
        "optimizer": "SGD",
        "optimizer.lr": 0.1,
    }


# -- the registry ----------------------------------------------------------------------------------------------------


def test_every_logger_of_the_registry_has_its_name() -> None:
    assert [logger_class(name).NAME for name in LOGGERS] == list(LOGGERS)
    assert parse_loggers(" tensorboard, mlflow,tensorboard") == parse_loggers(["tensorboard", "mlflow"])
    assert parse_loggers(None) == []


def test_unknown_loggers_and_those_that_are_not_installed_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UsageError, match=r"^--log is 'tensorbord'; it must be one of 'tensorboard', 'wandb', 'mlflow'$"
    ):
        parse_loggers("tensorbord")
    monkeypatch.setattr(logger_class("wandb"), "MODULE", "not_installed_here")
    with pytest.raises(UsageError, match=r"^the logger wandb needs the package wandb: pip install wandb$"):
        parse_loggers("tensorboard,wandb")


@pytest.mark.parametrize("url", ["gateway:9091", "ftp://gateway", "http://", ""])
def test_a_gateway_that_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="must be a Pushgateway's address"):
        check_gateway(url)


# -- each logger -----------------------------------------------------------------------------------------------------


def logged(name: str, folder: Path) -> None:
    logger = logger_class(name)(folder)
    logger.configure(CONFIG)
    logger.log(VALUES[:1])
    logger.log(VALUES[1:])
    logger.close()


def test_tensorboard_has_values_and_configuration(tmp_path: Path) -> None:
    logged("tensorboard", tmp_path)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    first, second = board.Scalars("loss")
    assert (first.step, first.value, first.wall_time) == (1, 2.0, 1000.0)
    assert second.step == 3 and math.isnan(second.value)
    (text,) = board.Tensors("paceline/config")[0].tensor_proto.string_val
    assert b"| strategy | k-sync:k=2 |" in text and b"b\\|c" in text


def test_mlflow_has_values_and_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tmp_path.joinpath("mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "tests")
    (tmp_path / "first").mkdir()
    with Preloaded("mlflow") as process:  # forks of other tests need not have it
        found = process.call(logged_by_mlflow, tmp_path / "first")
    assert found["run"] == ("first", "FINISHED")
    assert found["params"] == {name: str(value) for name, value in CONFIG.items()}
    first, second = found["loss"]
    assert first == (1, 2.0, 1_000_000)
    assert second[0] == 3 and math.isnan(second[1])
    assert found["other"] == 1.0


def logged_by_mlflow(folder: Path) -> dict[str, Any]:
    logged("mlflow", folder)
    client: Any = importlib.import_module("mlflow").MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    return {
        "run": (run.info.run_name, run.info.status),
        "params": dict(run.data.params),
        "loss": [(one.step, one.value, one.timestamp) for one in client.get_metric_history(run.info.run_id, "loss")],
        "other": client.get_metric_history(run.info.run_id, "a odd_name")[0].value,
    }


def test_wandb_has_values_and_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with Preloaded("wandb") as process:
        process.call(logged, "wandb", tmp_path)
    (path,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = path.read_bytes()
    for text in (b"k-sync:k=2", b"optimizer.lr", b"loss", b"version", b"a odd|name"):
        assert text in content


# -- delivery --------------------------------------------------------------------------------------------------------


class Kept(Logger):
    """Keeps what it is given; may fail, or wait."""

    NAME = MODULE = PACKAGE = "kept"
    fails_at = ""
    taken: list[Any]
    gate: threading.Event | None = None

    def __init__(self, folder: Path) -> None:
        self._do("start", folder.name)

    def _do(self, what: str, value: Any) -> None:
        if self.gate is not None:
            self.gate.wait()
        if self.fails_at == what:
            raise OSError(f"no {what}\nand more")
        self.taken.append(value)

    def configure(self, config: dict[str, Any]) -> None:
        self._do("configure", config)

    def log(self, values: Sequence[Values]) -> None:
        self._do("log", list(values))

    def close(self) -> None:
        self._do("close", "closed")


def kept(**options: Any) -> type[Kept]:
    return type("Kept", (Kept,), {"taken": [], **options})


def test_a_logger_gets_everything_in_order() -> None:
    kind, said = kept(), list[str]()
    delivery = Delivery(kind, Path("first"), said.append)
    delivery.configure(CONFIG)
    delivery.log(VALUES[:1])
    delivery.log([])
    delivery.log(VALUES[1:])
    assert finish_all([delivery], allowed(10.0), said.append, "again")
    assert kind.taken == ["first", CONFIG, VALUES[:1], VALUES[1:], "closed"]
    assert said == []


@pytest.mark.parametrize("where", ["start", "configure", "log", "close"])
def test_a_logger_that_fails_is_named_once_and_the_others_go_on(where: str) -> None:
    bad, good, said = kept(fails_at=where), kept(), list[str]()
    deliveries = [Delivery(kind, Path("first"), said.append) for kind in (bad, good)]
    for delivery in deliveries:
        delivery.configure(CONFIG)
        for one in VALUES:
            delivery.log([one])
    assert finish_all(deliveries, allowed(10.0), said.append, "again")
    assert said == [f"logging to kept stops: no {where}; the training goes on, and the run's events stay"]
    assert good.taken[-1] == "closed" and len(good.taken) == 5


def test_a_logger_that_does_not_end_is_waited_for_only_so_long() -> None:
    gate, said = threading.Event(), list[str]()
    delivery = Delivery(kept(gate=gate), Path("first"), said.append)
    delivery.log(VALUES)
    assert not finish_all([delivery], 0.1, said.append, "paceline log runs/first --to kept")
    assert said == [
        "kept did not take all values within 0.1 s; to log them again: paceline log runs/first --to kept",
    ]
    gate.set()
    assert delivery.finish(allowed(10.0))


# -- Prometheus ------------------------------------------------------------------------------------------------------


def told() -> dict[str, Any]:
    run = RunAggregate()
    run.feed([*joined(0), Compute(0, 1.0, 0.5, 0, 1, 8), Update(0, 1.5, 0.1, 1), Metric(0, 1.6, 1, {"loss": 2.0})])
    run.advance()
    return facts(run, name="first", config={}, notes=[], pictures=False)


def test_metrics_are_pushed_under_the_run_s_name() -> None:
    said: list[str] = []
    with gateway() as (url, pushed):
        push = MetricsPush(url, "first", said.append)
        push.push(told())
        push.push(told() | {"over": True}, last=True)
        push.finish(allowed(10.0))
    assert said == [] and pushed
    assert pushed[-1].path == "/metrics/job/paceline/run/first"
    assert pushed[-1].kind.startswith("text/plain")
    assert "paceline_up 0.0" in pushed[-1].body and 'paceline_metric{name="loss"} 2.0' in pushed[-1].body


def test_a_gateway_that_does_not_answer_is_named_once() -> None:
    said: list[str] = []
    push = MetricsPush("http://127.0.0.1:9", "first", said.append)
    push.push(told())
    push.push(told(), last=True)
    push.finish(allowed(20.0))
    (sentence,) = said
    assert sentence.startswith("metrics cannot be pushed to http://127.0.0.1:9: ")


def test_what_to_log_to_is_passed_on_as_options() -> None:
    assert Logging(["wandb", "mlflow"], "http://a").arguments == ["--to", "wandb,mlflow", "--push-metrics", "http://a"]
    assert Logging().arguments == []
