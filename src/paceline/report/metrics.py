"""The facts of a run as Prometheus metrics; the names are stable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class _Facts(Collector):
    def __init__(self, facts: dict[str, Any]) -> None:
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        facts, workers = self._facts, self._facts["workers"]
        yield GaugeMetricFamily("paceline_up", "1 while the run goes on.", 0 if facts.get("over") else 1)
        yield CounterMetricFamily("paceline_updates", "Updates of the parameters.", facts["updates"])
        yield GaugeMetricFamily(
            "paceline_samples_per_second", "From the first update to the last.", facts["samples_per_second"] or 0.0
        )
        for name, words in (
            ("minibatches", "Gradients computed."),
            ("samples", "Samples computed on."),
            ("cancelled", "Cancelled steps."),
        ):
            yield _by_worker(CounterMetricFamily(f"paceline_{name}", words, labels=["worker"]), workers, name)
        yield _by_worker(
            GaugeMetricFamily("paceline_pace_seconds", "Own seconds per minibatch.", labels=["worker"]), workers, "pace"
        )
        spent = CounterMetricFamily("paceline_seconds", "Seconds of a worker by activity.", labels=["worker", "kind"])
        blame = CounterMetricFamily(
            "paceline_waited_for_seconds",
            "Seconds that the team waited for a worker, by cause.",
            labels=["worker", "cause"],
        )
        moved = CounterMetricFamily("paceline_bytes", "Bytes read, pushed, saved, sent.", labels=["worker", "how"])
        for worker in workers:
            for family, key in ((spent, "seconds"), (blame, "causes"), (moved, "bytes")):
                for label, value in worker[key].items():
                    # The remaining time can shrink while a step is incomplete, so it is no counter.
                    if (key, label) != ("seconds", "elsewhere"):
                        family.add_metric([str(worker["rank"]), label], value)
        yield spent
        yield blame
        yield moved
        yield _staleness(facts["staleness"]["histogram"])
        last = GaugeMetricFamily("paceline_metric", "The last value that the script reported.", labels=["name"])
        for name, value in facts["last"].items():
            last.add_metric([name], value)
        yield last


def _by_worker(family: Any, workers: list[dict[str, Any]], key: str) -> Metric:
    for worker in workers:
        family.add_metric([str(worker["rank"])], worker[key] or 0.0)
    result: Metric = family
    return result


def _staleness(histogram: dict[int, int]) -> Metric:
    buckets: list[tuple[str, float]] = []
    total, weighted, limit = 0, 0, 0
    for age in sorted(histogram):
        while age > limit:  # 0, 1, 2, 4, 8, …
            buckets.append((str(limit), total))
            limit = max(1, 2 * limit)
        total += histogram[age]
        weighted += age * histogram[age]
    buckets += [(str(limit), total), ("+Inf", total)]
    family = HistogramMetricFamily("paceline_staleness", "Staleness of pushed gradients, in updates.")
    family.add_metric([], buckets, sum_value=weighted)
    return family


def collector(facts: dict[str, Any]) -> Collector:
    """The metrics, as Prometheus's client takes them."""
    return _Facts(facts)


def metrics(facts: dict[str, Any]) -> bytes:
    """The text of the metrics endpoint."""
    text: bytes = generate_latest(_Facts(facts))
    return text
