"""Threads as members: a futex wakes them as it wakes processes."""

import os
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from helpers.load import above_noise, allowed
from helpers.support import wait_until

from paceline.config import Timeouts
from paceline.errors import Mismatch, TeamTimeout, WorkerLost
from paceline.transport import Barrier, BarrierKind, Memory

PATIENT = Timeouts(barrier=60.0, notice=50.0)
SOON = 10.0
"""Seconds in which something is known at once, on a busy machine."""
SPOKEN = [intent for intent in BarrierKind if intent is not BarrierKind.PASSIVE]


class Team:
    """The chairs of all members, and what they said."""

    def __init__(self, size: int, timeouts: Timeouts = PATIENT) -> None:
        self.memory = Memory.create(Barrier.memory_size(size))
        self.said: list[str] = []
        self.members = [Barrier(self.memory, rank, size, timeouts, self.said.append) for rank in range(size)]
        for member in self.members:
            member.sign_in()

    def run(self, *jobs: Callable[[Barrier], Any]) -> list[Any]:
        """Each member does its job in a thread of its own; one job is everybody's."""
        todo = jobs * len(self.members) if len(jobs) == 1 else jobs
        with ThreadPoolExecutor(len(todo)) as pool:
            futures: list[Future[Any]] = [
                pool.submit(job, member) for job, member in zip(todo, self.members, strict=False)
            ]
            return [future.exception(60) or future.result() for future in futures]


class Undertaker:
    """Knows who has died, once they have."""

    def __init__(self, dead: dict[int, str]) -> None:
        self.dead = dead

    def lost(self, rank: int) -> str | None:
        return self.dead.get(rank)

    def end(self, rank: int, patience: float = 0.0) -> bool:
        self.dead[rank] = "died"
        return True


def barrier(member: Barrier) -> BarrierKind:
    return member.wait(BarrierKind.BARRIER)


def timed(job: Callable[[Barrier], Any]) -> Callable[[Barrier], tuple[float, BaseException]]:
    def attempt(member: Barrier) -> tuple[float, BaseException]:
        start = time.monotonic()
        with pytest.raises(Exception) as caught:
            job(member)
        return time.monotonic() - start, caught.value

    return attempt


# -- coming together -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 5])
def test_nobody_leaves_before_all_have_come(size: int) -> None:
    team = Team(size)
    came = [0] * size
    seen: list[list[int]] = []

    def job(member: Barrier) -> None:
        for number in range(1, 51):
            came[member.rank] = number
            member.wait(BarrierKind.BARRIER)
            seen.append([number, *came])

    assert team.run(job) == [None] * size
    assert len(seen) == 50 * size
    assert all(number <= other <= number + 1 for number, *others in seen for other in others)


def test_a_group_of_one_waits_for_nobody() -> None:
    member = Team(1).members[0]
    member.note[:2] = b"me"
    assert member.wait(BarrierKind.GATHER, 2) is BarrierKind.GATHER
    assert bytes(member.notes[0][: member.length(0)]) == b"me"


@pytest.mark.parametrize("size", [2, 4])
def test_everybody_reads_all_notes(size: int) -> None:
    team = Team(size)

    def job(member: Barrier) -> list[bytes]:
        text = f"rank {member.rank} ".encode() * (member.rank + 1)
        member.note[: len(text)] = text
        member.wait(BarrierKind.GATHER, len(text))
        return [bytes(note[: member.length(rank)]) for rank, note in enumerate(member.notes)]

    wanted = [f"rank {rank} ".encode() * (rank + 1) for rank in range(size)]
    assert team.run(job) == [wanted] * size


def test_a_note_may_be_as_large_as_the_capacity() -> None:
    team = Team(2)

    def job(member: Barrier) -> bool:
        member.note[: Barrier.CAPACITY] = bytes([member.rank + 1]) * Barrier.CAPACITY
        member.wait(BarrierKind.GATHER, Barrier.CAPACITY)
        return all(
            bytes(note[: Barrier.CAPACITY]) == bytes([rank + 1]) * Barrier.CAPACITY
            for rank, note in enumerate(member.notes)
        )

    assert team.run(job) == [True, True]


@pytest.mark.parametrize("size", [2, 3])
def test_no_note_is_overwritten_while_somebody_may_read_it(size: int) -> None:
    team = Team(size)
    layout = struct.Struct("=qq")

    def job(member: Barrier) -> int:
        wrong = 0
        for number in range(2000):
            layout.pack_into(member.note, 0, number, member.rank)
            member.wait(BarrierKind.UPDATE, layout.size)
            if (number + member.rank) % 7 == 0:
                time.sleep(0)
            wrong += [layout.unpack_from(note) for note in member.notes] != [(number, rank) for rank in range(size)]
        return wrong

    assert team.run(job) == [0] * size


def test_the_last_to_come_is_known() -> None:
    team = Team(3)

    def late(member: Barrier) -> int:
        first, _, third = team.members
        wait_until(lambda: first.missing() == third.missing() == [1], 20, "the others to have come")
        time.sleep(0.05)
        member.wait(BarrierKind.BARRIER)
        return member.last

    def early(member: Barrier) -> int:
        member.wait(BarrierKind.BARRIER)
        return member.last

    assert team.run(early, late, early) == [1, 1, 1]


# -- what it is about ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("intent", SPOKEN)
def test_a_barrier_is_about_what_all_came_for(intent: BarrierKind) -> None:
    assert Team(2).run(lambda member: member.wait(intent)) == [intent, intent]


def test_a_mismatch_names_the_rank_and_both_intents() -> None:
    team = Team(3)
    errors = team.run(
        lambda member: member.wait(BarrierKind.BARRIER),
        lambda member: member.wait(BarrierKind.BARRIER),
        lambda member: member.wait(BarrierKind.UPDATE),
    )
    assert all(type(error) is Mismatch for error in errors)
    assert [error.ranks for error in errors] == [(2,), (2,), (0,)]
    for rank, error in enumerate(errors):
        assert f"rank {error.ranks[0]} is at " in str(error)
        assert f"rank {rank} is at " in str(error)
        assert "a barrier" in str(error)
        assert "an update (optimizer.step)" in str(error)


def test_every_intent_is_spoken_of_in_its_own_words() -> None:
    assert len({intent.spoken for intent in BarrierKind}) == len(BarrierKind)


def test_a_passive_member_learns_what_the_others_came_for() -> None:
    team = Team(3)

    def active(member: Barrier) -> tuple[BarrierKind, list[bool]]:
        return member.wait(BarrierKind.UPDATE), list(member.passive)

    def passive(member: Barrier) -> tuple[BarrierKind, list[bool]]:
        return member.wait(BarrierKind.PASSIVE), list(member.passive)

    assert team.run(active, passive, active) == [(BarrierKind.UPDATE, [False, True, False])] * 3


def test_when_all_are_passive_the_epoch_is_over() -> None:
    team = Team(2)
    assert team.run(lambda member: member.wait(BarrierKind.PASSIVE)) == [BarrierKind.PASSIVE] * 2
    assert team.members[0].passive == [True, True]


def test_passive_members_do_not_hide_a_mismatch_of_the_others() -> None:
    errors = Team(3).run(
        lambda member: member.wait(BarrierKind.PASSIVE),
        lambda member: member.wait(BarrierKind.UPDATE),
        lambda member: member.wait(BarrierKind.CLIP),
    )
    assert all(type(error) is Mismatch for error in errors)


def test_a_carried_barrier_counts_as_one_s_own_next() -> None:
    team = Team(2)

    def ahead(member: Barrier) -> list[BarrierKind]:
        return [member.wait(BarrierKind.BARRIER), member.wait(BarrierKind.UPDATE)]

    def behind(member: Barrier) -> list[BarrierKind]:
        topic = member.wait(BarrierKind.PASSIVE)
        member.carry(topic)
        return [member.wait(BarrierKind.BARRIER), member.wait(BarrierKind.UPDATE)]

    assert team.run(ahead, behind) == [[BarrierKind.BARRIER, BarrierKind.UPDATE]] * 2


def test_a_carried_barrier_of_another_kind_is_a_mismatch() -> None:
    team = Team(2)

    def behind(member: Barrier) -> None:
        member.carry(member.wait(BarrierKind.PASSIVE))
        member.wait(BarrierKind.EPOCH)

    _, error = team.run(barrier, behind)
    assert type(error) is Mismatch
    assert "rank 1 is at the start of an epoch while the others are at a barrier" in str(error)


# -- who does not come -----------------------------------------------------------------------------------------------


def test_the_timeout_comes_when_it_is_due_and_names_those_missing() -> None:
    team = Team(4, Timeouts(barrier=0.5, notice=50.0))
    (seconds, error), _ = team.run(timed(lambda member: member.wait(BarrierKind.UPDATE)), timed(barrier))
    assert type(error) is TeamTimeout
    assert error.ranks == (2, 3)
    assert "rank 0 waited" in str(error)
    assert "for ranks 2 and 3 at an update (optimizer.step)" in str(error)
    assert "the timeout is 0.5 s" in str(error)
    assert 0.5 <= seconds < allowed(SOON)


def test_somebody_who_comes_late_does_not_give_the_missing_more_time() -> None:
    def check(factor: float) -> None:
        team = Team(3, Timeouts(barrier=1.0 * factor, notice=50.0))

        def late(member: Barrier) -> None:
            time.sleep(0.5 * factor)
            member.wait(BarrierKind.BARRIER)

        (seconds, error), _ = team.run(timed(barrier), timed(late))
        assert type(error) is TeamTimeout
        assert error.ranks == (2,)
        assert 1.0 * factor <= seconds < 1.45 * factor

    above_noise(check)


def test_whoever_comes_before_the_timeout_is_in_time() -> None:
    team = Team(2, Timeouts(barrier=SOON, notice=50.0))

    def late(member: Barrier) -> BarrierKind:
        time.sleep(0.3)
        return member.wait(BarrierKind.BARRIER)

    assert team.run(barrier, late) == [BarrierKind.BARRIER, BarrierKind.BARRIER]


def test_a_waiting_member_says_for_whom_it_waits() -> None:
    team = Team(3, Timeouts(barrier=30.0, notice=1.0))

    def late(member: Barrier) -> BarrierKind:
        wait_until(lambda: bool(team.said), 20, "rank 0 to say for whom it waits")
        return member.wait(BarrierKind.UPDATE)

    def early(member: Barrier) -> BarrierKind:
        return member.wait(BarrierKind.UPDATE)

    assert team.run(early, late, late) == [BarrierKind.UPDATE] * 3
    assert len(team.said) == 1
    assert "rank 0 waits for ranks 1 and 2 at an update (optimizer.step)" in team.said[0]
    assert "the timeout is 30 s" in team.said[0]


def test_nothing_is_said_about_a_short_wait() -> None:
    team = Team(2, Timeouts(barrier=30.0, notice=SOON))

    def late(member: Barrier) -> BarrierKind:
        time.sleep(0.3)
        return member.wait(BarrierKind.BARRIER)

    team.run(barrier, late)
    assert team.said == []


def test_a_member_that_died_is_named_at_once() -> None:
    team = Team(3)
    team.members[0].watch = Undertaker({2: "died"})
    team.members[1].watch = Undertaker({2: "died"})
    for seconds, error in team.run(timed(barrier), timed(barrier)):
        assert type(error) is WorkerLost
        assert error.ranks == (2,)
        assert "rank 2 died" in str(error)
        assert "waiting for it at a barrier" in str(error)
        assert seconds < allowed(SOON)


def test_a_death_during_the_wait_ends_it() -> None:
    team = Team(2)
    dead: dict[int, str] = {}
    team.members[0].watch = Undertaker(dead)
    timer = threading.Timer(0.3, lambda: dead.update({1: "died"}))
    timer.start()
    ((seconds, error),) = [timed(barrier)(team.members[0])]
    timer.join()
    assert type(error) is WorkerLost
    assert 0.3 <= seconds < allowed(SOON)


def test_a_member_that_has_left_is_not_waited_for() -> None:
    team = Team(2)
    team.members[1].sign_out()
    assert team.members[0].has_left(1)
    seconds, error = timed(barrier)(team.members[0])
    assert type(error) is WorkerLost
    assert error.ranks == (1,)
    assert "rank 1 has left the team: its script has ended" in str(error)
    assert seconds < allowed(SOON)


def test_what_a_member_brought_before_it_ended_counts() -> None:
    team = Team(2)

    def last_words(member: Barrier) -> None:
        member.note[:3] = b"bye"
        member.wait(BarrierKind.GATHER, 3)
        member.sign_out()

    def later(member: Barrier) -> bytes:
        time.sleep(0.3)
        member.watch = Undertaker({0: "died"})
        member.wait(BarrierKind.GATHER)
        return bytes(member.notes[0][: member.length(0)])

    assert team.run(last_words, later) == [None, b"bye"]


@pytest.mark.parametrize("spare", [False, True])
def test_a_member_that_comes_just_before_it_dies_has_come(spare: bool) -> None:
    team = Team(2)

    class Hasty:
        def lost(self, rank: int) -> str | None:
            team.members[rank].note[:3] = b"bye"
            team.members[rank].wait(BarrierKind.GATHER, 3)
            return "died"

        def end(self, rank: int, patience: float = 0.0) -> bool:
            return True

    team.members[0].watch = Hasty()
    team.members[0].spare = spare
    assert team.members[0].wait(BarrierKind.GATHER) is BarrierKind.GATHER
    assert bytes(team.members[0].notes[1][: team.members[0].length(1)]) == b"bye"


def test_a_member_that_can_be_spared_is_evicted_when_it_is_late() -> None:
    team = Team(3, Timeouts(barrier=0.5))
    watch = Undertaker({})
    for member in team.members:
        member.spare, member.watch = True, watch
    assert team.run(barrier, barrier) == [BarrierKind.BARRIER] * 2
    assert watch.dead == {2: "died"}
    for member in team.members[:2]:
        assert member.departed == {2}
        assert member.gone(2) == "did not come to a barrier within 0.5 s and had to be evicted"
        assert not member.has_left(2)
    assert team.run(barrier, barrier) == [BarrierKind.BARRIER] * 2


def test_an_eviction_is_told_from_a_death_by_a_member_that_notices_first() -> None:
    team = Team(3)
    noticed: list[str | None] = []

    class Slow(Undertaker):
        def end(self, rank: int, patience: float = 0.0) -> bool:
            ended = super().end(rank, patience)
            noticed.append(team.members[1].gone(2))
            return ended

    team.members[0].watch = team.members[1].watch = Slow({})
    assert team.members[0].evict(2, "was late")
    assert noticed == ["was late"]


def test_a_member_that_could_not_be_evicted_has_no_reason() -> None:
    team = Team(2)
    assert not team.members[0].evict(1, "was late")
    team.members[0].watch = Undertaker({1: "died"})
    assert team.members[0].gone(1) == "died"


def test_a_member_does_not_count_the_time_in_which_it_was_halted_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    team = Team(2, Timeouts(barrier=1.0))
    member, clock, naps = team.members[0], [100.0], [30.0, 0.1, 0.1]

    def sleep(*_: object) -> None:
        clock[0] += naps.pop(0) if naps else 0.1
        if not naps:
            team.members[1].wait(BarrierKind.BARRIER)

    monkeypatch.setattr("paceline.transport.step_counter.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(member._words, "sleep", sleep)
    assert member.wait(BarrierKind.BARRIER) is BarrierKind.BARRIER


def test_whoever_left_after_one_barrier_is_missed_at_the_next() -> None:
    team = Team(3)
    team.run(barrier)
    team.members[2].sign_out()
    for _, error in team.run(timed(barrier), timed(barrier)):
        assert type(error) is WorkerLost
    assert [member.missing() for member in team.members[:2]] == [[2], [2]]


def test_the_end_of_an_epoch_does_not_wait_for_those_who_have_left() -> None:
    team = Team(3)
    team.members[1].sign_out()
    assert team.run(
        lambda member: member.wait(BarrierKind.PASSIVE), lambda _: None, lambda member: member.wait(BarrierKind.PASSIVE)
    ) == [BarrierKind.PASSIVE, None, BarrierKind.PASSIVE]


@pytest.mark.parametrize("intent", [BarrierKind.BARRIER, BarrierKind.UPDATE, BarrierKind.GATHER])
def test_whoever_needs_them_after_that_learns_that_they_have_left(intent: BarrierKind) -> None:
    team = Team(2)
    team.members[1].sign_out()
    team.members[0].wait(BarrierKind.PASSIVE)
    with pytest.raises(WorkerLost, match="rank 1 has left the team"):
        team.members[0].wait(intent)


def test_members_find_each_other_s_process() -> None:
    team = Team(2)
    assert team.members[0].pid(1) == os.getpid()
    assert not team.members[0].has_left(1)


# -- the end of numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_the_count_of_barriers_may_outgrow_its_word(size: int) -> None:
    team = Team(size)
    start = 2**32 - 20
    for member in team.members:
        member._count = start
        member._words.write(member.rank, start)

    def job(member: Barrier) -> int:
        wrong = 0
        for number in range(40):
            member.note[:8] = (number * size + member.rank).to_bytes(8, "little")
            member.wait(BarrierKind.GATHER, 8)
            values = [int.from_bytes(note[:8], "little") for note in member.notes]
            wrong += values != [number * size + rank for rank in range(size)]
        return wrong

    assert team.run(job) == [0] * size


@pytest.mark.parametrize("count", [2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1])
def test_whoever_is_missing_is_known_at_every_count(count: int) -> None:
    team = Team(2, Timeouts(barrier=0.2, notice=20.0))
    for member in team.members:
        member._count = count
        member._words.write(member.rank, count)
    seconds, error = timed(barrier)(team.members[0])
    assert type(error) is TeamTimeout
    assert error.ranks == (1,)
    assert seconds >= 0.2


def test_a_sleeper_at_a_large_count_is_woken_at_once() -> None:
    for _ in range(5):  # or later, if something else keeps the machine busy
        if (delay := median_delay(2**32 - 3)) < 0.03:
            break
    assert delay < 0.03


def median_delay(count: int) -> float:
    """Seconds from the last one's coming until the other goes on."""
    team = Team(2)
    for member in team.members:
        member._count = count
        member._words.write(member.rank, count)
    delays: list[float] = []
    came = 0.0

    def early(member: Barrier) -> None:
        for _ in range(5):
            member.wait(BarrierKind.BARRIER)
            delays.append(time.monotonic() - came)
            member.wait(BarrierKind.BARRIER)

    def late(member: Barrier) -> None:
        nonlocal came
        for _ in range(5):
            time.sleep(0.05)
            came = time.monotonic()
            member.wait(BarrierKind.BARRIER)
            member.wait(BarrierKind.BARRIER)

    assert team.run(early, late) == [None, None]
    return sorted(delays)[2]
