"""The ledger gives every sample out, to one worker at a time, until each is done exactly once an epoch."""

import random
from collections import Counter, deque
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.data.ledger import Lease, Ledger

WORKERS = 4
LOADER = 0


def opened(
    count: int,
    sizes: list[int],
    workers: int = WORKERS,
    *,
    in_turns: bool = False,
    drop_last: bool = False,
) -> Ledger:
    """A ledger with one open epoch, in which all workers take part."""
    ledger = Ledger(range(workers), in_turns=in_turns)
    ledger.open(LOADER, 0, list(range(count)), sizes, drop_last=drop_last)
    for worker in range(workers):
        ledger.enter(worker, LOADER)
    return ledger


def taken(ledger: Ledger, worker: int) -> list[Lease]:
    """All that a worker can get."""
    leases = []
    while (lease := ledger.lease(worker, LOADER)) is not None:
        leases.append(lease)
    return leases


def numbers(leases: list[Lease]) -> list[int]:
    return [lease.number for lease in leases]


# -- whatever happens ------------------------------------------------------------------------------------------------


class Epochs(RuleBasedStateMachine):
    """Workers lease, finish, give back, fetch ahead, carry, quit and die as they like, over several epochs."""

    in_turns = False

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(range(WORKERS), in_turns=self.in_turns)
        self.epoch = -1
        self.alive = set(range(WORKERS))
        self.here: set[int] = set()
        self.out: dict[int, tuple[int, Lease]] = {}
        self.late: set[int] = set()
        """Leases that count as done in their own epoch, and are pushed in a later one."""
        self.wanted: Counter[int] = Counter()
        """What the running epoch must have done in the end, by sample."""
        self.done: Counter[int] = Counter()
        self.seen: set[int] = set()
        self.open_epoch()

    def open_epoch(self) -> None:
        self.epoch += 1
        count = [11, 8, 0, 13][self.epoch % 4]
        assert self.ledger.may_open(LOADER, self.epoch)
        samples = self.ledger.open(LOADER, self.epoch, list(range(count)), [3, 2], drop_last=False)
        assert samples == count
        assert not self.ledger.may_open(LOADER, self.epoch)
        self.wanted, self.done = Counter(range(count)), Counter()
        self.here = set(self.alive)
        for worker in self.alive:
            self.ledger.enter(worker, LOADER)

    def mine(self, worker: int) -> list[Lease]:
        return [lease for owner, lease in self.out.values() if owner == worker]

    def back(self, leases: list[Lease]) -> None:
        """These went back: whoever asks gets them, in the epoch that runs now."""
        for lease in leases:
            del self.out[lease.number]
            if lease.epoch != self.epoch:
                self.wanted.update(lease.keys)
            elif lease.number in self.late:
                self.done.subtract(lease.keys)
            self.late.discard(lease.number)

    @precondition(lambda self: self.here)
    @rule(data=st.data(), ahead=st.booleans())
    def lease(self, data: st.DataObject, ahead: bool) -> None:
        worker = data.draw(st.sampled_from(sorted(self.here)))
        lease = self.ledger.lease(worker, LOADER, ahead=ahead)
        if lease is not None:
            assert lease.number not in self.seen
            assert lease.epoch == self.epoch
            self.seen.add(lease.number)
            self.out[lease.number] = (worker, lease)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.out)))
        _, lease = self.out.pop(number)
        self.ledger.done([number])
        if number in self.late:
            self.late.discard(number)
        elif lease.epoch == self.epoch:
            self.done.update(lease.keys)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.out)))
        self.ledger.give_back([number])
        self.back([self.out[number][1]])

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def carry(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.here)))
        self.ledger.carry(worker, LOADER)
        for lease in self.mine(worker):
            if lease.number not in self.late and lease.epoch == self.epoch:
                self.late.add(lease.number)
                self.done.update(lease.keys)

    @precondition(lambda self: len(self.here) > 1)
    @rule(data=st.data())
    def quit(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.here)))
        leases = self.ledger.quit(worker, LOADER, self.epoch)
        assert sorted(numbers(leases)) == sorted(numbers(self.mine(worker)))
        self.here.discard(worker)
        self.back(leases)

    @precondition(lambda self: len(self.here) > 1 and len(self.alive) > 1)
    @rule(data=st.data(), pushed=st.booleans())
    def leave(self, data: st.DataObject, pushed: bool) -> None:
        worker = data.draw(st.sampled_from(sorted(self.here)))
        kept = numbers(self.mine(worker))[:1] if pushed else []
        leases = self.ledger.leave(worker, kept)
        assert sorted([*numbers(leases), *kept]) == sorted(numbers(self.mine(worker)))
        self.here.discard(worker)
        self.alive.discard(worker)
        self.back(leases)

    @rule()
    def end(self) -> None:
        """Whoever is left does what is left; then the next epoch begins."""
        worker = min(self.here)
        for number in sorted(number for number, (_, lease) in self.out.items() if lease.epoch == self.epoch):
            if number not in self.late:
                _, lease = self.out.pop(number)
                self.ledger.done([number])
                self.done.update(lease.keys)
        for other in sorted(self.here):
            for lease in taken(self.ledger, other):
                self.ledger.done([lease.number])
                self.done.update(lease.keys)
        assert +self.done == self.wanted
        assert self.ledger.is_over(LOADER)
        assert self.ledger.lease(worker, LOADER) is None
        self.open_epoch()

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        given = Counter(chain(*(lease.keys for _, lease in self.out.values() if lease.epoch == self.epoch)))
        late = Counter(
            chain(*(self.out[n][1].keys for n in self.late if n in self.out and self.out[n][1].epoch == self.epoch))
        )
        assert +(given - late + self.done) <= self.wanted
        assert self.ledger.is_over(LOADER) == (+self.done == self.wanted)


class TurnsOfEpochs(Epochs):
    in_turns = True


TestEpochs = Epochs.TestCase
TestEpochs.settings = settings(max_examples=60, stateful_step_count=40)
TestTurnsOfEpochs = TurnsOfEpochs.TestCase
TestTurnsOfEpochs.settings = settings(max_examples=60, stateful_step_count=40)


@given(st.integers(0, 60), st.lists(st.integers(1, 7), min_size=1, max_size=4), st.booleans(), st.integers(0, 2**32))
def test_every_sample_is_given_out_once_and_in_order(count: int, sizes: list[int], in_turns: bool, seed: int) -> None:
    ledger = opened(count, sizes, in_turns=in_turns)
    source = random.Random(seed)
    workers, leases = list(range(WORKERS)), []
    while workers:
        worker = source.choice(workers)
        lease = ledger.lease(worker, LOADER)
        if lease is None:
            workers.remove(worker)
        else:
            leases.append(lease)
    leases.sort(key=lambda lease: lease.first)
    assert list(chain(*(lease.keys for lease in leases))) == list(range(count))
    assert [lease.first for lease in leases] == [lease.keys[0] for lease in leases]
    assert not ledger.is_over(LOADER) or not count
    ledger.done(numbers(leases))
    assert ledger.is_over(LOADER)


# -- minibatches -----------------------------------------------------------------------------------------------------


def test_sizes_come_round_again() -> None:
    leases = taken(opened(16, [3, 2, 1]), 0)
    assert [lease.keys for lease in leases] == [[0, 1, 2], [3, 4], [5], [6, 7, 8], [9, 10], [11], [12, 13, 14], [15]]
    assert [lease.first for lease in leases] == [0, 3, 5, 6, 9, 11, 12, 15]


def test_whole_batches_are_given_out_as_they_are() -> None:
    ledger = Ledger(range(2), in_turns=False)
    assert ledger.open(LOADER, 0, [["a"], ["b", "c"], ["d", "e", "f"]], [], drop_last=True) == 6
    ledger.enter(0, LOADER)
    leases = taken(ledger, 0)
    assert [lease.keys for lease in leases] == [["a"], ["b", "c"], ["d", "e", "f"]]
    assert [lease.first for lease in leases] == [0, 1, 2]


@pytest.mark.parametrize(("count", "samples"), [(12, 12), (13, 12), (11, 9), (9, 9), (2, 0), (0, 0)])
def test_without_turns_only_an_incomplete_minibatch_is_dropped(count: int, samples: int) -> None:
    ledger = Ledger(range(2), in_turns=False)
    assert ledger.open(LOADER, 0, list(range(count)), [3, 3], drop_last=True) == samples
    assert list(chain(*(lease.keys for lease in taken(ledger, 1)))) == list(range(samples))


@pytest.mark.parametrize(("count", "samples"), [(12, 12), (13, 12), (15, 12), (11, 6), (17, 12), (18, 18), (5, 0)])
def test_in_turns_an_incomplete_round_is_dropped(count: int, samples: int) -> None:
    ledger = Ledger(range(2), in_turns=True)
    assert ledger.open(LOADER, 0, list(range(count)), [3, 3], drop_last=True) == samples
    seen = [taken(ledger, worker) for worker in range(2)]
    assert len(seen[0]) == len(seen[1]) == samples // 6
    assert sorted(chain(*(lease.keys for lease in chain(*seen)))) == list(range(samples))


def test_loaders_do_not_mix() -> None:
    ledger = Ledger(range(2), in_turns=False)
    ledger.open(0, 0, list(range(4)), [2], drop_last=False)
    ledger.open(1, 0, list(range(10, 14)), [2], drop_last=False)
    ledger.enter(0, 0)
    ledger.enter(0, 1)
    first, other = ledger.lease(0, 0), ledger.lease(0, 1)
    assert first is not None and other is not None
    assert (first.keys, other.keys) == ([0, 1], [10, 11])
    assert numbers(ledger.quit(0, 0, 0)) == [first.number]
    assert numbers(ledger.held_by(0)) == [other.number]
    ledger.done([other.number])
    last = ledger.lease(0, 1)
    assert last is not None and last.keys == [12, 13]
    ledger.done([last.number])
    assert ledger.is_over(1)


# -- turns -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(0, 23), st.integers(0, 2**32))
def test_in_turns_rank_r_gets_every_p_th_minibatch_from_the_r_th(workers: int, minibatches: int, seed: int) -> None:
    ledger = opened(2 * minibatches, [2], workers, in_turns=True)
    seen: list[list[int]] = [[] for _ in range(workers)]
    source, asking = random.Random(seed), list(range(workers))
    while asking:
        worker = source.choice(asking)
        lease = ledger.lease(worker, LOADER)
        if lease is None:
            asking.remove(worker)
        else:
            seen[worker].append(lease.first // 2)
    assert seen == [list(range(worker, minibatches, workers)) for worker in range(workers)]


@pytest.mark.parametrize("how", ["quits", "dies"])
def test_the_turns_of_whoever_has_left_go_to_the_others(how: str) -> None:
    ledger = opened(24, [2], 3, in_turns=True)
    first = ledger.lease(1, LOADER)
    assert first is not None and first.keys == [2, 3]
    gone = ledger.quit(1, LOADER, 0) if how == "quits" else ledger.leave(1)
    assert numbers(gone) == [first.number]
    again = ledger.lease(2, LOADER)
    assert again is not None and again.keys == [2, 3]
    rest = [*taken(ledger, 0), *taken(ledger, 2), again]
    assert sorted(chain(*(lease.keys for lease in rest))) == list(range(24))
    ledger.done(numbers(rest))
    assert ledger.is_over(LOADER)


def test_after_a_death_the_next_epoch_is_shared_among_those_who_live() -> None:
    ledger = opened(4, [2], 3, in_turns=True)
    ledger.leave(0)
    ledger.done([*numbers(taken(ledger, 1)), *numbers(taken(ledger, 2))])
    ledger.open(LOADER, 1, list(range(8)), [2], drop_last=False)
    assert [lease.first for lease in taken(ledger, 1)] == [0, 4]
    assert [lease.first for lease in taken(ledger, 2)] == [2, 6]


# -- fetching ahead --------------------------------------------------------------------------------------------------


def test_who_fetches_ahead_leaves_the_others_a_fair_share() -> None:
    ledger = opened(40, [1])
    hoard = []
    while (lease := ledger.lease(0, LOADER, ahead=True)) is not None:
        hoard.append(lease)
        assert len(hoard) <= 40
    assert len(hoard) < 40 / 2
    rest = list(chain(*(taken(ledger, worker) for worker in range(1, WORKERS))))
    assert len(hoard) + len(rest) == 40


def test_who_is_faster_may_fetch_more_ahead() -> None:
    ledger = opened(60, [1], workers=2)
    for _ in range(9):
        fast = ledger.lease(0, LOADER)
        assert fast is not None
        ledger.done([fast.number])
    slow = ledger.lease(1, LOADER)
    assert slow is not None
    ledger.done([slow.number])
    ahead = {0: 0, 1: 0}
    asking = deque([0, 1])
    while asking:
        worker = asking.popleft()
        if ledger.lease(worker, LOADER, ahead=True) is not None:
            ahead[worker] += 1
            asking.append(worker)
    assert ahead[0] > 2 * ahead[1] > 0


def test_at_the_end_there_is_something_left_for_whoever_needs_it() -> None:
    ledger = opened(3, [1])
    ahead = [ledger.lease(0, LOADER, ahead=True) for _ in range(3)]
    assert [lease is not None for lease in ahead] == [True, True, False]
    needed = ledger.lease(1, LOADER)
    assert needed is not None and needed.keys == [2]
    assert ledger.lease(2, LOADER) is None


def test_in_turns_all_of_one_s_own_may_be_fetched_ahead() -> None:
    ledger = opened(12, [1], workers=3, in_turns=True)
    keys = []
    while (lease := ledger.lease(1, LOADER, ahead=True)) is not None:
        keys += lease.keys
    assert keys == [1, 4, 7, 10]


# -- the end of an epoch ---------------------------------------------------------------------------------------------


def test_an_epoch_is_over_only_when_all_is_done() -> None:
    ledger = opened(6, [2])
    leases = taken(ledger, 0)
    assert not ledger.is_over(LOADER)
    assert ledger.lease(1, LOADER) is None
    ledger.done(numbers(leases)[:2])
    assert not ledger.is_over(LOADER)
    ledger.give_back(numbers(leases)[2:])
    again = ledger.lease(1, LOADER)
    assert again is not None and again.keys == leases[2].keys
    assert not ledger.may_open(LOADER, 1)
    ledger.done([again.number])
    assert ledger.is_over(LOADER) and ledger.may_open(LOADER, 1)
    assert not ledger.may_open(LOADER, 0)


def test_an_epoch_is_over_when_nobody_takes_part_any_more() -> None:
    ledger = opened(6, [2], workers=3)
    ledger.quit(0, LOADER, 0)
    ledger.leave(1)
    assert not ledger.is_over(LOADER)
    ledger.quit(2, LOADER, 0)
    assert ledger.is_over(LOADER)


def test_the_end_of_an_epoch_is_noted_once() -> None:
    ledger = opened(0, [2])
    assert ledger.is_over(LOADER)
    assert ledger.close(LOADER)
    assert not ledger.close(LOADER)


def test_what_was_given_back_comes_first_and_in_its_order() -> None:
    ledger = opened(10, [2])
    leases = [ledger.lease(worker, LOADER) for worker in (0, 1, 2)]
    ledger.give_back([lease.number for lease in leases if lease is not None])
    assert [lease.keys for lease in taken(ledger, 3)] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_to_quit_an_epoch_that_is_no_longer_open_changes_nothing() -> None:
    ledger = opened(4, [2])
    ledger.done(numbers(taken(ledger, 0)))
    ledger.open(LOADER, 1, list(range(4)), [2], drop_last=False)
    lease = ledger.lease(0, LOADER)
    assert lease is not None
    assert ledger.quit(0, LOADER, 0) == []
    assert numbers(ledger.held_by(0)) == [lease.number]


# -- gradients that are pushed in a later epoch ----------------------------------------------------------------------


def test_a_carried_lease_lets_its_epoch_end_and_is_done_later() -> None:
    ledger = opened(4, [2], workers=2)
    kept, other = ledger.lease(0, LOADER), ledger.lease(1, LOADER)
    assert kept is not None and other is not None
    ledger.done([other.number])
    ledger.carry(0, LOADER)
    ledger.carry(0, LOADER)
    assert ledger.is_over(LOADER)
    assert ledger.open(LOADER, 1, [7, 8], [2], drop_last=False) == 2
    ledger.enter(0, LOADER)
    ledger.done([kept.number])
    assert not ledger.is_over(LOADER)
    last = ledger.lease(0, LOADER)
    assert last is not None and last.keys == [7, 8]
    ledger.done([last.number])
    assert ledger.is_over(LOADER)


def test_a_carried_lease_that_comes_back_in_its_own_epoch_is_open_again() -> None:
    ledger = opened(2, [2], workers=2)
    kept = ledger.lease(0, LOADER)
    assert kept is not None
    ledger.carry(0, LOADER)
    assert ledger.is_over(LOADER)
    ledger.give_back([kept.number])
    assert not ledger.is_over(LOADER)
    again = ledger.lease(1, LOADER)
    assert again is not None and again.keys == kept.keys
    ledger.done([again.number])
    assert ledger.is_over(LOADER)


def test_a_carried_lease_that_comes_back_in_a_later_epoch_is_an_extra_of_it() -> None:
    ledger = opened(2, [2], workers=2)
    kept = ledger.lease(0, LOADER)
    assert kept is not None
    ledger.carry(0, LOADER)
    ledger.open(LOADER, 1, [7, 8], [2], drop_last=False)
    for worker in range(2):
        ledger.enter(worker, LOADER)
    assert numbers(ledger.leave(0)) == [kept.number]
    leases = taken(ledger, 1)
    assert [lease.keys for lease in leases] == [[0, 1], [7, 8]]
    assert [lease.epoch for lease in leases] == [1, 1]
    ledger.done(numbers(leases)[:1])
    assert not ledger.is_over(LOADER)
    ledger.done(numbers(leases)[1:])
    assert ledger.is_over(LOADER)


def test_what_a_dead_worker_had_pushed_is_not_given_to_others() -> None:
    ledger = opened(4, [2], workers=2)
    pushed, lost = ledger.lease(0, LOADER), ledger.lease(0, LOADER)
    assert pushed is not None and lost is not None
    assert numbers(ledger.leave(0, [pushed.number])) == [lost.number]
    assert [lease.keys for lease in taken(ledger, 1)] == [lost.keys]
    ledger.done([lost.number + 1, pushed.number])
    assert ledger.is_over(LOADER)


# -- the ends of epochs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(100))
def test_workers_that_take_turns_have_samples_together_until_the_last_update_whoever_comes_and_goes(seed: int) -> None:
    chance = random.Random(seed)
    ledger, workers = Ledger(range(3), in_turns=True), {0, 1, 2}
    samples = chance.randint(20, 60)
    ledger.open(0, 0, range(samples), [1, 1, 1], drop_last=False)
    for worker in workers:
        ledger.enter(worker, 0)
    sizes, late = [], set[int]()
    while not ledger.is_over(0):
        held = {worker: lease for worker in sorted(workers) if (lease := ledger.lease(worker, 0)) is not None}
        if chance.random() < 0.2 and len(workers) > 1:
            lost = chance.choice(sorted(workers))
            workers.discard(lost)
            ledger.leave(lost)
            held.pop(lost, None)
            idle = workers - held.keys()
            held |= {worker: lease for worker in idle if (lease := ledger.lease(worker, 0)) is not None}
        sizes += [(len(held), len(workers))] if held else []
        ledger.done([lease.number for lease in held.values()])
        if chance.random() < 0.2 and len(workers | late) < 3:
            late.add(min({0, 1, 2} - workers))
            ledger.join(min(late))
            ledger.enter(min(late), 0)
        elif chance.random() < 0.4:  # it has been let in, and its first request comes later
            workers |= late
            late.clear()
    assert all(made == there for made, there in sizes[:-1]), sizes
    assert sum(made for made, _ in sizes) == samples


def test_what_was_fetched_ahead_and_not_begun_can_go_to_another_worker() -> None:
    ledger = Ledger(range(2), in_turns=False)
    ledger.open(0, 0, range(40), [1, 1], drop_last=False)
    for worker in (0, 1):
        ledger.enter(worker, 0)
    mine = [lease.number for _ in range(4) if (lease := ledger.lease(0, 0, ahead=True)) is not None]
    assert len(mine) == 4
    assert ledger.fetched(0, 0, pushed=[], waits=False) == mine[1:], "it computes the first"
    assert ledger.fetched(0, 0, pushed=[], waits=True) == mine
    assert ledger.fetched(0, 0, pushed=mine[:1], waits=False) == mine[2:]
    ledger.begin(mine[2])
    assert ledger.fetched(0, 0, pushed=[], waits=False) == [mine[1], mine[3]]
    here = ledger.lease(0, 0)
    assert here is not None
    assert ledger.fetched(0, 0, pushed=[], waits=False) == [mine[1], mine[3]], "what is not fetched ahead is begun"
    ledger.give_back([mine[3]])
    assert ledger.fetched(0, 0, pushed=[], waits=False) == [mine[1]]
    again = ledger.lease(1, 0)
    assert again is not None
    assert again.keys == [3]


def test_workers_that_take_turns_keep_what_they_have_fetched_ahead_until_one_comes_or_goes() -> None:
    ledger = Ledger(range(3), in_turns=True)
    ledger.open(0, 0, range(30), [1, 1, 1], drop_last=False)
    mine = [lease.number for _ in range(3) if (lease := ledger.lease(0, 0, ahead=True)) is not None]
    assert ledger.fetched(0, 0, pushed=[], waits=False) == []
    ledger.leave(2)
    assert ledger.fetched(0, 0, pushed=[], waits=False) == mine[1:]
