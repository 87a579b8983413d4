"""Who is waited for, and why, is what one finds wait by wait: what the other one spent more time on."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.events import Cancel, Compute, Event, Join, Load, Pull, Push, Reduce, Update, Wait
from paceline.report.aggregate import RunAggregate
from paceline.report.attribution import CAUSES, WaitAttribution
from paceline.report.facts import facts
from paceline.report.rows import Rows, by_kind, rows_of

FOREVER = float("inf")
WORK = Cancel | Compute | Load | Pull | Reduce | Update | Wait


def rows(events: Sequence[Event]) -> Rows:
    return rows_of(by_kind(events))


def parts(event: Event) -> list[tuple[str, float, float]]:
    """What a worker did, as causes with their beginning and end."""
    match event:
        case Load():
            return [("loading", event.start, event.start + event.seconds)]
        case Compute():
            end = event.start + event.seconds
            middle, tail = event.start + event.forward, end - event.slowed
            return [("forward", event.start, middle), ("backward", middle, tail), ("slowed", tail, end)]
        case Reduce() | Pull() | Update():
            return [("link", event.start, event.start + event.seconds)]
        case Wait():
            return [("waiting", event.start, event.start + event.seconds)]
    return []


def spent(events: Sequence[Event], rank: int, begin: float, end: float) -> dict[str, float]:
    """What a worker spent on each cause between two moments."""
    seconds = dict.fromkeys(CAUSES, 0.0)
    left = end - begin
    for event in events:
        if event.rank == rank:
            for cause, first, last in parts(event):
                share = max(0.0, min(last, end) - max(first, begin))
                left -= share
                if cause != "waiting":
                    seconds[cause] += share
    seconds["elsewhere"] = max(0.0, left)
    return seconds


def met(events: Sequence[Event], rank: int, moment: float) -> float:
    """When a worker was last in step with the others, before a moment."""
    mine = [event for event in events if event.rank == rank and isinstance(event, WORK)]
    updates = [event.start for event in mine if isinstance(event, Update)]
    pulls = [event.start + event.seconds for event in mine if isinstance(event, Pull)]
    waits = [event.start + event.seconds for event in mine if isinstance(event, Wait)]
    before = [known for known in (*updates, *pulls, *waits) if known < moment]
    return max(before) if before else min(event.start for event in mine)


def naive(events: Sequence[Event]) -> dict[int, dict[str, float]]:
    """Each wait by itself: what the one waited for spent more on than the one who waits, since they last met."""
    found: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(CAUSES, 0.0))
    for wait in events:
        if not isinstance(wait, Wait) or wait.rank < 0 or wait.on < 0:
            continue
        begin = met(events, wait.rank, wait.start)
        known = any(event.rank == wait.on and isinstance(event, WORK) for event in events)
        theirs = spent(events, wait.on, begin, wait.start + wait.seconds) if known else dict.fromkeys(CAUSES, 0.0)
        own = spent(events, wait.rank, begin, wait.start)
        excess = {cause: max(0.0, theirs[cause] - own[cause]) for cause in CAUSES}
        total = sum(excess.values())
        for cause, more in excess.items():
            found[wait.on][cause] += wait.seconds * more / total if total else 0.0
        if not total:
            found[wait.on]["elsewhere"] += wait.seconds
    return found


def same(blame: WaitAttribution, wanted: dict[int, dict[str, float]]) -> None:
    assert set(blame.seconds) == set(wanted)
    for rank, causes in wanted.items():
        assert blame.seconds[rank] == pytest.approx(causes, abs=1e-9)


def blamed(events: Sequence[Event]) -> WaitAttribution:
    blame = WaitAttribution()
    blame.add(rows(events), FOREVER)
    return blame


# -- one wait --------------------------------------------------------------------------------------------------------

# Worker 0 computes for a second, half of it forward, and then waits until 2 for worker 1.
OWN = Compute(0, 0.0, 1.0, 0, 1, 1, 0.0, 0.5)
WAIT = Wait(0, 1.0, 1.0, 1)


@pytest.mark.parametrize(
    ("other", "wanted"),
    [
        ([Load(1, 0.0, 1.0), Compute(1, 1.0, 1.0, 0, 1, 1, 0.0, 0.5)], {"loading": 1.0}),
        ([Compute(1, 0.0, 2.0, 0, 1, 1, 0.0, 1.5)], {"forward": 1.0}),
        ([Compute(1, 0.0, 2.0, 0, 1, 1, 0.0, 0.5)], {"backward": 1.0}),
        ([Compute(1, 0.0, 2.0, 0, 1, 1, 1.0, 0.5)], {"slowed": 1.0}),
        ([Compute(1, 0.0, 2.0, 0, 1, 1, 0.5, 1.0)], {"forward": 0.5, "slowed": 0.5}),
        ([Compute(1, 0.0, 2.0, 0, 1, 1, 0.75, 0.75)], {"forward": 0.25, "slowed": 0.75}),
        ([Compute(1, 0.0, 1.0, 0, 1, 1, 0.0, 0.5), Pull(1, 1.0, 1.0, 0)], {"link": 1.0}),
        ([Compute(1, 0.0, 1.0, 0, 1, 1, 0.0, 0.5), Reduce(1, 1.0, 1.0, 0)], {"link": 1.0}),
        ([Compute(1, 0.0, 1.0, 0, 1, 1, 0.0, 0.5), Update(1, 1.0, 1.0, 1)], {"link": 1.0}),
        ([Compute(1, 1.0, 1.0, 0, 1, 1, 0.0, 0.5)], {"elsewhere": 1.0}),
        ([Load(2, 0.0, 3.0)], {"elsewhere": 1.0}),
        ([Cancel(1, 0.0, 2.0, 0, [])], {"elsewhere": 1.0}),
        # What it did before they last met, or waited for somebody itself, has nothing to do with it.
        ([Load(1, -3.0, 3.0), Compute(1, 0.0, 2.0, 0, 1, 1, 0.0, 1.5)], {"forward": 1.0}),
        ([Wait(1, 0.0, 0.5, 2), Compute(1, 0.5, 1.5, 0, 1, 1, 0.0, 1.0)], {"forward": 1.0}),
    ],
)
def test_a_wait_has_the_cause_that_the_other_one_spent_more_on(other: list[Event], wanted: dict[str, float]) -> None:
    blame = blamed([OWN, WAIT, *other])
    assert blame.seconds[1] == {**dict.fromkeys(CAUSES, 0.0), **wanted}
    same(blame, naive([OWN, WAIT, *other]))


def test_every_cause_has_its_words() -> None:
    assert list(CAUSES) == ["loading", "forward", "backward", "slowed", "link", "elsewhere"]
    assert all(CAUSES.values())


def test_a_wait_for_nobody_is_waiting_without_blame() -> None:
    assert dict(blamed([Wait(0, 1.0, 1.0, -1), Load(-1, 0.0, 3.0)]).seconds) == {}


def test_a_server_s_waits_are_no_worker_s() -> None:
    assert dict(blamed([Wait(-1, 1.0, 1.0, 0), Load(0, 0.0, 3.0)]).seconds) == {}


def test_several_who_wait_for_the_same_one_are_added_up() -> None:
    happened: list[Event] = []
    for rank in range(3):
        ready = 1.0 + rank / 4
        happened += [Compute(rank, 0.0, ready, 0, 1, 1, 0.0, 0.5), Wait(rank, ready, 2.0 - ready, 3)]
    happened += [Load(3, 0.0, 1.0), Compute(3, 1.0, 1.0, 0, 1, 1, 0.0, 0.5)]
    blame = blamed(happened)
    # Each of them has half a second of forward; of backward half a second, three quarters, and one; worker 3 half.
    assert blame.seconds[3] == {**dict.fromkeys(CAUSES, 0.0), "loading": 1.0 + 0.75 + 0.5}


# -- waits that are not over, and events that come late --------------------------------------------------------------

LATE = [Load(1, 0.0, 1.0), Compute(1, 1.0, 1.0, 0, 1, 1, 0.0, 0.5)]


def test_a_wait_is_looked_at_only_when_all_is_known_until_its_end() -> None:
    blame = WaitAttribution()
    blame.add(rows([OWN, WAIT]), 1.5)
    assert dict(blame.seconds) == {}
    blame.add(rows(LATE), 2.0)
    assert blame.seconds[1] == {**dict.fromkeys(CAUSES, 0.0), "loading": 1.0}


def test_what_was_done_before_a_wait_came_in_is_still_known() -> None:
    blame = WaitAttribution()
    blame.add(rows(LATE), 0.5)
    blame.add(rows([OWN]), 0.9)
    blame.add(rows([WAIT]), 1.5)
    blame.add(rows([]), 2.5)
    assert blame.seconds[1]["loading"] == 1.0


def test_what_no_wait_can_be_for_any_more_is_forgotten() -> None:
    blame = WaitAttribution()
    for number in range(200):
        start = float(number)
        happened: list[Event] = [Load(1, start, 0.75), Load(0, start, 0.5), Wait(0, start + 0.5, 0.25, 1)]
        happened += [Update(rank, start + 0.75, 0.125, number + 1) for rank in (0, 1)]
        blame.add(rows(happened), start + 1.0)
        assert len(blame._known) + len(blame._open) <= 8
    assert blame.seconds[1] == {**dict.fromkeys(CAUSES, 0.0), "loading": 50.0}


@st.composite
def teams(draw: st.DrawFn) -> list[Event]:
    """What each of a few workers does one after the other, in quarters of a second."""
    size = draw(st.integers(2, 4))
    happened: list[Event] = []
    for rank in range(size):
        now = draw(st.integers(0, 4)) / 4
        for number in range(draw(st.integers(0, 8))):
            now += draw(st.integers(0, 3)) / 4
            seconds = draw(st.integers(0, 8)) / 4
            kind = draw(st.sampled_from([Compute, Load, Wait, Reduce, Pull, Update, Cancel]))
            if kind is Compute:
                forward = draw(st.integers(0, int(seconds * 4))) / 4
                slowed = draw(st.integers(0, int((seconds - forward) * 4))) / 4
                happened.append(Compute(rank, now, seconds, number, 1, 1, slowed, forward))
            elif kind is Load:
                happened.append(Load(rank, now, seconds))
            elif kind is Wait:
                on = draw(st.sampled_from([-1, *(other for other in range(size) if other != rank)]))
                happened.append(Wait(rank, now, seconds, on))
            elif kind is Reduce:
                happened.append(Reduce(rank, now, seconds, 8))
            elif kind is Cancel:
                happened.append(Cancel(rank, now, seconds, number, []))
            else:
                happened.append(kind(rank, now, seconds, number))
            now += seconds
    return happened


@settings(max_examples=50)
@given(events=teams())
def test_blame_is_what_one_finds_wait_by_wait(events: list[Event]) -> None:
    blame = blamed(events)
    same(blame, naive(events))
    assert sum(sum(causes.values()) for causes in blame.seconds.values()) == pytest.approx(
        sum(event.seconds for event in events if isinstance(event, Wait) and event.on >= 0)
    )


@settings(max_examples=50)
@given(events=teams(), moments=st.lists(st.integers(0, 80), max_size=6))
def test_blame_does_not_depend_on_when_it_is_asked(events: list[Event], moments: list[int]) -> None:
    blame, before = WaitAttribution(), -FOREVER
    for until in [*sorted(moment / 4 for moment in moments), FOREVER]:
        blame.add(rows([event for event in events if before <= event.start < until]), until)
        before = until
    same(blame, naive(events))
    assert len(blame._known) == len(blame._open) == 0


# -- what the facts say ----------------------------------------------------------------------------------------------

STEPS = 10


def all_reduce(own: list[dict[str, float]], *, wait: bool = True) -> list[Event]:
    """Rounds in which each worker loads, goes forward and backward, is slowed, waits for the last, and updates."""
    happened: list[Event] = [Join(rank, 0.0, 1, "host", "cpu", "all-reduce", 100.0) for rank in range(len(own))]
    lengths = [sum(mine.get(part, 0.0) for part in ("loading", "forward", "backward", "slowed")) for mine in own]
    last = max(range(len(own)), key=lambda rank: lengths[rank])
    link = max(mine.get("link", 0.0) for mine in own)
    now = 1.0
    for number in range(STEPS):
        for rank, mine in enumerate(own):
            loading = mine.get("loading", 0.0)
            slowed, forward = mine.get("slowed", 0.0), mine.get("forward", 0.0)
            if loading:
                happened.append(Load(rank, now, loading))
            happened.append(Compute(rank, now + loading, lengths[rank] - loading, number, 1, 8, slowed, forward))
            if wait and rank != last:
                happened.append(Wait(rank, now + lengths[rank], lengths[last] - lengths[rank], last))
            happened.append(Update(rank, now + lengths[last], mine.get("link", 0.0), number + 1, 64, len(own)))
        now += lengths[last] + link
    return happened


def told(events: Sequence[Event]) -> dict[str, Any]:
    run = RunAggregate()
    run.feed(events)
    run.advance()
    return facts(run, name="run", config={}, notes=[], pictures=False)


USUAL = {"loading": 0.01, "forward": 0.02, "backward": 0.04, "link": 0.01}


def test_own_pace_leaves_waiting_and_cancelled_steps_out() -> None:
    happened = all_reduce([USUAL, {**USUAL, "backward": 0.12}])
    happened.append(Cancel(0, 9.0, 5.0, 3, []))
    known = told(happened)
    assert [worker["pace"] for worker in known["workers"]] == pytest.approx([0.08, 0.16])
    assert [worker["ratio"] for worker in known["workers"]] == pytest.approx([0.5, 2.0])
    assert known["workers"][0]["seconds"]["waiting"] == pytest.approx(STEPS * 0.08)
    assert known["workers"][0]["seconds"]["cancelled"] == 5.0


def test_own_pace_is_per_minibatch() -> None:
    known = told([Compute(0, 0.0, 3.0, 0, 4, 32), Load(0, 3.0, 1.0), Reduce(0, 4.0, 1.0, 0), Pull(0, 5.0, 3.0, 1)])
    assert known["workers"][0]["pace"] == 2.0
    assert known["workers"][0]["parts"]["link"] == 1.0


def test_a_worker_without_a_step_has_no_pace_and_is_not_slow() -> None:
    known = told([*all_reduce([USUAL, USUAL]), Load(2, 1.0, 50.0)])
    idle = known["workers"][2]
    assert (idle["pace"], idle["ratio"], idle["slow"], idle["why"]) == (None, 1.0, False, None)
    assert [worker["ratio"] for worker in known["workers"][:2]] == pytest.approx([1.0, 1.0])


def test_a_worker_is_compared_with_the_median_of_the_others() -> None:
    own = [{"backward": seconds} for seconds in (0.1, 0.2, 0.3, 0.9)]
    known = told(all_reduce(own))
    for rank, worker in enumerate(known["workers"]):
        others = [mine["backward"] for other, mine in enumerate(own) if other != rank]
        assert worker["ratio"] == pytest.approx(own[rank]["backward"] / statistics.median(others))
    assert known["workers"][3]["slow"]


@pytest.mark.parametrize("why", ["loading", "forward", "backward", "slowed", "link"])
def test_the_slow_one_is_named_with_the_part_that_takes_it_longer(why: str) -> None:
    happened = all_reduce([USUAL, USUAL, {**USUAL, why: USUAL.get(why, 0.0) + 0.1}, USUAL])
    known = told(happened)
    slow = known["workers"][2]
    assert (known["slow"], slow["why"]) == ([2], why)
    assert slow["ratio"] == pytest.approx(0.18 / 0.08)
    assert f"because of {CAUSES[why]}" in known["verdict"][0]
    if why != "link":  # which comes after the waiting, here
        assert slow["causes"] == pytest.approx(naive(happened)[2], abs=1e-9)
        assert slow["blame"] == pytest.approx(3 * STEPS * 0.1)
        assert slow["blame"] == pytest.approx(sum(worker["seconds"]["waiting"] for worker in known["workers"]))


@pytest.mark.parametrize(("factor", "slow"), [(1.2, []), (1.3, [1])])
def test_a_worker_is_slow_from_one_and_a_quarter_on(factor: float, slow: list[int]) -> None:
    assert told(all_reduce([{"backward": 0.1}, {"backward": factor * 0.1}]))["slow"] == slow


def test_a_worker_with_longer_steps_that_is_waited_for_no_more_than_others_is_not_slow() -> None:
    happened: list[Event] = []
    for number in range(STEPS):
        now = float(number)
        # Worker 1 computes twice as long, but each waits for the other equally long.
        happened += [Compute(0, now, 0.2, number, 1, 8), Compute(1, now, 0.4, number, 1, 8)]
        happened += [Wait(0, now + 0.5, 0.1, 1), Wait(1, now + 0.7, 0.1, 0)]
    known = told(happened)
    assert known["workers"][1]["ratio"] == pytest.approx(2.0)
    assert known["slow"] == []
    assert known["verdict"][0] == "No worker is slow by itself."


def test_the_verdict_says_who_is_slow_how_slow_why_and_what_it_cost() -> None:
    known = told(all_reduce([{"backward": 0.1}, {"backward": 0.1, "slowed": 0.2}, {"backward": 0.1}]))
    # 10 rounds of 0.3 s; two of three wait for 0.2 s in each.
    assert known["verdict"] == [
        "Worker 1 is slow: a step of its own takes it 300 ms, 3.0 times as long as the others', because of slowness "
        "put on with --slow; the team waited 4 s for it (100% of all waiting).",
        "Waiting takes 44.4% of the workers' time.",
    ]


def test_a_slow_worker_that_nobody_waits_for_is_said_to_be_one() -> None:
    known = told(all_reduce([{"forward": 1.0}, {"forward": 4.0}], wait=False))
    assert known["verdict"] == [
        "Worker 1 is slow: a step of its own takes it 4 s, 4.0 times as long as the others', because of "
        "its forward pass.",
        "No worker waited.",
    ]


def test_of_several_slow_workers_the_most_waited_for_comes_first() -> None:
    happened = all_reduce([{"backward": 0.1}] * 4 + [{"backward": 0.3}, {"backward": 0.4}], wait=False)
    happened += [Wait(0, 1.0, 0.25, 5), Wait(0, 2.0, 0.75, 4)]
    known = told(happened)
    assert known["slow"] == [4, 5]
    assert [sentence[:16] for sentence in known["verdict"][:2]] == ["Worker 4 is slow", "Worker 5 is slow"]
    assert "(75% of all waiting)" in known["verdict"][0]
    assert "(25% of all waiting)" in known["verdict"][1]


def test_a_worker_alone_gets_no_verdict() -> None:
    assert told(all_reduce([USUAL]))["verdict"] == []


def test_little_waiting_is_said_to_be_little() -> None:
    known = told(all_reduce([{"backward": 0.1}, {"backward": 0.101}]))
    share = 0.001 / 0.202
    assert known["bubbles"] == pytest.approx(share)
    assert known["verdict"] == ["No worker is slow by itself.", f"Waiting takes only {share:.1%} of the workers' time."]


def test_a_worker_that_is_mostly_cancelled_is_said_to_be() -> None:
    happened = all_reduce([{"backward": 0.1}, {"backward": 0.1}])
    happened += [Cancel(1, 1.0, 0.01, 0, []) for _ in range(11)]
    known = told(happened)
    assert "Worker 1 was cancelled in 11 of 21 steps." in known["verdict"]
    assert "No worker is slow by itself." not in known["verdict"]
    assert known["slow"] == [1]
    assert not any("cancelled" in sentence for sentence in told(happened[:-1])["verdict"])


def test_bubbles_are_waiting_as_a_share_of_all_workers_time() -> None:
    known = told([Compute(0, 0.0, 4.0, 0, 1, 8), Compute(1, 0.0, 1.0, 0, 1, 8), Wait(1, 1.0, 2.0, 0)])
    # Worker 1 did nothing that is known in the fourth second, which is its time all the same.
    assert known["workers"][1]["seconds"]["elsewhere"] == 1.0
    assert (known["waiting"], known["bubbles"]) == (2.0, 0.25)


def test_efficiency_is_the_share_of_what_the_workers_would_do_alone() -> None:
    rounds, samples = 2000, 8
    happened: list[Event] = []
    for number in range(rounds):
        now = 0.5 * number
        happened += [Load(0, now, 0.05), Compute(0, now + 0.05, 0.05, number, 1, samples), Wait(0, now + 0.1, 0.3, 1)]
        happened += [Compute(1, now, 0.4, number, 1, samples)]
        happened += [Update(rank, now + 0.4, 0.1, number + 1) for rank in (0, 1)]
    known = told(happened)
    alone = samples / 0.1 + samples / 0.4
    together = 2 * samples / 0.5
    assert known["samples_per_second"] == pytest.approx(together, rel=1e-3)
    assert known["efficiency"] == pytest.approx(together / alone, rel=1e-3)


def test_without_two_updates_there_is_no_efficiency() -> None:
    known = told([Compute(0, 0.0, 1.0, 0, 1, 8), Update(0, 1.0, 0.5, 1)])
    assert (known["updates"], known["samples_per_second"], known["efficiency"]) == (1, None, None)
    assert known["seconds_per_update"] is None


def test_a_server_s_gradients_have_their_bytes_and_their_staleness() -> None:
    happened: list[Event] = [Compute(rank, 0.0, 1.0, 0, 1, 8) for rank in (0, 1)]
    happened += [
        Push(0, 1.0, 1, 0, 0, 8, [], 100, 300, "used", ""),
        Push(1, 1.5, 2, 0, 3, 8, [], 50, 350, "dropped", ""),
        Update(-1, 1.0, 0.25, 1, 64, 1),
        Update(-2, 1.0, 0.5, 1, 32, 1),
    ]
    known = told(happened)
    assert known["served"]
    assert known["staleness"] == {"mean": 0.0, "max": 0, "histogram": {0: 1}}, "of the gradient that was used"
    assert known["bytes"] == {"pushed": 150, "saved": 650, "read": 96, "sent": 0}
    assert known["servers"] == [
        {"rank": -1, "updates": 1, "seconds": 0.25, "read": 64},
        {"rank": -2, "updates": 1, "seconds": 0.5, "read": 32},
    ]
    assert [worker["staleness"] for worker in known["workers"]] == [0.0, 3.0]
