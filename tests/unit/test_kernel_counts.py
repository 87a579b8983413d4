"""What the kernel counts of a thread: over spans of some milliseconds, all of them, and without much cost."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from paceline.events import Compute
from paceline.events.kernel import KernelCounts, KernelMeter
from paceline.report.reasons import REASONS, ReasonTimes
from paceline.report.rows import KERNEL


def counted(meter: KernelMeter) -> KernelCounts:
    found = meter.counts()
    assert found is not None
    return found


def test_short_steps_share_a_span_and_none_of_their_time_is_lost() -> None:
    meter, began = KernelMeter(), time.perf_counter()
    meter.begin()
    ready = time.perf_counter()
    spans, read = [], 1
    while len(spans) < 3:
        found = meter.counts()
        read += 1
        if found is not None:
            spans.append(found.seconds)
    end = time.perf_counter()
    assert read > 10, "not every call reads"
    assert end - ready - 0.004 <= sum(spans) <= end - began
    assert all(seconds >= 0.0039 for seconds in spans)


def test_a_span_has_the_seconds_on_a_core_those_of_garbage_collection_and_the_rest_is_sleep() -> None:
    meter = KernelMeter()
    time.sleep(0.005)
    meter.begin()
    time.sleep(0.05)
    slept = counted(meter)
    assert slept.seconds >= 0.05 > slept.running + slept.queued and slept.voluntary >= 1
    own = time.thread_time()
    while time.thread_time() - own < 0.02:
        pass
    busy = counted(meter)
    assert 0.019 < busy.running <= busy.seconds
    began = time.perf_counter()
    while time.perf_counter() - began < 0.02:
        gc.collect()
    took = time.perf_counter() - began
    assert 0.5 * took < counted(meter).collecting <= took


def _from_two_threads() -> list[KernelCounts | None]:
    """The counts that another thread is told: the first since another one's reading, the second since its own."""
    meter, found = KernelMeter(), list[KernelCounts | None]()
    meter.begin()

    def elsewhere() -> None:
        time.sleep(0.005)
        found.append(meter.counts())
        meter.begin()
        time.sleep(0.005)
        found.append(meter.counts())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    return found


def _open() -> tuple[int, int]:
    return len(list(Path("/proc/self/fd").iterdir())), len(gc.callbacks)


def test_another_thread_begins_anew_and_nothing_stays_behind() -> None:
    before = _open()
    first, second = _from_two_threads()
    assert first is None and second is not None
    assert _open() == before


def row(**counts: float) -> list[float]:
    return [counts.get(name, 0.0) for name in KERNEL]


@pytest.mark.parametrize(
    ("counts", "reasons"),
    [
        ({"seconds": 1.0, "running": 1.0}, {}),
        ({"seconds": 1.0, "running": 0.6, "queued": 0.4}, {"queued": 0.4}),
        ({"seconds": 1.0, "running": 1.0, "collecting": 0.3}, {"collecting": 0.3}),
        ({"seconds": 1.0, "running": 0.2, "queued": 0.1}, {"queued": 0.1, "blocked": 0.7}),
        ({"seconds": 1.0, "running": 0.5, "system": 0.2, "major": 3}, {"reading": 0.7}),
        ({"seconds": 1.0, "running": 0.5, "system": 0.2, "read": 4096}, {"reading": 0.7}),
        ({"seconds": 1.0, "running": 1.0, "system": 0.5, "faults": 60_000}, {"mapping": 0.5}),
        ({"seconds": 1.0, "running": 1.0, "system": 0.5, "faults": 1}, {"mapping": 1e-5}),
    ],
)
def test_counts_become_seconds_by_reason(counts: dict[str, float], reasons: dict[str, float]) -> None:
    found = ReasonTimes().add(np.array([row(**counts)]), np.array([1.0]))[0]
    assert dict(zip(REASONS, found, strict=True)) == pytest.approx(dict.fromkeys(REASONS, 0.0) | reasons)


def test_steps_without_counts_belong_to_the_next_that_has_some_in_whatever_blocks() -> None:
    own = np.full(7, 0.1)
    counts = np.array([row(), row(), row(seconds=0.3, running=0.1), row(), row(seconds=0.2, running=0.2), row(), row()])
    whole = ReasonTimes().add(counts, own)
    times = ReasonTimes()
    parts = np.concatenate([times.add(counts[n : n + 1], own[n : n + 1]) for n in range(7)])
    assert whole[:, list(REASONS).index("blocked")] == pytest.approx([0, 0, 0.2, 0, 0, 0, 0])
    assert whole == pytest.approx(parts)


def test_a_step_in_the_record_has_only_the_counts_that_are_not_zero() -> None:
    step = Compute(0, 1.0, 0.1, 0, 1, 8, kernel=KernelCounts(seconds=0.1, running=0.1))
    assert msgspec.json.decode(msgspec.json.encode(step))["kernel"] == {"seconds": 0.1, "running": 0.1}
