"""Messages between two members: each arrives once, bit for bit, in order, and where it was asked for."""

from __future__ import annotations

import datetime
import gc
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.oracle import (
    DTYPES,
    MOVABLE,
    SIZES,
    Layout,
    Pools,
    Seen,
    anything,
    hear,
    lay,
    layouts,
    numbers,
    quiet,
    seen,
    shapes,
    tell,
    thoroughly,
    token,
    turned,
)
from helpers.support import wait_until
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed
from torch.distributed import P2POp

from paceline.errors import Mismatch

torch.set_num_threads(1)
pytestmark = quiet
COUNTS = [0, 1, 7, 4095, 4096, 4097, 30_000, 200_000]
"""Elements of four bytes: nothing, a few, around what fits into an envelope, and more than that."""


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with Pools() as made:
        yield made


@pytest.fixture(scope="module")
def closed() -> Iterator[Pools]:
    with Pools(reaching=False) as made:
        yield made


def letter(source: int, number: int, count: int | None = None) -> torch.Tensor:
    return anything(number, source, (COUNTS[number % len(COUNTS)] if count is None else count,), torch.int32)


def polled(*works: Any) -> None:
    """Until all are completed, without waiting for any."""
    wait_until(lambda: all(work.is_completed() for work in works), 5.0, "all to be completed")


# -- one message -----------------------------------------------------------------------------------------------------


def pass_on(
    rank: int, size: int, dtype: torch.dtype, shape: tuple[int, ...], places: list[Layout], how: str
) -> tuple[Seen, Seen, bool]:
    """What came from the rank before; what was sent, after that; whether nothing else changed."""
    given_away = lay(anything(1, rank, shape, dtype), places[rank])
    got = lay(anything(2, rank, shape, dtype), places[rank])
    after, before = (rank + 1) % size, (rank - 1) % size
    if how == "blocking" and size > 1:
        calls = [
            lambda: distributed.send(given_away.tensor, after),
            lambda: distributed.recv(got.tensor, before),
        ]
        for call in calls if rank % 2 == 0 else reversed(calls):
            call()
    else:
        works = [distributed.isend(given_away.tensor, after), distributed.irecv(got.tensor, before)]
        if how == "polled":
            polled(*works)
        else:
            for work in works if how == "sent first" else reversed(works):
                work.wait()
    return seen(got.tensor), seen(given_away.tensor), got.unharmed()


WAYS = ["blocking", "sent first", "received first", "polled"]


def agree(pools: Pools, size: int, *case: Any) -> None:
    dtype, shape = case[:2]
    parts = [seen(anything(1, rank, shape, dtype)) for rank in range(size)]
    assert pools.run(size, pass_on, *case) == [(parts[rank - 1], parts[rank], True) for rank in range(size)]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("size", SIZES)
@thoroughly
@given(st.data())
def test_a_message_arrives_as_it_was_sent(pools: Pools, size: int, how: str, data: st.DataObject) -> None:
    turn = 7 * WAYS.index(how) + size
    dtype = data.draw(st.sampled_from(turned(MOVABLE, turn)))
    agree(pools, size, dtype, data.draw(shapes(dtype, 2_000_000)), data.draw(layouts(size, turn)), how)


@pytest.mark.parametrize("how", WAYS)
@thoroughly
@given(st.data())
def test_it_does_too_between_members_that_cannot_reach_each_other(closed: Pools, how: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(turned(MOVABLE, WAYS.index(how))))
    agree(closed, 3, dtype, data.draw(shapes(dtype, 2_000_000)), data.draw(layouts(3, WAYS.index(how))), how)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_dtype_can_be_sent(pools: Pools, dtype: torch.dtype) -> None:
    for shape in ((), (3, 5), (40_000,)):
        agree(pools, 2, dtype, shape, [Layout()] * 2, "blocking")


@pytest.mark.parametrize("form", ["strided", "transposed"])
def test_one_element_can_be_sent_from_any_place_to_any(pools: Pools, form: str) -> None:
    for shape in ((1,), (1, 1)):
        agree(pools, 2, torch.float64, shape, [Layout(form)] * 2, "blocking")


def send_negated(rank: int, size: int, count: int) -> Seen:
    own = lay(numbers(1, rank, (count,), torch.float32), Layout("neg")).tensor
    got = lay(torch.zeros(count), Layout("neg")).tensor
    for work in (distributed.isend(own, 1 - rank), distributed.irecv(got, 1 - rank)):
        work.wait()
    return seen(got)


@pytest.mark.parametrize("count", [5, 50_000])
def test_a_sign_that_is_still_to_be_changed_is_changed_on_the_way(pools: Pools, count: int) -> None:
    expected = [seen(numbers(1, 1 - rank, (count,), torch.float32)) for rank in range(2)]
    assert pools.run(2, send_negated, count) == expected


def to_oneself(rank: int, size: int, count: int, first: str) -> Seen:
    got = torch.zeros(count, dtype=torch.int32)
    if first == "sent":
        works = [distributed.isend(letter(rank, 3, count), rank, tag=4), distributed.irecv(got, rank, tag=4)]
    else:
        works = [distributed.irecv(got, rank, tag=4), distributed.isend(letter(rank, 3, count), rank, tag=4)]
    for work in works:
        work.wait()
    return seen(got)


@pytest.mark.parametrize("first", ["sent", "awaited"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_member_can_send_to_itself(pools: Pools, size: int, first: str) -> None:
    for count in COUNTS:
        expected = [seen(letter(rank, 3, count)) for rank in range(size)]
        assert pools.run(size, to_oneself, count, first) == expected, count


# -- many messages ---------------------------------------------------------------------------------------------------


def in_any_order(rank: int, size: int, count: int, seed: int) -> dict[int, Seen]:
    tags = list(range(count))
    random.Random(seed).shuffle(tags)
    if rank == 0:
        for work in [distributed.isend(letter(0, tag), 1, tag=tag) for tag in range(count)]:
            work.wait()
        return {}
    results = {}
    for number, tag in enumerate(tags):
        got = torch.zeros(COUNTS[tag % len(COUNTS)], dtype=torch.int32)
        if number % 2:
            distributed.recv(got, 0, tag=tag)
        else:
            distributed.irecv(got, 0, tag=tag).wait()
        results[tag] = seen(got)
    return results


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("count", [8, 100])
def test_messages_are_told_apart_by_their_tags(pools: Pools, count: int, seed: int) -> None:
    expected = {tag: seen(letter(0, tag)) for tag in range(count)}
    assert pools.run(2, in_any_order, count, seed) == [{}, expected]


def test_messages_are_told_apart_where_memory_cannot_be_reached(closed: Pools) -> None:
    expected = {tag: seen(letter(0, tag)) for tag in range(60)}
    assert closed.run(2, in_any_order, 60, 3) == [{}, expected]


def in_order(rank: int, size: int, count: int, late: int) -> list[Seen]:
    distributed.barrier()
    if rank == late:
        time.sleep(0.1)
    if rank == 0:
        works = [distributed.isend(letter(0, number), 1, tag=2**30) for number in range(count)]
        for work in works:
            work.wait()
        return []
    results = []
    for number in range(count):
        got = torch.zeros(COUNTS[number % len(COUNTS)], dtype=torch.int32)
        distributed.recv(got, 0, tag=2**30)
        results.append(seen(got))
    return results


@pytest.mark.parametrize("late", [0, 1])
def test_messages_of_one_tag_come_in_the_order_in_which_they_were_sent(pools: Pools, late: int) -> None:
    expected = [seen(letter(0, number)) for number in range(150)]
    assert pools.run(2, in_order, 150, late) == [[], expected]


def from_anybody(rank: int, size: int, count: int) -> list[tuple[int, Seen]]:
    if rank:
        for number in range(count):
            distributed.send(letter(rank, number, 40 if number % 2 else 30_000), 0, tag=number % 2)
        return []
    results = []
    for number in range(count):
        for _ in range(1, size):
            got = torch.zeros(40 if number % 2 else 30_000, dtype=torch.int32)
            source = distributed.recv(got, tag=number % 2)
            results.append((source, seen(got)))
    return results


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_message_from_anybody_is_one_of_theirs_and_says_whose(pools: Pools, size: int) -> None:
    count = 10
    told = pools.run(size, from_anybody, count)
    assert len(told[0]) == count * (size - 1)
    for rank in range(1, size):
        for tag in (0, 1):
            lengths = (40 if tag else 30_000,)
            got = [content for source, content in told[0] if source == rank and content.shape == lengths]
            assert got == [seen(letter(rank, number, lengths[0])) for number in range(tag, count, 2)]


def swap_batch(rank: int, size: int, order: str, count: int) -> list[Seen]:
    got = [torch.zeros(count + peer, dtype=torch.int32) for peer in range(size)]
    sends = [P2POp(distributed.isend, letter(rank, peer, count + rank), peer) for peer in range(size)]
    receives = [P2POp(distributed.irecv, got[peer], peer) for peer in range(size)]
    operations = {
        "sends first": sends + receives,
        "receives first": receives + sends,
        "in turns": [operation for both in zip(sends, receives, strict=True) for operation in both],
    }[order]
    works = distributed.batch_isend_irecv(operations)
    assert len(works) == 2 * size
    for work in works:
        work.wait()
    return [seen(tensor) for tensor in got]


@pytest.mark.parametrize("order", ["sends first", "receives first", "in turns"])
@pytest.mark.parametrize("size", SIZES)
def test_a_batch_is_swapped_in_whatever_order_it_is_given(pools: Pools, size: int, order: str) -> None:
    for count in (3, 20_000):
        expected = [[seen(letter(peer, rank, count + peer)) for peer in range(size)] for rank in range(size)]
        assert pools.run(size, swap_batch, order, count) == expected


def mixed_with_collectives(rank: int, size: int) -> tuple[list[Seen], float]:
    total = torch.zeros(())
    works, got = [], []
    for number in range(20):
        got.append(torch.zeros(COUNTS[number % len(COUNTS)], dtype=torch.int32))
        works.append(distributed.irecv(got[-1], (rank - 1) % size, tag=number))
        step = torch.ones(())
        distributed.all_reduce(step)
        total += step
        works.append(distributed.isend(letter(rank, number), (rank + 1) % size, tag=number))
        if number % 5 == 0:
            distributed.barrier()
    for work in works:
        work.wait()
    return [seen(tensor) for tensor in got], float(total)


def test_messages_and_collectives_do_not_disturb_each_other(pools: Pools) -> None:
    expected = [([seen(letter((rank - 1) % 3, number)) for number in range(20)], 60.0) for rank in range(3)]
    assert pools.run(3, mixed_with_collectives) == expected


def from_several_threads(rank: int, size: int) -> tuple[list[list[Seen]], float]:
    results: list[list[Seen]] = [[] for _ in range(3)]

    def swap(thread: int) -> None:
        for number in range(15):
            got = torch.zeros(COUNTS[number % len(COUNTS)], dtype=torch.int32)
            sending = distributed.isend(letter(rank, number + thread * 8), 1 - rank, tag=thread)
            distributed.recv(got, 1 - rank, tag=thread)
            sending.wait()
            results[thread].append(seen(got))

    threads = [threading.Thread(target=swap, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    total = torch.ones(1000)
    for _ in range(20):
        distributed.all_reduce(total, distributed.ReduceOp.AVG)
    for thread in threads:
        thread.join()
    return results, float(total.sum())


def test_threads_can_send_and_receive_side_by_side(pools: Pools) -> None:
    expected = [
        [[seen(letter(1 - rank, number + thread * 8)) for number in range(15)] for thread in range(3)]
        for rank in range(2)
    ]
    assert pools.run(2, from_several_threads) == [(letters, 1000.0) for letters in expected]


# -- what is not waited for, or comes late ---------------------------------------------------------------------------


def change_after_sending(rank: int, size: int, count: int) -> Seen:
    tensor = letter(0, 1, count) if rank == 0 else torch.zeros(count, dtype=torch.int32)
    if rank == 0:
        distributed.send(tensor, 1)
        tensor.fill_(-1)
    else:
        time.sleep(0.05)
        distributed.recv(tensor, 0)
    return seen(tensor)


@pytest.mark.parametrize("count", [10, 50_000])
def test_a_tensor_may_be_changed_once_it_is_sent(pools: Pools, count: int) -> None:
    assert pools.run(2, change_after_sending, count)[1] == seen(letter(0, 1, count))


def forget_what_is_sent(rank: int, size: int) -> list[Seen]:
    if rank == 0:
        for number in range(60):
            distributed.isend(letter(0, number), 1, tag=number)
            torch.empty(30_000, dtype=torch.int32).fill_(-1)  # wants the memory of what nobody refers to
        gc.collect()
        distributed.barrier()
        return []
    time.sleep(0.05)
    got = [torch.zeros(COUNTS[number % len(COUNTS)], dtype=torch.int32) for number in range(60)]
    for number in reversed(range(60)):
        distributed.recv(got[number], 0, tag=number)
    distributed.barrier()
    return [seen(tensor) for tensor in got]


@pytest.mark.parametrize("open_or_closed", ["pools", "closed"])
def test_what_is_sent_lives_until_it_has_arrived(request: pytest.FixtureRequest, open_or_closed: str) -> None:
    expected = [seen(letter(0, number)) for number in range(60)]
    assert request.getfixturevalue(open_or_closed).run(2, forget_what_is_sent) == [[], expected]


def not_waited_for(rank: int, size: int, count: int, key: str) -> tuple[bool, Seen] | None:
    """Whether the receive was complete before its sender had come; what came."""
    if rank == 1:
        hear(key)
        distributed.send(letter(1, 5, count), 0)
        return None
    tensor = torch.zeros(count, dtype=torch.int32)
    work = distributed.irecv(tensor, 1)
    complete = work.is_completed()
    tell(key)
    polled(work)
    return complete, seen(tensor)


@pytest.mark.parametrize("count", [10, 50_000])
def test_a_receive_returns_before_its_sender_comes(pools: Pools, count: int) -> None:
    assert pools.run(2, not_waited_for, count, token()) == [(False, seen(letter(1, 5, count))), None]


def not_taken_yet(rank: int, size: int, key: str) -> bool | Seen:
    if rank == 1:
        got = torch.zeros(50_000, dtype=torch.int32)
        hear(key)
        distributed.recv(got, 0)
        return seen(got)
    work = distributed.isend(letter(0, 5, 50_000), 1)
    complete = work.is_completed()
    tell(key)
    polled(work)
    return complete


def test_a_large_send_returns_before_its_receiver_comes_and_completes_when_it_has(pools: Pools) -> None:
    assert pools.run(2, not_taken_yet, token()) == [False, seen(letter(0, 5, 50_000))]


def into_pieces(rank: int, size: int, count: int, early: bool) -> tuple[Seen, bool]:
    """A receive whose tensor does not lie in one piece, and which is never waited for."""
    if rank == 0:
        distributed.isend(letter(0, 1, count), 1, tag=1)
        distributed.send(letter(0, 2, 1), 1, tag=2)
        distributed.barrier()
        return seen(torch.zeros(0)), True
    got = lay(torch.zeros(count, dtype=torch.int32), Layout("strided"))
    if early:  # the first message has come before it is asked for
        distributed.recv(torch.zeros(1, dtype=torch.int32), 0, tag=2)
    work = distributed.irecv(got.tensor, 0, tag=1)
    polled(work)
    result = seen(got.tensor), got.unharmed()
    if not early:
        distributed.recv(torch.zeros(1, dtype=torch.int32), 0, tag=2)
    distributed.barrier()
    return result


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("count", [10, 50_000])
def test_a_completed_receive_has_filled_its_tensor(pools: Pools, count: int, early: bool) -> None:
    for _ in range(20):
        assert pools.run(2, into_pieces, count, early)[1] == (seen(letter(0, 1, count)), True)


def with_futures(rank: int, size: int, early: bool) -> list[Any]:
    if rank == 0:
        if not early:
            time.sleep(0.05)
        for number in range(3):
            distributed.send(letter(0, number, 100), 1, tag=number)
        work = distributed.isend(letter(0, 9, 100_000), 1, tag=9)
        done = work.get_future().then(lambda future: len(future.value()))
        return [done.wait()]
    if early:
        time.sleep(0.05)
    works = []
    got = [torch.zeros(100, dtype=torch.int32) for _ in range(3)]
    for number in range(3):
        works.append(distributed.irecv(got[number], 0, tag=number))
    firsts = [work.get_future().then(lambda future: seen(future.value()[0])) for work in works]
    results = [first.wait() for first in firsts]
    distributed.recv(torch.zeros(100_000, dtype=torch.int32), tag=9)
    return results + [work._source_rank() for work in works]


@pytest.mark.parametrize("early", [False, True])
def test_the_future_of_a_message_has_its_tensors(pools: Pools, early: bool) -> None:
    expected = [seen(letter(0, number, 100)) for number in range(3)]
    assert pools.run(2, with_futures, early) == [[1], [*expected, 0, 0, 0]]


# -- what does not fit -----------------------------------------------------------------------------------------------


def wrong_size(rank: int, size: int, sent: int, dtype: torch.dtype) -> tuple[str, Seen]:
    error = ""
    try:
        if rank == 0:
            distributed.send(letter(0, 1, sent), 1)
        else:
            distributed.recv(torch.zeros(sent + (dtype is torch.int32), dtype=dtype), 0)
    except Mismatch as mismatch:
        error = str(mismatch)
    got = torch.zeros(5, dtype=torch.int32)
    if rank == 0:
        distributed.send(letter(0, 2, 5), 1)
    else:
        distributed.recv(got, 0)
    return error, seen(got)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
@pytest.mark.parametrize("sent", [10, 50_000])
def test_a_message_that_does_not_fit_is_refused_and_the_next_one_arrives(
    pools: Pools, sent: int, dtype: torch.dtype
) -> None:
    (at_sender, _), (at_receiver, got) = pools.run(2, wrong_size, sent, dtype)
    assert f"rank 0 sent {sent} x torch.int32 to rank 1, which expects" in at_receiver
    assert at_sender == (at_receiver if sent > 4096 else "")  # small ones are sent and forgotten
    assert got == seen(letter(0, 2, 5))


def monitored(rank: int, size: int, absent: bool) -> tuple[str, float]:
    world, limit = distributed.group.WORLD, datetime.timedelta(seconds=1 if absent else 10)
    distributed.barrier()
    error = ""
    after = torch.tensor(float(rank))
    if absent and rank == 2:  # it comes when the others have given up
        distributed.all_reduce(after)
    try:
        world.monitored_barrier(limit, wait_all_ranks=True)
    except RuntimeError as failure:
        error = str(failure)
    if not (absent and rank == 2):
        distributed.all_reduce(after)
    return error, float(after)


def test_a_monitored_barrier_names_who_did_not_come(pools: Pools) -> None:
    assert pools.run(4, monitored, False) == [("", 6.0)] * 4
    told = pools.run(4, monitored, True)
    assert [total for _, total in told] == [6.0] * 4
    assert told[0][0] == "[Rank 0]: Rank 2 failed to pass monitoredBarrier in 1000 ms: rank 2 did not come"
    for rank in (1, 2, 3):
        assert told[rank][0].startswith(f"Rank {rank} successfully reached monitoredBarrier, but received errors")
        assert told[rank][0].endswith("rank 2 did not come in 1 s")
    assert pools.run(4, monitored, False) == [("", 6.0)] * 4
