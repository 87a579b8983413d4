"""Sixteen kinds of slowness, each of ten seeds, are told apart in events with the noise of a busy machine."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

from paceline.events import Compute, Event, Join, Load, Update, Wait
from paceline.report import facts
from paceline.report.source import open_run

PLACES = ("loading", "forward", "backward", "elsewhere")
PATTERNS = ("persistent", "intermittent", "one-off", "rotating")
SEEDS = range(1000, 1010)
"""Others than those by which the thresholds were chosen."""
USUAL = 0.004
"""Seconds of each part of a usual step."""


@dataclasses.dataclass
class Injected:
    """A slowness that a seed draws: where, in which pattern, of which worker, and how much."""

    place: str
    pattern: str
    seed: int

    def __post_init__(self) -> None:
        self.draw = draw = np.random.default_rng((self.seed, PLACES.index(self.place), PATTERNS.index(self.pattern)))
        self.workers, self.steps = int(draw.integers(3, 9)), int(draw.integers(60, 150))
        self.victim = int(draw.integers(self.workers))
        self.period = int(draw.integers(5, 11))
        self.phase, self.once = int(draw.integers(self.period)), int(draw.integers(10, self.steps - 5))
        low, high = {"persistent": (2, 6), "intermittent": (8, 20), "one-off": (80, 200), "rotating": (8, 20)}[
            self.pattern
        ]
        self.more = USUAL * float(draw.uniform(low, high))

    def slow(self, step: int) -> int | None:
        """The worker that is slow in a step."""
        match self.pattern:
            case "intermittent" if step % self.period != self.phase:
                return None
            case "one-off" if step != self.once:
                return None
            case "rotating":
                return step % self.workers
        return self.victim

    def part(self, place: str, step: int, rank: int) -> float:
        """Seconds of a part: it varies, and now and then another process has the core."""
        seconds = USUAL * float(self.draw.lognormal(0.0, 0.12))
        if self.draw.random() < 0.01:
            seconds += float(self.draw.exponential(2 * USUAL))
        return seconds + (self.more if place == self.place and rank == self.slow(step) else 0.0)

    def events(self) -> list[Event]:
        """Of an all-reduce."""
        found: list[Event] = [Join(rank, 0.0, 1, "host", "cpu", "all-reduce", 0.0) for rank in range(self.workers)]
        clock = np.zeros(self.workers)
        for step in range(self.steps):
            came = np.zeros(self.workers)
            for rank in range(self.workers):
                parts = {place: self.part(place, step, rank) for place in PLACES}
                begin = float(clock[rank]) + parts["elsewhere"]
                found.append(Load(rank, begin, parts["loading"]))
                begin += parts["loading"]
                seconds = parts["forward"] + parts["backward"]
                found.append(Compute(rank, begin, seconds, step, 1, 8, 0.0, parts["forward"]))
                came[rank] = begin + seconds
            last = float(came.max())
            for rank in range(self.workers):
                if came[rank] < last:
                    found.append(Wait(rank, float(came[rank]), last - float(came[rank]), int(came.argmax())))
                begin = last + float(self.draw.exponential(USUAL / 20))
                found.append(Update(rank, begin, USUAL / 10, step + 1))
                clock[rank] = begin + USUAL / 10
        return found


def verdict(injected: Injected, folder: Path) -> list[tuple[str, str, list[int]]]:
    """Pattern, place and workers of what the report finds."""
    folder.mkdir()
    lines = sorted(injected.events(), key=lambda event: event.start)
    (folder / "events.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(lines))
    found = open_run(folder).facts(pictures=False)["slowness"]
    return [(one["pattern"], one["part"], one["ranks"]) for one in found]


@pytest.fixture(autouse=True)
def no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advice takes longer than all else, and is not asked for here."""
    monkeypatch.setattr(facts, "_advice", lambda *_: [])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_verdicts_are_right(pattern: str, tmp_path: Path) -> None:
    wrong: Counter[str] = Counter()
    for place in PLACES:
        for seed in SEEDS:
            one = Injected(place, pattern, seed)
            found = verdict(one, tmp_path / f"{place}-{seed}")
            ranks = list(range(one.workers)) if pattern == "rotating" else [one.victim]
            if found != [(pattern, place, ranks)]:
                wrong[f"{place}: {found} instead of {ranks}"] += 1
    assert sum(wrong.values()) <= 0.05 * len(PLACES) * len(SEEDS), wrong


def test_noise_alone_is_nobodys_slowness(tmp_path: Path) -> None:
    found = []
    for seed in range(1000, 1020):
        one = Injected("loading", "persistent", seed)
        one.more = 0.0
        found += verdict(one, tmp_path / str(seed))
    assert len(found) <= 1, found
