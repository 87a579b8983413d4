"""Faults struck on purpose inside collectives and messages: everybody else is told, soon, and by name; nobody hangs,
nobody takes garbage for a result, and nobody's memory is touched."""

from __future__ import annotations

import contextlib
import datetime
import gc
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.faults import (
    IMPATIENT,
    KINDS,
    LARGE,
    SMALL,
    SOON,
    Told,
    after_each_step,
    answer,
    answers,
    assert_all_are_told,
    band,
    in_operation,
    plant,
    prepared,
    size_of,
    strike,
    struck,
    told,
)
from helpers.load import allowed
from helpers.support import PYTHON, finished, state_of, wait_until, write_script
from torch import distributed

from paceline import collectives
from paceline.collectives.op_queue import OpQueue
from paceline.transport.peer_memory import PrivateView


def ones(count: int) -> torch.Tensor:
    return torch.ones(count)


# -- a rank that dies in a collective ----------------------------------------------------------------------------------


PLACES = [(2, 0), (3, 1), (4, 3)]
"""Sizes, and who dies."""


@pytest.mark.parametrize(
    ("kind", "size", "victim"),
    [
        *((kind, *place) for kind, place in zip([*KINDS, "barrier"], itertools.cycle(PLACES))),
        ("all_reduce", 3, 1),
        ("gather", 4, 3),
        ("scatter", 2, 0),
    ],
)
def test_all_are_told_who_died_before_it_came(kind: str, size: int, victim: int, tmp_path: Path) -> None:
    with band(size) as pool:
        pool.begin(in_operation, tmp_path, victim, kind, False, "now", "coming", "kill")
        assert_all_are_told(pool, tmp_path, victim)


@pytest.mark.parametrize(
    ("kind", "size", "victim", "point"),
    [
        *((kind, 3, 0, "leaving") for kind in KINDS),
        *((kind, *place, "told") for kind, place in zip(KINDS, itertools.cycle([(2, 1), (4, 2)]))),
    ],
)
def test_all_are_told_who_died_while_tensors_were_read(
    kind: str, size: int, victim: int, point: str, tmp_path: Path
) -> None:
    with band(size) as pool:
        pool.begin(in_operation, tmp_path, victim, kind, True, "now", point, "kill")
        assert_all_are_told(pool, tmp_path, victim)


@pytest.mark.parametrize("how", ["exit", "raise"])
@pytest.mark.parametrize(("kind", "large", "point"), [("all_reduce", False, "coming"), ("all_gather", True, "told")])
def test_it_does_not_matter_how_a_rank_dies(kind: str, large: bool, point: str, how: str, tmp_path: Path) -> None:
    with band(3) as pool:
        pool.begin(in_operation, tmp_path, 1, kind, large, "now", point, how)
        assert_all_are_told(pool, tmp_path, 1, how=how)


@pytest.mark.parametrize("mode", ["async", "future"])
@pytest.mark.parametrize(("kind", "large", "point"), [("all_reduce", False, "coming"), ("broadcast", True, "told")])
def test_those_who_wait_for_it_later_are_told_too(
    kind: str, large: bool, point: str, mode: str, tmp_path: Path
) -> None:
    with band(3) as pool:
        pool.begin(in_operation, tmp_path, 0, kind, large, mode, point, "kill")
        assert_all_are_told(pool, tmp_path, 0)


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "scatter", "all_to_all"])
def test_all_are_told_who_died_where_memory_is_closed(kind: str, tmp_path: Path) -> None:
    with band(3, closed=True) as pool:
        pool.begin(in_operation, tmp_path, 0, kind, True, "now", "told", "kill")
        assert_all_are_told(pool, tmp_path, 0)


def late_to_look(rank: int, folder: Path) -> Told:
    """The victim is dead for certain before anybody maps what it has exposed."""
    case = prepared("all_gather", rank, 2, LARGE)
    distributed.barrier()
    if rank == 1:
        plant("told", "kill", folder)
    else:
        after_each_step(lambda: time.sleep(0.3))
    return told(lambda: case.do("now"))


@pytest.mark.parametrize("closed", [False, True])
def test_what_a_dead_rank_had_exposed_is_a_lost_rank_and_not_a_lost_file(closed: bool, tmp_path: Path) -> None:
    with band(2, closed=closed) as pool:
        pool.begin(late_to_look, tmp_path)
        assert_all_are_told(pool, tmp_path, 1)


def told_by_others(rank: int, folder: Path) -> Told:
    """Rank 2 dies, rank 1 is told and drops its tensor, and only then rank 0 looks for it."""
    case = prepared("broadcast", rank, 3, 10_000_000, root=1)  # so large that malloc gives it back to the system
    distributed.barrier()
    if rank == 2:
        plant("told", "kill", folder)
    if rank == 0:
        after_each_step(lambda: wait_until((folder / "dropped").exists, 30, "rank 1 to be told"))
    outcome = told(lambda: case.do("now"))
    if rank == 1:
        del case
        gc.collect()
        (folder / "dropped").touch()
        wait_until((folder / "looked").exists, 30, "rank 0 to be told")
    (folder / "looked").touch()
    return outcome


def test_who_is_slow_is_told_who_died_and_not_who_gave_up_because_of_it(tmp_path: Path) -> None:
    with band(3) as pool:
        pool.begin(told_by_others, tmp_path)
        assert_all_are_told(pool, tmp_path, 2)


# -- what comes after --------------------------------------------------------------------------------------------------


def goes_on(rank: int, folder: Path, large: bool, queued: bool) -> list[Told]:
    """Somebody dies; who survives does one operation after the other, as if it had not been told."""
    cases = [prepared("all_reduce", rank, 3, LARGE if large else SMALL) for _ in range(6)]
    for case in cases[:2]:
        case.do("now")
        assert case.right
    distributed.barrier()
    if rank == 1:
        strike("kill", folder)
    if not queued:
        return [told(lambda case=case: case.do("now")) for case in cases[2:]]  # type: ignore[misc]
    works = [case.call(True) for case in cases[2:]]
    return [told(work.wait) for work in works]


@pytest.mark.parametrize("queued", [False, True], ids=["one-by-one", "queued"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_nothing_succeeds_in_a_group_that_has_lost_a_rank(large: bool, queued: bool, tmp_path: Path) -> None:
    with band(3) as pool:
        pool.begin(goes_on, tmp_path, large, queued)
        for rank, outcomes in enumerate(answers(pool, (1,))):
            if rank != 1:
                for outcome in outcomes:
                    assert outcome.ours, f"rank {rank}: {outcome}"
                    assert outcome.names(1), f"rank {rank}: {outcome}"
        struck(tmp_path)


# -- a rank that is stopped, or gives up -------------------------------------------------------------------------------


@pytest.mark.parametrize(("large", "point"), [(False, "coming"), (True, "told")])
def test_a_stopped_rank_is_named_after_the_timeout_and_takes_no_garbage_later(
    large: bool, point: str, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        pools, wrong = {}, []
        for kind in KINDS:  # all at once, since they do nothing but wait
            (tmp_path / kind).mkdir()
            pools[kind] = stack.enter_context(band(3, IMPATIENT))
        for kind, pool in pools.items():
            pool.begin(in_operation, tmp_path / kind, 1, kind, large, "now", point, "stop")
        for kind, pool in pools.items():
            outcomes = answers(pool, (1,))
            assert state_of(pool.pids[1]) == "T"
            at = struck(tmp_path / kind)
            for rank in (0, 2):
                assert outcomes[rank].ours, f"{kind}: {outcomes[rank]}"
                assert outcomes[rank].names(1), f"{kind}: {outcomes[rank]}"
                assert IMPATIENT - 0.5 < outcomes[rank].at - at < IMPATIENT + allowed(SOON), kind
            os.kill(pool.pids[1], signal.SIGCONT)
            back = answer(pool, 1)
            if back.text == "garbage" or (back.kind and not back.ours):
                wrong.append(f"{kind}: {back}")
        assert not wrong, "\n".join(wrong)


def overwritten(rank: int, folder: Path) -> Any:
    """Rank 1 stops just as it is about to write into the memory of rank 0, which then gives up and goes on."""
    count = 4_000_000
    for _ in range(3):  # makes malloc take memory of this size from its heap, and give the same again
        torch.ones(count)
    if rank == 1:
        write, writes = PrivateView.write, 0

        def stops(*arguments: Any) -> None:
            nonlocal writes
            writes += 1
            if writes == 3:
                strike("stop", folder)
            write(*arguments)

        PrivateView.write = stops  # type: ignore[method-assign]
    distributed.barrier()
    tensors = [torch.ones(count)]
    address = tensors[0].data_ptr()
    outcome = told(lambda: distributed.all_reduce(tensors[0]))
    if rank == 1:
        return outcome
    tensors.clear()
    gc.collect()
    others = [torch.full((count - 1000,), 7.0) for _ in range(4)]
    (folder / "gave-up").touch()
    wait_until((folder / "went-on").exists, 30, "rank 1 to go on")
    spoilt = sum(int((other != 7).sum()) for other in others)
    return outcome, address in [other.data_ptr() for other in others], spoilt


def test_nobody_writes_into_memory_that_its_owner_has_given_up(tmp_path: Path) -> None:
    with band(2, IMPATIENT) as pool:
        pool.begin(overwritten, tmp_path)
        struck(tmp_path)
        wait_until(lambda: state_of(pool.pids[1]) == "T", 20, "rank 1 to be stopped")
        wait_until((tmp_path / "gave-up").exists, 30, "rank 0 to give up")
        os.kill(pool.pids[1], signal.SIGCONT)
        back = answer(pool, 1)
        (tmp_path / "went-on").touch()
        outcome, _, spoilt = answer(pool, 0)
        assert outcome.names(1)
        assert back.ours
        assert not spoilt, f"{spoilt} elements of tensors that had nothing to do with it were overwritten"


def breaks_off(rank: int, folder: Path) -> tuple[Told, str]:
    """Rank 0 gives up while rank 1 still works on its part; rank 2 has done its own, and waits for both."""
    case = prepared("all_reduce", rank, 3, 10 * LARGE)
    distributed.barrier()
    if rank == 1:
        after_each_step(lambda: wait_until((folder / "struck").exists, 30, "rank 0 to give up"))
    if rank == 0:
        (folder / "waiting").touch()
    try:
        outcome = told(lambda: case.do("now"))
    except KeyboardInterrupt:
        (folder / "struck").write_text(str(time.monotonic()))
        return Told("KeyboardInterrupt", "", time.monotonic(), False), ""
    if rank == 1:
        time.sleep(0.2)
        told(distributed.barrier)  # as a script may that goes on after an error
    return outcome, "right" if case.right else "wrong"


def test_what_broke_off_on_one_rank_is_no_success_on_another(tmp_path: Path) -> None:
    with band(3) as pool:
        pool.begin(breaks_off, tmp_path)
        wait_until((tmp_path / "waiting").exists, 30, "rank 0 to wait")
        time.sleep(0.5)
        os.kill(pool.pids[0], signal.SIGINT)
        (zero, _), (one, _), (two, result) = answers(pool)
        assert zero.kind == "KeyboardInterrupt"
        assert one.ours
        assert one.names(0)
        assert two.ours or result == "right", "rank 2 was given a result that rank 1 had not finished"


# -- death in the middle of large transfers ----------------------------------------------------------------------------


def shaken(rank: int, folder: Path, count: int, kind: str) -> Told:
    """One large all-reduce after the other, each checked, until something goes wrong."""
    size = distributed.get_world_size()
    total = float(sum(range(1, size + 1)))
    tensor = collectives.empty(count) if kind == "segment" else torch.empty(count)

    def rounds() -> str:
        for number in range(1000):
            tensor.fill_(rank + 1)
            distributed.all_reduce(tensor)
            low, high = torch.aminmax(tensor)
            if not low == high == total:
                return "garbage"
            if number == 0 and rank == 0:
                (folder / "shaking").touch()
        return "enough"

    return told(rounds)


@pytest.mark.parametrize("kind", ["private", "segment", "closed"])
def test_a_kill_at_any_time_of_large_transfers_is_told_to_all(kind: str, tmp_path: Path) -> None:
    chance = random.Random(kind)
    for trial, size in enumerate((2, 3, 2, 3, 2)):
        victim, delay = chance.randrange(size), chance.uniform(0, 0.4)
        folder = tmp_path / str(trial)
        folder.mkdir()
        with band(size, closed=kind == "closed") as pool:
            pool.begin(shaken, folder, 10_000_000, kind)
            wait_until((folder / "shaking").exists, 20, "the first transfer")
            time.sleep(delay)
            (folder / "struck").write_text(str(time.monotonic()))
            os.kill(pool.pids[victim], signal.SIGKILL)
            assert_all_are_told(pool, folder, victim)


# -- a rank that dies while others wait for its message ----------------------------------------------------------------


def many_sends(victim: int) -> None:
    for _ in range(100):  # more than fit into its letter box
        distributed.send(torch.ones(10), victim)


MESSAGES: dict[str, Callable[[int], Any]] = {
    "recv": lambda victim: distributed.recv(torch.empty(10), victim),
    "irecv": lambda victim: distributed.irecv(torch.empty(10), victim).wait(),  # type: ignore[union-attr]
    "irecv-future": lambda victim: distributed.irecv(torch.empty(10), victim).get_future().wait(),  # type: ignore[union-attr]
    "large-send": lambda victim: distributed.send(torch.ones(LARGE), victim),
    "large-isend": lambda victim: distributed.isend(torch.ones(LARGE), victim).wait(),  # type: ignore[union-attr]
    "isend-future": lambda victim: distributed.isend(torch.ones(LARGE), victim).get_future().wait(),  # type: ignore[union-attr]
    "many-sends": many_sends,
    "from-anybody": lambda victim: distributed.recv(torch.empty(10)),
    "monitored-barrier": lambda victim: distributed.monitored_barrier(),
}


def in_message(rank: int, folder: Path, victim: int, what: str, how: str) -> Told:
    distributed.barrier()
    if rank == victim:
        time.sleep(0.2)  # by now the others are in it
        strike(how, folder)
    return told(lambda: MESSAGES[what](victim))


TO_ONE = [name for name in MESSAGES if name not in ("from-anybody", "monitored-barrier")]


@pytest.mark.parametrize(
    ("what", "size", "victim"),
    [*((what, *place) for what, place in zip(TO_ONE, itertools.cycle([(2, 1), (3, 0)]))), ("recv", 3, 0)],
)
def test_all_who_wait_for_a_message_are_told_who_died(what: str, size: int, victim: int, tmp_path: Path) -> None:
    with band(size) as pool:
        pool.begin(in_message, tmp_path, victim, what, "kill")
        assert_all_are_told(pool, tmp_path, victim)


@pytest.mark.parametrize(("size", "victim"), [(2, 0), (2, 1), (3, 0), (3, 2), (4, 1)])
def test_all_in_a_monitored_barrier_are_told_who_died(size: int, victim: int, tmp_path: Path) -> None:
    with band(size) as pool:
        pool.begin(in_message, tmp_path, victim, "monitored-barrier", "kill")
        assert_all_are_told(pool, tmp_path, victim)


def test_who_waits_for_anybody_is_told_once_nobody_is_left(tmp_path: Path) -> None:
    with band(2) as pool:
        pool.begin(in_message, tmp_path, 1, "from-anybody", "exit")
        assert_all_are_told(pool, tmp_path, 1, how="exit")


def test_who_waits_for_anybody_gives_up_after_the_timeout_and_names_the_dead(tmp_path: Path) -> None:
    with band(3, IMPATIENT) as pool:  # either of the survivors may still hear from the other
        pool.begin(in_message, tmp_path, 1, "from-anybody", "kill")
        assert_all_are_told(pool, tmp_path, 1, IMPATIENT + SOON)


@pytest.mark.parametrize("what", ["recv", "large-isend", "monitored-barrier"])
def test_a_stopped_rank_of_which_a_message_is_awaited_is_named_after_the_timeout(what: str, tmp_path: Path) -> None:
    with band(2, IMPATIENT) as pool:
        pool.begin(in_message, tmp_path, 1, what, "stop")
        outcome = answer(pool, 0)
        assert state_of(pool.pids[1]) == "T"
        os.kill(pool.pids[1], signal.SIGKILL)
        assert outcome.kind == "TeamTimeout"
        assert outcome.names(1)
        assert IMPATIENT - 0.5 < outcome.at - struck(tmp_path) < IMPATIENT + allowed(SOON)


def from_the_dead(rank: int, folder: Path, shared: bool) -> Told | None:
    if rank == 1:
        tensor = collectives.empty(LARGE) if shared else torch.empty(LARGE)
        distributed.isend(tensor, 0)
        distributed.isend(torch.full((5,), 3.0), 0, tag=1)
        strike("kill", folder)
    wait_until((folder / "struck").exists, 20, "the sender to be gone")
    time.sleep(0.2)
    small = torch.empty(5)
    distributed.recv(small, 1, tag=1)
    assert small.eq(3).all(), "what it had posted counts"
    return told(lambda: distributed.recv(torch.empty(LARGE), 1))


@pytest.mark.parametrize(("shared", "closed"), [(False, False), (True, False), (False, True)])
def test_a_large_message_from_the_dead_is_lost_and_a_small_one_is_not(
    shared: bool, closed: bool, tmp_path: Path
) -> None:
    with band(2, closed=closed) as pool:
        pool.begin(from_the_dead, tmp_path, shared)
        assert_all_are_told(pool, tmp_path, 1)


def late_to_a_barrier(rank: int, folder: Path) -> list[Told]:
    limit = datetime.timedelta(seconds=0.5)
    if rank == 1:
        wait_until((folder / "gave-up").exists, 30, "rank 0 to give up")
    first = told(lambda: distributed.monitored_barrier(timeout=limit))
    (folder / "gave-up").touch()
    distributed.barrier()
    if rank == 1:  # this time it does not come at all
        return [first]
    return [first, told(lambda: distributed.monitored_barrier(timeout=limit))]


def test_who_was_late_to_one_monitored_barrier_is_not_taken_to_be_at_the_next(tmp_path: Path) -> None:
    with band(2) as pool:
        first, second = pool.run(late_to_a_barrier, tmp_path)[0]
        assert first.names(1)
        assert second.ours, "rank 0 passed a barrier that rank 1 never came to"
        assert second.names(1)


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


def interrupted(rank: int, folder: Path, kind: str, large: bool) -> Told:
    """Rank 0 waits for rank 1, and is interrupted; the others go on until they are told."""
    size = distributed.get_world_size()
    cases = [prepared(kind, rank, size, size_of(kind, large)) for _ in range(3)]
    distributed.barrier()
    if rank == 0:
        (folder / "waiting").touch()
        try:
            cases[0].do("now")
        except KeyboardInterrupt:
            cases[0].scribble()
            strike_note = time.monotonic()
            (folder / "struck").write_text(str(strike_note))
            return Told("KeyboardInterrupt", "", strike_note, False)
        return Told("", "was not interrupted", 0.0, False)
    if rank == 1:
        wait_until((folder / "struck").exists, 30, "rank 0 to be interrupted")

    def go_on() -> str:
        for case in cases:
            case.do("now")
            if not case.right:
                return "garbage"
        return "everything worked"

    return told(go_on)


@pytest.mark.parametrize(("kind", "large"), [("all_reduce", False), ("all_reduce", True), ("broadcast", True)])
def test_an_interrupt_is_raised_where_it_strikes_and_told_to_the_others(kind: str, large: bool, tmp_path: Path) -> None:
    with band(3) as pool:
        pool.begin(interrupted, tmp_path, kind, large)
        wait_until((tmp_path / "waiting").exists, 30, "rank 0 to wait")
        time.sleep(0.3)
        sent = time.monotonic()
        os.kill(pool.pids[0], signal.SIGINT)
        zero, *others = answers(pool)
        assert zero.kind == "KeyboardInterrupt"
        assert zero.at - sent < allowed(SOON)
        for outcome in others:
            assert outcome.ours, outcome
            assert outcome.names(0), outcome
            assert outcome.at - zero.at < allowed(SOON)


def interrupted_in_message(rank: int, folder: Path) -> Any:
    if rank == 1:
        wait_until((folder / "struck").exists, 30, "rank 0 to be interrupted")
        distributed.send(ones(10), 0)
        return None
    first, second = torch.zeros(10), torch.zeros(10)
    (folder / "waiting").touch()
    try:
        distributed.recv(first, 1)
    except KeyboardInterrupt:
        at = time.monotonic()
        (folder / "struck").touch()
    distributed.recv(second, 1)
    return at, bool(second.eq(1).all())


def test_an_interrupted_receive_takes_no_message_from_the_next(tmp_path: Path) -> None:
    with band(2, IMPATIENT) as pool:
        pool.begin(interrupted_in_message, tmp_path)
        wait_until((tmp_path / "waiting").exists, 30, "rank 0 to wait")
        time.sleep(0.3)
        sent = time.monotonic()
        os.kill(pool.pids[0], signal.SIGINT)
        at, right = answer(pool, 0)
        assert at - sent < allowed(SOON)
        assert right


def interrupted_in_a_queue(rank: int, folder: Path) -> str:
    if rank == 1:
        wait_until((folder / "struck").exists, 30, "rank 0 to be interrupted")
        return ""
    OpQueue._work = lambda self: None  # type: ignore[method-assign]  # so that whoever waits does the work
    begun: list[Any] = [distributed.all_reduce(ones(10), async_op=True) for _ in range(3)]
    (folder / "waiting").touch()
    try:
        begun[-1].wait()
    except BaseException as error:
        return type(error).__name__
    finally:
        (folder / "struck").touch()
    return "went on"


def test_an_interrupt_is_not_lost_in_an_operation_that_was_begun_before(tmp_path: Path) -> None:
    with band(2) as pool:
        pool.begin(interrupted_in_a_queue, tmp_path)
        wait_until((tmp_path / "waiting").exists, 30, "rank 0 to wait")
        time.sleep(0.3)
        os.kill(pool.pids[0], signal.SIGINT)
        assert answer(pool, 0) == "KeyboardInterrupt"


def interrupted_with_futures(rank: int, folder: Path) -> list[bool]:
    if rank == 1:
        distributed.all_reduce(ones(10))  # of two, takes part in the first
        wait_until((folder / "struck").exists, 30, "rank 0 to be interrupted")
        return []
    OpQueue._work = lambda self: None  # type: ignore[method-assign]  # so that whoever waits does the work
    begun: list[Any] = [distributed.all_reduce(ones(10), async_op=True) for _ in range(2)]
    futures = [work.get_future() for work in begun]
    (folder / "waiting").touch()
    with contextlib.suppress(KeyboardInterrupt):
        begun[-1].wait()
    (folder / "struck").touch()
    until = time.monotonic() + allowed(SOON)
    while time.monotonic() < until and not all(future.done() for future in futures):
        time.sleep(0.01)
    return [future.done() for future in futures]


def test_an_interrupt_leaves_no_future_open(tmp_path: Path) -> None:
    with band(2) as pool:
        pool.begin(interrupted_with_futures, tmp_path)
        wait_until((tmp_path / "waiting").exists, 30, "rank 0 to wait")
        time.sleep(0.3)
        os.kill(pool.pids[0], signal.SIGINT)
        assert answer(pool, 0) == [True, True]


# -- leaving in the middle ---------------------------------------------------------------------------------------------


def leaves_work_behind(rank: int, large: bool) -> Any:
    if rank == 1:
        time.sleep(0.5)
        return told(lambda: distributed.all_reduce(ones(LARGE + 1 if large else 11)))
    for _ in range(50):
        distributed.all_reduce(ones(LARGE if large else 10), async_op=True)
        distributed.irecv(ones(10), 1)
    start = time.monotonic()
    distributed.destroy_process_group()
    return time.monotonic() - start


@pytest.mark.parametrize("large", [False, True])
def test_a_group_can_be_destroyed_while_work_is_outstanding(large: bool) -> None:
    with band(2) as pool:
        took, other = pool.run(leaves_work_behind, large)
        assert took < allowed(SOON)
        assert other.ours
        assert other.names(0)


ENDINGS = """
import datetime, gc, json, os, sys, time
import torch
from torch import distributed as dist
import paceline, paceline.collectives.process_group

endings, folder = json.loads(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
gc.freeze()  # what was imported here is not the garbage of those who end
codes, own = {}, None
for way, trial in [(way, trial) for way, trials in endings.items() for trial in range(trials)]:
    children = {}
    for rank in range(2):
        key = f"{way}-{trial}-{rank}"
        pid = os.fork()
        if not pid:
            own = key
            break
        children[key] = pid
    if own:
        break
    codes |= {key: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for key, pid in children.items()}

def say(text):
    with open(f"{folder}/{own}", "w") as file:
        file.write(text)

def one(count=10):
    return torch.ones(count)

if own:
    sys.stderr = open(f"{folder}/stderr-{own}", "w")
    os.dup2(sys.stderr.fileno(), 2)
    store = dist.FileStore(f"{folder}/store-{way}-{trial}", 2)
    limit = datetime.timedelta(seconds=20)
    dist.init_process_group("paceline", store=store, rank=rank, world_size=2, timeout=limit)
    wide = torch.ones(2000, 2500)  # turned over it has to be copied, which takes long

    def begin(tensor, later):
        return dist.broadcast(tensor, 1, async_op=later) if way == "large" else dist.all_reduce(tensor, async_op=later)

    tensors = [wide.t()] * 20 if way == "large" else [one() for _ in range(2000)]
    dist.barrier()
    if way == "fork" and rank == 0:
        child = os.fork()
        if not child:
            sys.exit()  # has nothing to do with the group, and comes to its end as scripts do
        os.waitpid(child, 0)
        time.sleep(0.3)
        for _ in range(3):
            dist.all_reduce(one())
        say("ends")
    elif way == "fork":
        try:
            for _ in range(3):
                dist.all_reduce(one())
            say("ends")
        except paceline.TeamError as error:
            say(f"{type(error).__name__}: {error}")
    elif rank == 0:
        if way == "raise":
            raise ValueError("planted fault")
        begun = [begin(tensor, True) for tensor in tensors]
        begun += [dist.irecv(one(), 1)]
        time.sleep(0.01 * (trial + 2))  # by now the thread in the background is at it
        if way == "destroy":
            dist.destroy_process_group()
        say(f"{time.monotonic()} ends")
    else:
        try:
            while True:
                for tensor in tensors:
                    begin(tensor, False)
        except paceline.TeamError as error:
            say(f"{time.monotonic()} {type(error).__name__}: {error}")
else:
    print(json.dumps(codes))
"""
"""Interpreters that come to their ends, two for each trial, forked so that torch is imported once."""
TRIALS = {"small": 2, "large": 3, "destroy": 2, "raise": 1, "fork": 1}


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, int], Path]:
    """Exit codes, and the folder of what everybody said, of all ways to end."""
    place = tmp_path_factory.mktemp("endings")
    folder = place / "notes"
    folder.mkdir()
    outcome = finished([PYTHON, write_script(place, ENDINGS), json.dumps(TRIALS), str(folder)], place, 110.0)
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out), folder


@pytest.mark.parametrize("way", ["small", "large", "destroy", "raise"])
def test_a_script_may_end_at_any_time_and_the_others_are_told(way: str, endings: tuple[dict[str, int], Path]) -> None:
    codes, folder = endings
    for trial in range(TRIALS[way]):
        at, words = (folder / f"{way}-{trial}-1").read_text().split(maxsplit=1)
        assert "rank 0" in words
        assert codes[f"{way}-{trial}-1"] == 0
        if way == "raise":
            assert "planted fault" in (folder / f"stderr-{way}-{trial}-0").read_text()
        else:
            ended = (folder / f"{way}-{trial}-0").read_text().split()[0]
            assert float(at) - float(ended) < allowed(SOON)


@pytest.mark.parametrize("way", ["small", "large", "destroy", "raise"])
def test_a_script_that_ends_while_work_is_outstanding_ends_well(way: str, endings: tuple[dict[str, int], Path]) -> None:
    codes, folder = endings
    for trial in range(TRIALS[way]):
        errors = (folder / f"stderr-{way}-{trial}-0").read_text()
        assert codes[f"{way}-{trial}-0"] == (1 if way == "raise" else 0), errors


def test_a_fork_of_a_rank_that_ends_is_not_taken_for_the_rank(endings: tuple[dict[str, int], Path]) -> None:
    _, folder = endings
    for trial in range(TRIALS["fork"]):
        assert (folder / f"fork-{trial}-1").read_text() == "ends"
        assert (folder / f"fork-{trial}-0").read_text() == "ends"
