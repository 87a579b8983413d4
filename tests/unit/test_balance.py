from paceline.data.balance import Balancer

Change = tuple[int, list[int]]


def balancer(workers: int, total: int, *, on: bool = True) -> tuple[Balancer, list[Change]]:
    changes: list[Change] = []
    return Balancer(workers, total, on=on, changed=lambda start, shares: changes.append((start, shares))), changes


def run(one: Balancer, seconds_per_sample: list[float], rounds: range, ahead: int = 0) -> None:
    """Each worker computes its share of each round at its own pace."""
    for number in rounds:
        shares = one.shares(number)
        paces = [(share * pace, share) for share, pace in zip(shares, seconds_per_sample, strict=True)]
        one.measure(paces, number, ahead)


def test_it_begins_with_an_even_split() -> None:
    one, changes = balancer(3, 64)
    assert one.shares(0) == [22, 21, 21]
    assert changes == []


def test_a_worker_four_times_slower_gets_a_quarter_of_the_other_s_share() -> None:
    one, changes = balancer(2, 100)
    run(one, [0.001, 0.004], range(60))
    assert one.shares(60) == [80, 20]
    assert [shares for _, shares in changes] == [[80, 20]]


def test_shares_of_many_unlike_workers_come_near_their_proportion() -> None:
    one, _ = balancer(4, 1000)
    speeds = [1.0, 2.0, 3.0, 4.0]
    run(one, [1 / speed for speed in speeds], range(100))
    assert all(abs(share - 100 * speed) <= 1 for share, speed in zip(one.shares(100), speeds, strict=True))


def test_a_steady_overhead_per_step_does_not_keep_it_from_settling() -> None:
    one, changes = balancer(2, 120)
    for number in range(300):
        shares = one.shares(number)
        paces = [(0.01 + share * pace, share) for share, pace in zip(shares, [0.001, 0.003], strict=True)]
        one.measure(paces, number, 0)
    ends = [0.01 + share * pace for share, pace in zip(one.shares(300), [0.001, 0.003], strict=True)]
    assert max(ends) < 1.06 * min(ends)
    assert len(changes) < 6


def test_a_new_split_counts_only_after_what_loaders_may_have_fetched() -> None:
    ahead = 5
    one, changes = balancer(2, 100)
    before = [one.shares(number) for number in range(40)]
    for number in range(40):
        run(one, [0.001, 0.004], range(number, number + 1), ahead)
        if changes:
            break
    (start, shares) = changes[0]
    assert start > number + ahead
    assert [one.shares(later) for later in range(start)] == before[:start]
    assert one.shares(start) == one.shares(start + 1000) == shares == [80, 20]


def test_what_was_measured_under_a_split_on_its_way_out_is_forgotten() -> None:
    one, changes = balancer(2, 100)
    number = 0
    while not changes:
        run(one, [0.001, 0.004], range(number, number + 1), ahead=20)
        number += 1
    start = changes[0][0]
    run(one, [0.001, 0.4], range(number, start))
    run(one, [0.001, 0.004], range(start, start + 40))
    assert changes == [(start, [80, 20])]


def test_rounds_that_were_fetched_keep_their_split_through_every_change() -> None:
    ahead = 3
    one, changes = balancer(2, 100)
    promised: dict[int, list[int]] = {}
    for number in range(200):
        for fetched in range(number, number + ahead + 1):
            assert one.shares(fetched) == promised.setdefault(fetched, one.shares(fetched))
        slow = [0.001, 0.004] if number < 100 else [0.004, 0.001]
        run(one, slow, range(number, number + 1), ahead)
    assert one.shares(200) == [20, 80]
    assert len(changes) >= 2


def test_equal_measurements_lead_to_equal_decisions() -> None:
    (one, first), (other, second) = balancer(3, 90), balancer(3, 90)
    for number in range(80):
        paces = [(0.01 * (1 + (number * rank) % 5), 30) for rank in range(3)]
        one.measure(paces, number, 2)
        other.measure(paces, number, 2)
    assert first == second != []
    assert [one.shares(number) for number in range(90)] == [other.shares(number) for number in range(90)]


def test_off_means_even_for_ever() -> None:
    one, changes = balancer(2, 100, on=False)
    run(one, [0.001, 0.1], range(100))
    assert one.shares(100) == [50, 50]
    assert changes == []


def test_workers_of_one_pace_keep_their_split() -> None:
    one, changes = balancer(2, 100)
    for number in range(100):
        one.measure([(0.05, 50), (0.051 if number % 2 else 0.049, 50)], number, 0)
    assert changes == []


def test_a_round_in_which_somebody_had_nothing_is_not_measured() -> None:
    (one, first), (other, second) = balancer(2, 100), balancer(2, 100)
    for number in range(60):
        if number % 4 == 3:
            one.measure([(7.0, 3), (0.0, 0)], number, 0)
        run(one, [0.001, 0.004], range(number, number + 1))
        run(other, [0.001, 0.004], range(number, number + 1))
    assert first == second != []


def test_the_first_update_is_too_full_of_first_times_to_count() -> None:
    one, changes = balancer(2, 100)
    one.measure([(60.0, 50), (0.05, 50)], 0, 0)
    for number in range(1, 40):
        one.measure([(0.05, 50), (0.05, 50)], number, 0)
    assert changes == []
