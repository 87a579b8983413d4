"""The share of transfers between machines that is hidden behind computing follows from transfers and waits alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from helpers.summaries import summarise

from paceline.events import Event, Omitted, Pass, StageTransfer, Wait, transfers
from paceline.events.summary import merge
from paceline.events.thinning import Thinner
from paceline.events.transfers import Communication, Transfers
from paceline.report.source import open_run


def counted(events: Sequence[Event]) -> Communication:
    found = Transfers()
    for event in random.Random(0).sample(events, len(events)):  # in any order
        if isinstance(event, StageTransfer | Wait | Omitted):
            found.add(event)
    result = found.result()
    assert result is not None
    return result


def share(*events: StageTransfer | Wait) -> float | None:
    return counted(events).hidden


def test_a_transfer_is_hidden_while_its_receiver_does_not_wait() -> None:
    transfer = StageTransfer(1, 10.0, 4.0, 0, 100)
    assert share(transfer) == 1.0
    assert share(transfer, Wait(1, 13.0, 2.0, 0)) == 0.75
    assert share(transfer, Wait(0, 10.0, 4.0, 1)) == 1.0  # another worker's
    assert share(transfer, Wait(1, 2.0, 8.0, 0), Wait(1, 14.0, 1.0, 0)) == 1.0  # for what had not been sent
    assert share(transfer, Wait(1, 9.0, 9.0, 0)) == 0.0


def test_transfers_that_overlap_count_once_and_workers_are_summed() -> None:
    two = StageTransfer(1, 0.0, 2.0, 0, 10), StageTransfer(1, 1.0, 3.0, 0, 10)
    assert share(*two, Wait(1, 0.0, 1.0, 0)) == 0.75
    assert share(*two, StageTransfer(0, 0.0, 4.0, 1, 10), Wait(1, 0.0, 1.0, 0), Wait(1, 3.0, 2.0, 0)) == 0.75


def test_the_summary_has_it_only_if_something_went_between_machines() -> None:
    events: list[Event] = [Wait(0, 1.0, 1.0, 1)]
    assert summarise(events, 2).communication is None
    found = summarise([*events, StageTransfer(0, 0.5, 1.0, 1, 64)], 2).communication
    assert found is not None
    assert (found.seconds, found.bytes, found.hidden) == (1.0, 64, 0.5)


# -- of long runs ----------------------------------------------------------------------------------------------------


def slow_link(seconds: float) -> list[Event]:
    """The events of a worker in the order of their recording: transfers come up to 3 s long, after the step's waits."""
    draw, now, found = random.Random(3), 0.0, list[Event]()
    while now < seconds:
        late, begin, waited = list[Event](), now, 0.0
        for _ in range(4):
            length, waited = draw.uniform(0.01, 3.0), draw.uniform(0.0, 2.0)
            late.append(StageTransfer(0, now, length, 1, 1000))
            found.append(Pass(0, now, 0.3, "F", 0, 0, 0, 16, 0))
            found.append(Wait(0, now + max(0.3, length - waited), waited, 1))
            now += max(0.3, length - waited) + waited
        assert now > begin
        found += late
    return found


def thinned(events: Sequence[Event], level: int) -> list[Event]:
    """The same after 20 s of full record."""
    thinner, found = Thinner(0.0), list[Event]()
    for event in events:
        thinner.level = level if event.start > 20.0 else 0
        found += thinner.add(event)
    return found + thinner.settle()


def by_sampling(events: Sequence[Event], out: Sequence[Event]) -> tuple[float, float]:
    """Seconds of transfers, and the hidden share, from a look at every hundredth of a second that is not in `out`."""
    under_way, hidden, last = 0, 0, max(event.start for event in events)
    spans = {
        kind: [(event.start, event.start + event.seconds) for event in (*events, *out) if isinstance(event, kind)]
        for kind in (StageTransfer, Wait, Omitted)
    }
    for number in range(int(100 * (last + 4.0))):
        inside = {kind: any(a <= number / 100 < b for a, b in some) for kind, some in spans.items()}
        if inside[StageTransfer] and not inside[Omitted]:
            under_way, hidden = under_way + 1, hidden + (not inside[Wait])
    return under_way / 100, hidden / under_way


@pytest.mark.parametrize("level", [1, 2])
def test_the_share_of_a_thinned_record_is_that_of_the_time_that_is_recorded_in_full(level: int) -> None:
    """Though waits and transfers reach from windows that are recorded into others that are not, and back."""
    events = slow_link(200.0)
    whole, part = counted(events), counted(thinned(events, level))
    sums = [event for event in thinned(events, level) if isinstance(event, Omitted)]
    assert len(sums) > 10
    assert (part.bytes, part.partial, whole.partial) == (whole.bytes, True, False)
    seconds, hidden = by_sampling(events, sums)
    assert 20.0 < part.seconds < whole.seconds
    assert (part.seconds, part.hidden) == (pytest.approx(seconds, rel=0.01), pytest.approx(hidden, abs=0.01))
    assert (whole.seconds, whole.hidden) == pytest.approx(by_sampling(events, []), rel=0.01)


def test_bytes_count_where_all_is_in_sums() -> None:
    found = counted(thinned([event for event in slow_link(80.0) if event.start > 20.0], 64))
    assert (found.seconds, found.hidden, found.partial) == (0.0, None, True)
    assert found.bytes == 1000 * sum(isinstance(e, StageTransfer) and e.start > 20.0 for e in slow_link(80.0))
    assert found.sentences == [f"Between machines {found.bytes / 1e3:.0f} kB were sent."]


def test_time_counts_until_there_is_too_much_of_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more waits than transfers: those that are not kept do not make transfers look hidden."""
    monkeypatch.setattr(transfers, "_MOST", 30)
    events: list[Event] = []
    for step in range(100):
        events.append(StageTransfer(0, step, 1.0, 1, 8))
        events += [Wait(0, step + 0.2 * part, 0.1, 1) for part in range(5)]
    found = Transfers()
    for event in events:
        if isinstance(event, StageTransfer | Wait):
            found.add(event)
    result = found.result()
    assert result is not None
    assert (result.seconds, result.hidden) == (pytest.approx(6.0), pytest.approx(0.5))
    assert (result.bytes, result.partial) == (800, True)


def test_a_report_says_of_which_part_the_share_is(tmp_path: Path) -> None:
    for name, events in (("whole", slow_link(100.0)), ("part", thinned(slow_link(100.0), 1))):
        (tmp_path / name / "streams").mkdir(parents=True)
        lines = b"".join(msgspec.json.encode(event) + b"\n" for event in events)
        (tmp_path / name / "streams" / "0.jsonl").write_bytes(lines)
        told = merge(tmp_path / name, 1).communication
        facts = open_run(tmp_path / name).facts()
        assert facts["communication"] == msgspec.to_builtins(told)
        (sentence,) = (one for one in facts["verdict"] if one.startswith("Between machines"))
        assert sentence.endswith("of that is hidden behind computing.")
        assert ("where all of them and all waits are known" in sentence) == (name == "part")
