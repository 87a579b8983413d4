"""Every policy in real runs: what the servers wrote down is recomputed, and the pace is what theory says."""

from __future__ import annotations

import heapq
import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers.checker import events_of, violations
from helpers.forks import played, playing
from helpers.load import above_noise
from helpers.support import PREAMBLE, Outcome, state_of, wait_until, write_script

from paceline.events import Cancel, Compute, Epoch, Event, LeaseGiven, Push, Return, Seen, Update

SCRIPT = (
    PREAMBLE
    + """
import contextlib
import torch, paceline
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

options = {"samples": 317, "epochs": 2, "window": 1, "loaders": 0, "plain": False}
options |= {"loss": "", "evaluate": False, "tarry": "", **json.loads(sys.argv[1])}
team = paceline.join()
torch.manual_seed(3)
inputs = torch.randn(options["samples"], 6)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
loader = DataLoader(data, batch_size=8 * team.world_size, shuffle=True, num_workers=options["loaders"])
model, optimizer, loader = team.setup(model, optimizer, loader)
test = team.loader(DataLoader(data, batch_size=20)) if options["evaluate"] else []
note(f"worker-{team.rank}")
step = (lambda accumulate: contextlib.nullcontext()) if options["plain"] else team.step
number = done = evaluated = 0
for epoch in range(options["epochs"]):
    for x, y in loader:
        number += 1
        with step(accumulate=number % options["window"] != 0):
            loss = mse_loss(model(x), y)
            loss.backward()
            if options["loss"]:
                team.report(loss=eval(options["loss"], {"n": done}))
            if options["window"] == 1 or number % options["window"] == 0 or not options["plain"]:
                optimizer.step()
                optimizer.zero_grad()
            done += 1
        if options["tarry"] and team.rank == 3 and number == 10:  # its last of the epoch
            time.sleep(0.3)
            note("tarried")
            if options["tarry"] == "break":
                break
    with torch.no_grad():
        for x, y in test:
            model(x)
            evaluated += len(x)
note(f"end-{team.rank}", done=done, evaluated=evaluated)
"""
)
"""40 minibatches an epoch, the last one smaller."""


def run(
    folder: Path, strategy: str, *words: str, name: str = "live", slow: str = "all:exp(0.004)", **options: Any
) -> Outcome:
    script = write_script(folder, SCRIPT)
    command = [script, "--workers", "4", "--strategy", strategy, "--name", name, "--slow", slow, *words]
    outcome = played([*command, "--", json.dumps(options)], folder)
    assert outcome.code == 0, outcome.err
    return outcome


def assert_all_holds(outcome: Outcome, name: str = "live") -> list[Event]:
    """Nothing was done wrong, and the summary says what the events say."""
    events = events_of(outcome, name)
    assert violations(events) == []
    summary = outcome.run.summary(name)
    pushes = [event for event in events if isinstance(event, Push)]
    computed = [event for event in events if isinstance(event, Compute)]
    updates = [event.start + event.seconds for event in events if isinstance(event, Update)]
    assert summary["updates"] == len(updates)
    assert summary["seconds_per_update"] == pytest.approx((updates[-1] - updates[0]) / (len(updates) - 1))
    assert summary["cancelled"] == sum(isinstance(event, Cancel) for event in events)
    made = {ticket: event.version for event in events if isinstance(event, Update) for ticket in event.pushes}
    assert summary["dropped"] == sum(push.ticket not in made and push.outcome != "skipped" for push in pushes)
    assert summary["minibatches"] == sum(event.minibatches for event in computed)
    # Of the gradients that were used, when they were.
    ages = Counter(made[push.ticket] - 1 - push.version for push in pushes if push.ticket in made)
    assert summary["staleness"]["histogram"] == {str(age): ages[age] for age in sorted(ages)}
    assert summary["staleness"]["mean"] == pytest.approx(statistics.mean(ages.elements()))
    assert summary["staleness"]["max"] == max(ages)
    return events


def used(events: Sequence[Event]) -> list[int]:
    """Gradients in each update."""
    return [event.workers for event in events if isinstance(event, Update)]


# -- every policy ----------------------------------------------------------------------------------------------------

POLICIES = [
    "sync",
    "k-sync:k=2",
    "k-sync:k=4",
    "k-batch-sync:k=3",
    "k-batch-sync:k=7",
    "async",
    "k-async:k=2",
    "k-async:k=4",
    "k-batch-async:k=3",
    "k-batch-async:k=7",
    "ssp:s=0",
    "ssp:s=1",
    "groups:size=2",
    "groups:size=3",
    "groups:size=4",
    "groups:size=2,between=sync",
    "groups:size=2,between=k-sync:k=1",
    "groups:size=2,between=k-async:k=2",
    "groups:size=2,between=ssp:s=1",
    "adaptive:of=k-sync,start=1",
    "adaptive:of=k-batch-sync,start=2",
    "adaptive:of=k-async",
    "adaptive:of=k-batch-async,start=1",
]


Runs = Callable[[str], list[Event]]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Events of a run in which nothing was wrong, by its strategy; `late` is one that dropped gradients."""
    kept: dict[str, list[Event]] = {}

    def get(spec: str) -> list[Event]:
        if spec not in kept:
            folder = tmp_path_factory.mktemp("good")
            strategy = spec.removesuffix(" late")
            kept[spec] = assert_all_holds(run(folder, strategy, plain=spec.endswith(" late")))
        return list(kept[spec])

    return get


@pytest.mark.parametrize("strategy", POLICIES)
def test_a_run_does_what_its_policy_promises(strategy: str, good: Runs) -> None:
    events = good(strategy)
    assert sum(used(events)) == 80  # every minibatch of both epochs, once
    over = [event for event in events if isinstance(event, Epoch) and event.over]
    assert [event.epoch for event in over] == [0, 1]


@pytest.mark.parametrize(
    ("strategy", "servers"),
    [
        ("k-sync:k=2", "2"),
        ("k-sync:k=2", "all"),
        ("k-batch-async:k=3", "2"),
        ("k-batch-async:k=3", "lead"),
        ("groups:size=2,between=k-sync:k=1", "lead"),
        ("groups:size=2,between=k-sync:k=1", "all"),
    ],
)
def test_it_does_so_wherever_the_parameters_are_held(strategy: str, servers: str, tmp_path: Path) -> None:
    assert_all_holds(run(tmp_path, strategy, "--servers", servers))


@pytest.mark.parametrize("strategy", ["sync", "k-batch-sync:k=3", "async"])
def test_it_does_so_when_loader_processes_fetch_ahead(strategy: str, tmp_path: Path) -> None:
    events = assert_all_holds(run(tmp_path, strategy, loaders=2))
    most = max_held(events)
    assert most > 1, "nobody had fetched anything ahead"


def max_held(events: Sequence[Event]) -> int:
    """The most leases that any worker ever had at once."""
    held: Counter[int] = Counter()
    most = 0
    for event in events:
        if isinstance(event, LeaseGiven):
            held[event.rank] += 1
            most = max(most, held[event.rank])
        elif isinstance(event, Push | Return | Seen) and not (isinstance(event, Push) and event.outcome == "dropped"):
            held[event.rank] -= len(event.leases)
    return most


@pytest.mark.parametrize("strategy", ["k-sync:k=2", "k-batch-sync:k=3", "async", "groups:size=2"])
def test_it_does_so_when_gradients_are_accumulated(strategy: str, tmp_path: Path) -> None:
    events = assert_all_holds(run(tmp_path, strategy, window=3))
    sizes = Counter(len(push.leases) for push in events if isinstance(push, Push))
    assert max(sizes) == 3
    # What is smaller lost minibatches of its three to a cancelled step, or was the last of an epoch.
    cancelled = sum(isinstance(event, Cancel) for event in events)
    assert sizes[1] + sizes[2] <= cancelled + 2 * 4, (sizes, cancelled)
    assert sizes[3] > 0


@pytest.mark.parametrize("strategy", ["k-sync:k=2", "k-batch-sync:k=3"])
def test_without_steps_late_gradients_are_dropped_and_counted(strategy: str, good: Runs) -> None:
    events = good(f"{strategy} late")
    assert not any(isinstance(event, Cancel) for event in events)
    late = [push for push in events if isinstance(push, Push) and push.staleness]
    assert len(late) >= 20
    assert all(push.outcome == "dropped" for push in late)


@pytest.mark.parametrize("strategy", ["k-sync:k=2", "ssp:s=1"])
def test_every_worker_evaluates_all_samples_without_leases(strategy: str, tmp_path: Path) -> None:
    outcome = run(tmp_path, strategy, evaluate=True)
    events = assert_all_holds(outcome)
    assert [outcome.run.note(f"end-{rank}")["evaluated"] for rank in range(4)] == [2 * 317] * 4
    assert {event.loader for event in events if isinstance(event, LeaseGiven | Epoch)} == {0}
    assert not any(isinstance(event, Seen) for event in events)


@pytest.mark.parametrize(
    "strategy",
    ["k-sync:k=2", "k-batch-sync:k=3", "k-async:k=2", "ssp:s=1", "groups:size=2"],
)
def test_it_does_so_while_workers_are_halted_at_random(strategy: str, tmp_path: Path) -> None:
    source = random.Random(strategy)
    script = write_script(tmp_path, SCRIPT)
    command = [script, "--workers", "4", "--strategy", strategy, "--name", "live", "--slow", "all:0.002+exp(0.006)"]
    halted: set[int] = set()
    with playing([*command, "--", json.dumps({"samples": 480})], tmp_path) as run:
        pids = [run.note(f"worker-{rank}")["pid"] for rank in range(4)]
        while not (run.ended or any(run.noted(f"end-{rank}") for rank in range(4))):
            rank = source.randrange(4)
            os.kill(pids[rank], signal.SIGSTOP)
            wait_until(lambda pid=pids[rank]: state_of(pid) in ("T", "Z", ""), 20, "a worker to be halted")  # type: ignore[misc]
            if state_of(pids[rank]) == "T":
                halted.add(rank)
                time.sleep(source.uniform(0.01, 0.06))
                os.kill(pids[rank], signal.SIGCONT)
            time.sleep(source.uniform(0.0, 0.01))
        outcome = run.finish()
    assert outcome.code == 0, outcome.err
    assert len(halted) >= 2, "the run was over before its workers could be halted"
    assert_all_holds(outcome)


@pytest.mark.parametrize(
    ("strategy", "how"), [("sync", "pause"), ("sync", "break"), ("groups:size=2,between=sync", "break")]
)
def test_who_tarries_at_the_end_of_an_epoch_is_waited_for_in_the_next(strategy: str, how: str, tmp_path: Path) -> None:
    outcome = run(tmp_path, strategy, samples=320, tarry=how)
    assert outcome.run.noted("tarried")
    assert set(used(assert_all_holds(outcome))) == {4}


# -- K that grows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["k-sync", "k-batch-sync", "k-async", "k-batch-async"])
def test_k_grows_as_the_loss_falls_and_never_shrinks(family: str, tmp_path: Path) -> None:
    falling = run(tmp_path, f"adaptive:of={family},start=1", samples=800, epochs=1, loss="8.0 * 0.7**n")
    counts = used(assert_all_holds(falling))
    assert counts[0] == 1
    most = 3 if family == "k-sync" else 4  # there the rule comes near the number of workers, and never reaches it
    assert max(counts) == most
    risen = counts[: counts.index(most) + 5]
    assert risen == sorted(risen)


def test_k_stays_while_the_loss_does(tmp_path: Path) -> None:
    level = run(tmp_path, "adaptive:of=k-async,start=1", epochs=1, loss="8.0")
    assert set(used(assert_all_holds(level))) == {1}


# -- pace ------------------------------------------------------------------------------------------------------------

SHIFT, MEAN, UPDATES = 0.015, 0.015, 40


class Sleeper:
    """A worker that draws the lengths of its steps as `--slow` does."""

    def __init__(self, rank: int) -> None:
        self.rank, self._source = rank, random.Random(f"0/{rank}")
        self.version = 0
        self.until = 0.0

    def begin(self, now: float, version: int) -> Sleeper:
        self.version = version
        self.until = now + SHIFT + self._source.expovariate(1 / MEAN)
        return self

    def __lt__(self, other: Sleeper) -> bool:
        return self.until < other.until


def predicted(family: str, k: int, workers: int = 4) -> tuple[float, float]:
    """Seconds per update and mean staleness of so many updates, if nothing but the drawn steps takes time."""
    queue = [Sleeper(rank).begin(0.0, 0) for rank in range(workers)]
    heapq.heapify(queue)
    times: list[float] = []
    ages: list[int] = []
    held: list[Sleeper] = []
    count = 0
    while len(times) < UPDATES:
        worker = heapq.heappop(queue)
        now, version = worker.until, len(times)
        ages.append(version - worker.version)
        count += 1
        if family in ("k-sync", "k-async"):
            held.append(worker)
        else:
            again = version + (count == k)
            if not (family == "k-batch-sync" and count == k):
                heapq.heappush(queue, worker.begin(now, again))
        if count < k:
            continue
        times.append(now)
        if family in ("k-sync", "k-batch-sync"):
            late = [*held, *queue, *([worker] if family == "k-batch-sync" else [])]
            queue = [other.begin(now, version + 1) for other in late]
            heapq.heapify(queue)
        else:
            for other in held:
                heapq.heappush(queue, other.begin(now, version + 1))
        held, count = [], 0
    return (times[-1] - times[0]) / (UPDATES - 1), statistics.mean(ages)


PACES = [("k-sync", 1), ("k-sync", 2), ("k-sync", 4), ("k-async", 2), ("k-batch-async", 2), ("k-batch-sync", 2)]


@pytest.mark.parametrize(("family", "k"), PACES)
def test_the_pace_is_that_of_the_drawn_steps(family: str, k: int, tmp_path: Path) -> None:
    """The steps that a worker is made to sleep are known beforehand, so chance has no part in this.

    What is measured may be a little longer, as messages and updates take time, and longer still on a busy machine;
    but a worker that waits where it should not, or goes on where it should wait, is off by more than a third.
    """
    seconds, age = predicted(family, k)

    def check(factor: float) -> None:
        took, ages = pace(tmp_path, family, k, factor)
        assert 0.95 < took / (factor * seconds) < 1.35
        assert ages == pytest.approx(age, abs=0.2)

    above_noise(check)


def pace(folder: Path, family: str, k: int, factor: float) -> tuple[float, float]:
    """Seconds per update and mean staleness of a real run, with steps that are longer by a factor."""
    name, slow = f"live-{factor:g}", f"all:{SHIFT * factor}+exp({MEAN * factor})"
    samples = 8 * (k * UPDATES + 12)
    outcome = run(folder, f"{family}:k={k}", name=name, samples=samples, epochs=1, slow=slow)
    events = assert_all_holds(outcome, name)
    ends = [event.start + event.seconds for event in events if isinstance(event, Update)][:UPDATES]
    assert len(ends) == UPDATES
    pushes = [event for event in events if isinstance(event, Push) and event.start <= ends[-1]]
    # What comes in the moment of its cancellation is dropped, and is no part of the prediction.
    ages = [event.staleness for event in pushes if event.outcome != "dropped"]
    return (ends[-1] - ends[0]) / (UPDATES - 1), statistics.mean(ages)


def test_the_prediction_itself_is_that_of_theory(monkeypatch: pytest.MonkeyPatch) -> None:
    """For steps of 1 + exp(1); see Dutta et al., 'Slow and Stale Gradients Can Win the Race'."""
    for name, value in (("SHIFT", 1.0), ("MEAN", 1.0), ("UPDATES", 20_000)):
        monkeypatch.setitem(globals(), name, value)
    expected = {
        ("k-sync", 2): (1.583, 0.0),
        ("k-sync", 4): (3.083, 0.0),
        ("k-batch-sync", 2): (1.580, 0.0),
        ("k-async", 2): (1.139, 1.0),
        ("k-batch-async", 2): (1.000, 1.5),
    }
    for (family, k), (seconds, age) in expected.items():
        measured = predicted(family, k)
        assert measured[0] == pytest.approx(seconds, rel=0.03)
        assert measured[1] == pytest.approx(age, rel=0.03, abs=1e-9)


# -- the checker itself ----------------------------------------------------------------------------------------------


def changed(events: list[Event], old: Event, **fields: Any) -> list[Event]:
    return [msgspec.structs.replace(event, **fields) if event is old else event for event in events]


def updates_of(events: list[Event]) -> list[Update]:
    return [event for event in events if isinstance(event, Update)]


def push_of(events: list[Event], ticket: int) -> Push:
    return next(event for event in events if isinstance(event, Push) and event.ticket == ticket)


def one_gradient_fewer(events: list[Event]) -> list[Event]:
    update = updates_of(events)[5]
    return changed(events, update, pushes=update.pushes[1:], workers=update.workers - 1)


def another_count(events: list[Event]) -> list[Event]:
    return changed(events, updates_of(events)[5], workers=7)


def one_worker_twice(events: list[Event]) -> list[Event]:
    first, second = (push_of(events, ticket) for ticket in updates_of(events)[5].pushes)
    return changed(events, second, rank=first.rank)


def a_gradient_of_before(events: list[Event]) -> list[Event]:
    push = push_of(events, updates_of(events)[5].pushes[0])
    return changed(events, push, version=push.version - 1, staleness=push.staleness + 1)


def a_gradient_twice(events: list[Event]) -> list[Event]:
    before, update = updates_of(events)[4:6]
    return changed(events, update, pushes=[before.pushes[0], *update.pushes[1:]])


def a_ticket_twice(events: list[Event]) -> list[Event]:
    pushes = [event for event in events if isinstance(event, Push)]
    return changed(events, pushes[6], ticket=pushes[5].ticket)


def a_gradient_from_nowhere(events: list[Event]) -> list[Event]:
    update = updates_of(events)[5]
    return changed(events, update, pushes=[99_999, *update.pushes[1:]])


def a_dropped_gradient(events: list[Event]) -> list[Event]:
    place = next(i for i, event in enumerate(events) if isinstance(event, Push) and event.outcome == "dropped")
    dropped = events[place]
    assert isinstance(dropped, Push)
    update = next(event for event in events[place:] if isinstance(event, Update))
    return changed(events, update, pushes=[dropped.ticket, *update.pushes[1:]])


def a_cancelled_step(events: list[Event]) -> list[Event]:
    push = push_of(events, updates_of(events)[5].pushes[0])
    cancel = Cancel(push.rank, push.start, 0.001, push.version, push.leases)
    place = events.index(push)
    return [*events[:place], cancel, *events[place:]]


def a_forgotten_gradient(events: list[Event]) -> list[Event]:
    update = updates_of(events)[-1]
    return changed(events, update, pushes=update.pushes[:-1], workers=update.workers - 1)


def another_staleness(events: list[Event]) -> list[Event]:
    push = push_of(events, updates_of(events)[5].pushes[0])
    return changed(events, push, staleness=push.staleness + 1)


def a_version_left_out(events: list[Event]) -> list[Event]:
    update = updates_of(events)[5]
    return changed(events, update, version=update.version + 1)


def a_version_twice(events: list[Event]) -> list[Event]:
    before, update = updates_of(events)[4:6]
    return changed(events, update, version=before.version)


def half_a_group(events: list[Event]) -> list[Event]:
    update = updates_of(events)[5]
    return changed(events, update, pushes=update.pushes[:1], workers=1)


def samples_given_twice(events: list[Event]) -> list[Event]:
    first, second = [event for event in events if isinstance(event, LeaseGiven)][1:3]
    return changed(events, second, first=first.first)


def samples_of_another(events: list[Event]) -> list[Event]:
    one = push_of(events, updates_of(events)[5].pushes[0])
    return changed(events, one, leases=push_of(events, updates_of(events)[4].pushes[0]).leases)


def fewer_samples(events: list[Event]) -> list[Event]:
    push = push_of(events, updates_of(events)[5].pushes[0])
    return changed(events, push, samples=push.samples - 1)


def more_samples_in_the_epoch(events: list[Event]) -> list[Event]:
    epoch = next(event for event in events if isinstance(event, Epoch))
    return changed(events, epoch, samples=epoch.samples + 8)


def an_early_end(events: list[Event]) -> list[Event]:
    over = next(event for event in events if isinstance(event, Epoch) and event.over)
    rest = [event for event in events if event is not over]
    place = rest.index(updates_of(events)[5])
    return [*rest[:place], over, *rest[place:]]


def no_end(events: list[Event]) -> list[Event]:
    return [event for event in events if not (isinstance(event, Epoch) and event.over)]


def returned_for_nothing(events: list[Event]) -> list[Event]:
    """Without the lease under which samples that had come back were trained on."""
    trained = {number for update in updates_of(events) for t in update.pushes for number in push_of(events, t).leases}
    back = {number for event in events if isinstance(event, Return) for number in event.leases}
    leases = [event for event in events if isinstance(event, LeaseGiven)]
    places = {(event.epoch, event.first) for event in leases if event.number in back}
    again = next(event for event in leases if event.number in trained and (event.epoch, event.first) in places)
    return [event for event in events if event is not again]


def kept_though_cancelled(events: list[Event]) -> list[Event]:
    back = next(event for event in events if isinstance(event, Return) and event.why == "cancelled")
    return [event for event in events if event is not back]


CORRUPTIONS: list[tuple[str, Callable[[list[Event]], list[Event]], str]] = [
    ("k-sync:k=2", one_gradient_fewer, "is of 1 of 2, though"),
    ("k-async:k=2", one_gradient_fewer, "is of 1 of 2, though"),
    ("k-batch-sync:k=3", one_gradient_fewer, "is of 2 of 3, though"),
    ("k-batch-async:k=3", one_gradient_fewer, "is of 2 of 3, though"),
    ("sync", one_gradient_fewer, "is of 3 of 4, and is not the last of its epoch"),
    ("k-sync:k=2", another_count, "is said to be of 7 gradients"),
    ("k-sync:k=2", one_worker_twice, "several gradients of one worker"),
    ("k-async:k=2", one_worker_twice, "several gradients of one worker"),
    ("sync", a_gradient_of_before, "which is of version"),
    ("k-sync:k=2", a_gradient_of_before, "which is of version"),
    ("k-batch-sync:k=3", a_gradient_of_before, "which is of version"),
    ("k-async:k=2", a_gradient_twice, "which was used before"),
    ("async", a_ticket_twice, "came twice"),
    ("async", a_gradient_from_nowhere, "which never came"),
    ("k-sync:k=2 late", a_dropped_gradient, "which was dropped before"),
    ("k-sync:k=2", a_cancelled_step, "whose step was cancelled"),
    ("k-batch-async:k=3", a_forgotten_gradient, "neither used nor dropped"),
    ("async", another_staleness, "versions stale, not"),
    ("async", a_version_left_out, "versions rise by one"),
    ("async", a_version_twice, "versions rise by one"),
    ("groups:size=2", half_a_group, "uses group"),
    ("async", samples_given_twice, "which lease"),
    ("async", samples_given_twice, "trained on twice"),
    ("async", samples_given_twice, "not trained on"),
    ("async", samples_of_another, "not its own to train on"),
    ("async", fewer_samples, "which is not what its leases have"),
    ("async", more_samples_in_the_epoch, "not trained on"),
    ("k-sync:k=2", an_early_end, "not trained on when it ends"),
    ("k-sync:k=2", an_early_end, "which is not open"),
    ("async", no_end, "begins before"),
    ("async", no_end, "was never over"),
    ("k-sync:k=2", returned_for_nothing, "nobody got its samples"),
    ("k-sync:k=2", kept_though_cancelled, "did not go back"),
]


@pytest.mark.parametrize(("spec", "corrupt", "sentence"), CORRUPTIONS)
def test_the_checker_finds(spec: str, corrupt: Callable[[list[Event]], list[Event]], sentence: str, good: Runs) -> None:
    found = violations(corrupt(good(spec)))
    assert any(sentence in each for each in found), found


@pytest.mark.parametrize(
    ("did", "promised", "sentence"),
    [
        ("async", "ssp:s=0", "ahead of the slowest; 0 may be"),
        ("ssp:s=1", "ssp:s=0", "ahead of the slowest; 0 may be"),
        ("async", "k-async:k=2", "is of 1 of 2"),
        ("k-batch-async:k=3", "k-batch-async:k=2", "is of 3, and 2 are enough"),
        ("k-async:k=2", "async", "is of 2, and 1 are enough"),
        ("async", "k-sync:k=1", "which is of version"),
        ("k-async:k=2", "k-sync:k=2", "which is of version"),
        ("k-batch-async:k=3", "k-async:k=3", "several gradients of one worker"),
        ("async", "groups:size=2", "without rank"),
        ("k-sync:k=2", "sync", "is not the last of its epoch"),
    ],
)
def test_the_checker_tells_policies_apart(did: str, promised: str, sentence: str, good: Runs) -> None:
    found = violations(good(did), promised)
    assert any(sentence in each for each in found), found
