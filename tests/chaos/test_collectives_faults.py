"""Faults struck on purpose inside collectives and messages: everybody else is told, soon, and by name; nobody hangs,
nobody takes garbage for a result, nobody's memory is touched, and nothing is left."""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import pickle
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from groups import Pool, run_group
from support import PYTHON, finished, shared_files, state_of, wait_until, write_script
from torch import distributed
from torch.distributed import ReduceOp

import paceline.collectives.process_group  # noqa: F401  (once here, not once in every fork)
from paceline import collectives
from paceline.errors import TeamError, UsageError
from paceline.transport.reach import PrivateView, Reach

SMALL, LARGE = 500, 100_000
"""Elements of a tensor that travels in its owner's slot, and of one that is read where it lies."""
SOON = 4.0
"""Seconds in which a death must be known, on a busy machine; the timeouts of those tests are far longer."""
PATIENT, IMPATIENT = 30.0, 1.5
"""Timeouts: of groups in which somebody dies, and of groups in which somebody only stops."""
GARBAGE = -7777.0
Tensors = list[torch.Tensor]


# -- operations, with what they must give ----------------------------------------------------------------------------


class Case(NamedTuple):
    """One member's part in an operation."""

    call: Callable[[bool], Any]
    """Does it, or begins it."""
    given: Tensors
    filled: Tensors
    wanted: Tensors
    """What `filled` must be afterwards."""

    @property
    def right(self) -> bool:
        return all(torch.equal(seen, want) for seen, want in zip(self.filled, self.wanted, strict=True))

    def do(self, mode: str) -> None:
        if mode == "now":
            self.call(False)
        elif mode == "async":
            self.call(True).wait()
        else:
            self.call(True).get_future().wait()

    def scribble(self) -> None:
        """What a program may do with its tensors once it was told that the operation failed."""
        for tensor in [*self.given, *self.filled]:
            tensor.fill_(GARBAGE)


def part(count: int, rank: int, peer: int = 0) -> torch.Tensor:
    """Whole numbers, so that sums are exact."""
    return torch.arange(count, dtype=torch.float32) % 97 + 100 * rank + 1000 * peer


def prepared(kind: str, rank: int, size: int, count: int, root: int = 0) -> Case:  # noqa: PLR0911
    ranks = range(size)
    dist = distributed
    if kind == "barrier":
        return Case(lambda later: dist.barrier(async_op=later), [], [], [])
    if kind == "broadcast":
        tensor = part(count, rank)
        return Case(lambda later: dist.broadcast(tensor, root, async_op=later), [], [tensor], [part(count, root)])
    total = torch.stack([part(count, other) for other in ranks]).sum(0)
    if kind == "all_reduce":
        tensor = part(count, rank)
        return Case(lambda later: dist.all_reduce(tensor, async_op=later), [], [tensor], [total])
    if kind == "reduce":
        tensor = part(count, rank)
        own = total if rank == root else part(count, rank)
        return Case(lambda later: dist.reduce(tensor, root, async_op=later), [], [tensor], [own])
    outs = [torch.zeros(count) for _ in ranks]
    if kind == "all_gather":
        tensor = part(count, rank)
        wanted = [part(count, other) for other in ranks]
        return Case(lambda later: dist.all_gather(outs, tensor, async_op=later), [tensor], outs, wanted)
    if kind == "gather":
        tensor = part(count, rank)
        filled = outs if rank == root else []
        wanted = [part(count, other) for other in ranks] if rank == root else []
        return Case(lambda later: dist.gather(tensor, filled or None, root, async_op=later), [tensor], filled, wanted)
    parts = [part(count, rank, peer) for peer in ranks]
    if kind == "scatter":
        given = parts if rank == root else []
        out, wanted = outs[:1], [part(count, root, rank)]
        return Case(lambda later: dist.scatter(out[0], given or None, root, async_op=later), given, out, wanted)
    if kind == "reduce_scatter":
        wanted = [torch.stack([part(count, other, rank) for other in ranks]).sum(0)]
        return Case(lambda later: dist.reduce_scatter(outs[0], parts, async_op=later), parts, outs[:1], wanted)
    assert kind == "all_to_all"
    wanted = [part(count, other, rank) for other in ranks]
    return Case(lambda later: dist.all_to_all(outs, parts, async_op=later), parts, outs, wanted)


KINDS = ["all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter", "all_to_all"]


def size_of(kind: str, large: bool) -> int:
    return 0 if kind == "barrier" else LARGE if large else SMALL


# -- striking --------------------------------------------------------------------------------------------------------


class Told(NamedTuple):
    """What a member was told, or how it went without a word."""

    kind: str
    text: str
    at: float
    ours: bool

    def names(self, rank: int) -> bool:
        return re.search(rf"\branks? (?:\d+(?:, | and ))*{rank}\b", self.text) is not None


def told(do: Callable[[], Any]) -> Told:
    try:
        result = do()
    except Exception as error:
        return Told(type(error).__name__, str(error), time.monotonic(), isinstance(error, TeamError))
    return Told("", f"no error, but {result!r}", time.monotonic(), False)


class Planted(Exception):
    """Raised on purpose."""


def strike(how: str, folder: Path) -> None:
    """Leave word, and let it happen."""
    (folder / "struck.partial").write_text(str(time.monotonic()))
    (folder / "struck.partial").rename(folder / "struck")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exit":
        os._exit(3)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        raise Planted("planted fault")


def struck(folder: Path) -> float:
    """When it happened, on the steady clock, which all processes of a machine share."""
    wait_until((folder / "struck").exists, 10, "the fault to strike")
    return float((folder / "struck").read_text())


def plant(point: str, how: str, folder: Path) -> None:
    """Have a fault strike in the next operation: before this member comes to it (`coming`); once all have told each
    other where their tensors are (`told`); or once it has done its part, and the others may not (`leaving`)."""
    board = world().board
    come, steps = board.come, 0

    def struck_on_the_way(*arguments: Any) -> None:
        nonlocal steps
        steps += 1
        if (point, steps) in (("coming", 1), ("leaving", 2)):
            strike(how, folder)
        come(*arguments)
        if (point, steps) == ("told", 1):
            strike(how, folder)

    board.come = struck_on_the_way


def world() -> Any:
    """This member's place in the group that all are in."""
    return distributed.GroupMember.WORLD.group  # type: ignore[union-attr]


@contextlib.contextmanager
def band(size: int, timeout: float = PATIENT, closed: bool = False) -> Iterator[Pool]:
    """A group of processes of which nothing is left afterwards, whatever happened to them."""
    with pytest.MonkeyPatch.context() as patch:
        if closed:  # as in containers that forbid to look into another process
            patch.setattr(Reach, "permit", lambda *_: False)
        pool = Pool(size, timeout=timeout)
    try:
        yield pool
    except BaseException:
        clear(pool)
        raise
    finally:
        pool.close()


def clear(pool: Pool) -> None:
    for pid in pool.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def dead(pid: int) -> bool:
    return state_of(pid) in ("", "Z")


def in_operation(rank: int, folder: Path, victim: int, kind: str, large: bool, mode: str, point: str, how: str) -> Told:
    size = distributed.get_world_size()
    case = prepared(kind, rank, size, size_of(kind, large))
    distributed.barrier()
    if rank == victim:
        plant(point, how, folder)
    outcome = told(lambda: case.do(mode))
    if outcome.kind:
        case.scribble()
    elif not case.right:
        return outcome._replace(text="garbage")
    return outcome


def assert_all_are_told(pool: Pool, folder: Path, victim: int, seconds: float = SOON, how: str = "kill") -> None:
    """Every survivor lives, and knows in time who is gone."""
    gone = (victim,) if how in ("kill", "exit", "stop") else ()
    outcomes: list[Told] = pool.finish(PATIENT + 10, dead=gone)
    at = struck(folder)
    for rank, pid in enumerate(pool.pids):
        if rank == victim:
            if how in ("kill", "exit"):
                wait_until(lambda pid=pid: dead(pid), 2, "the victim to be dead")  # type: ignore[misc]
            continue
        outcome = outcomes[rank]
        assert not dead(pid)
        assert outcome.ours, f"rank {rank}: {outcome}"
        assert outcome.names(victim), f"rank {rank}: {outcome}"
        assert outcome.at - at < seconds, f"rank {rank} was told after {outcome.at - at:.1f} s: {outcome}"


# -- a rank that dies in a collective --------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "victim"), [(2, 0), (3, 1), (4, 3)])
@pytest.mark.parametrize("kind", [*KINDS, "barrier"])
def test_all_are_told_who_died_before_it_came(kind: str, size: int, victim: int, tmp_path: Path) -> None:
    with band(size) as pool:
        pool.begin(in_operation, tmp_path, victim, kind, False, "now", "coming", "kill")
        assert_all_are_told(pool, tmp_path, victim)


@pytest.mark.parametrize(("size", "victim", "point"), [(2, 1, "told"), (3, 0, "leaving"), (4, 2, "told")])
@pytest.mark.parametrize("kind", KINDS)
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
        board = world().board
        come = board.come

        def slow(*arguments: Any) -> None:
            come(*arguments)
            time.sleep(0.3)

        board.come = slow
    return told(lambda: case.do("now"))


@pytest.mark.parametrize("closed", [False, True])
def test_what_a_dead_rank_had_exposed_is_a_lost_rank_and_not_a_lost_file(closed: bool, tmp_path: Path) -> None:
    with band(2, closed=closed) as pool:
        pool.begin(late_to_look, tmp_path)
        assert_all_are_told(pool, tmp_path, 1)


# -- what comes after ------------------------------------------------------------------------------------------------


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
        for rank, outcomes in enumerate(pool.finish(PATIENT, dead=(1,))):
            if rank != 1:
                for outcome in outcomes:
                    assert outcome.ours, f"rank {rank}: {outcome}"
                    assert outcome.names(1), f"rank {rank}: {outcome}"
        struck(tmp_path)


# -- a rank that is stopped ------------------------------------------------------------------------------------------


def stopped_in(large: bool, point: str, folder: Path) -> Iterator[tuple[str, Pool, list[Told]]]:
    """Groups in which rank 1 is stopped, all at once, since they do nothing but wait; it goes on once all gave up."""
    with contextlib.ExitStack() as stack:
        pools = {}
        for kind in KINDS:
            (folder / kind).mkdir()
            pools[kind] = stack.enter_context(band(3, IMPATIENT))
        for kind, pool in pools.items():
            pool.begin(in_operation, folder / kind, 1, kind, large, "now", point, "stop")
        for kind, pool in pools.items():
            outcomes = pool.finish(dead=(1,))
            assert state_of(pool.pids[1]) == "T"
            yield kind, pool, outcomes


@pytest.mark.parametrize(("large", "point"), [(False, "coming"), (True, "told")])
def test_a_stopped_rank_is_named_after_the_timeout_and_takes_no_garbage_later(
    large: bool, point: str, tmp_path: Path
) -> None:
    wrong = []
    for kind, pool, outcomes in stopped_in(large, point, tmp_path):
        at = struck(tmp_path / kind)
        for rank in (0, 2):
            assert outcomes[rank].ours, f"{kind}: {outcomes[rank]}"
            assert outcomes[rank].names(1), f"{kind}: {outcomes[rank]}"
            assert IMPATIENT - 0.5 < outcomes[rank].at - at < IMPATIENT + SOON, kind
        os.kill(pool.pids[1], signal.SIGCONT)
        assert pool._members[1][1].poll(10), f"{kind}: rank 1 went on, and never ended"
        back: Told = pickle.loads(pool._members[1][1].recv_bytes())
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
    wait_until((folder / "went-on").exists, 10, "rank 1 to go on")
    spoilt = sum(int((other != 7).sum()) for other in others)
    return outcome, address in [other.data_ptr() for other in others], spoilt


def test_nobody_writes_into_memory_that_its_owner_has_given_up(tmp_path: Path) -> None:
    with band(2, IMPATIENT) as pool:
        pool.begin(overwritten, tmp_path)
        struck(tmp_path)
        wait_until(lambda: state_of(pool.pids[1]) == "T", 5, "rank 1 to be stopped")
        wait_until((tmp_path / "gave-up").exists, 10, "rank 0 to give up")
        os.kill(pool.pids[1], signal.SIGCONT)
        assert pool._members[1][1].poll(10)
        (tmp_path / "went-on").touch()
        (outcome, _, spoilt), back = pool.finish()
        assert outcome.names(1)
        assert back.ours
        assert not spoilt, f"{spoilt} elements of tensors that had nothing to do with it were overwritten"


# -- death in the middle of large transfers --------------------------------------------------------------------------


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
    for trial, size in enumerate((2, 3, 2, 3)):
        victim, delay = chance.randrange(size), chance.uniform(0, 0.4)
        folder = tmp_path / str(trial)
        folder.mkdir()
        with band(size, closed=kind == "closed") as pool:
            pool.begin(shaken, folder, 50_000_000, kind)
            wait_until((folder / "shaking").exists, 20, "the first transfer")
            time.sleep(delay)
            (folder / "struck").write_text(str(time.monotonic()))
            os.kill(pool.pids[victim], signal.SIGKILL)
            assert_all_are_told(pool, folder, victim)


# -- a rank that dies while others wait for its message --------------------------------------------------------------


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


@pytest.mark.parametrize(("size", "victim"), [(2, 1), (3, 0)])
@pytest.mark.parametrize("what", [name for name in MESSAGES if name not in ("from-anybody", "monitored-barrier")])
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
        outcome = pool.finish(dead=(1,))[0]
        assert state_of(pool.pids[1]) == "T"
        os.kill(pool.pids[1], signal.SIGKILL)
        assert outcome.kind == "TeamTimeout"
        assert outcome.names(1)
        assert IMPATIENT - 0.5 < outcome.at - struck(tmp_path) < IMPATIENT + SOON


def from_the_dead(rank: int, folder: Path, shared: bool) -> Told | None:
    if rank == 1:
        tensor = collectives.empty(LARGE) if shared else torch.empty(LARGE)
        distributed.isend(tensor, 0)
        distributed.isend(torch.full((5,), 3.0), 0, tag=1)
        strike("kill", folder)
    wait_until((folder / "struck").exists, 5, "the sender to be gone")
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


def late_to_a_barrier(rank: int) -> list[Told]:
    limit = datetime.timedelta(seconds=0.5)
    if rank == 1:
        time.sleep(1.0)
    first = told(lambda: distributed.monitored_barrier(timeout=limit))
    time.sleep(1.0 if rank == 0 else 0.2)
    distributed.barrier()
    if rank == 1:  # this time it does not come at all
        return [first]
    return [first, told(lambda: distributed.monitored_barrier(timeout=limit))]


def test_who_was_late_to_one_monitored_barrier_is_not_taken_to_be_at_the_next() -> None:
    with band(2) as pool:
        first, second = pool.run(late_to_a_barrier)[0]
        assert first.names(1)
        assert second.ours, "rank 0 passed a barrier that rank 1 never came to"
        assert second.names(1)


# -- ranks that do different things ----------------------------------------------------------------------------------


class Differing(NamedTuple):
    """Rank 1 does something else than the others; all must be told both."""

    right: Callable[[int, int], Any]
    wrong: Callable[[int, int], Any]
    words: tuple[str, ...]


def ones(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


def exchanged(name: str, counts: tuple[int, ...], wrong: tuple[int, ...]) -> Differing:
    """Rank 1 expects a part of another size from rank 2; or has one for it."""
    d = distributed

    def all_gather(sizes: tuple[int, ...]) -> Callable[[int, int], Any]:
        return lambda rank, size: d.all_gather([ones(count) for count in sizes], ones(counts[rank]))

    def gather(sizes: tuple[int, ...]) -> Callable[[int, int], Any]:
        return lambda rank, size: d.gather(ones(sizes[rank]), [ones(n) for n in counts] if rank == 2 else None, 2)

    def scatter(sizes: tuple[int, ...]) -> Callable[[int, int], Any]:
        return lambda rank, size: d.scatter(ones(sizes[rank]), [ones(n) for n in counts] if rank == 2 else None, 2)

    def all_to_all(sizes: tuple[int, ...]) -> Callable[[int, int], Any]:
        return lambda rank, size: d.all_to_all([ones(n) for n in sizes], [ones(counts[rank]) for _ in range(size)])

    def reduce_scatter(sizes: tuple[int, ...]) -> Callable[[int, int], Any]:
        return lambda rank, size: d.reduce_scatter(ones(sizes[rank]), [ones(n) for n in sizes])

    made = {
        "all_gather": all_gather,
        "gather": gather,
        "scatter": scatter,
        "all_to_all": all_to_all,
        "reduce_scatter": reduce_scatter,
    }[name]
    differing = [count for count, other in zip(counts, wrong, strict=True) if count != other]
    others = [other for count, other in zip(counts, wrong, strict=True) if count != other]
    return Differing(made(counts), made(wrong), (f"{4 * differing[0]} bytes", f"{4 * others[0]} bytes", name))


DIFFERING = {
    "shape": Differing(
        lambda *_: distributed.all_reduce(ones(10)),
        lambda *_: distributed.all_reduce(ones(11)),
        ("all_reduce of 10 x float32 (sum)", "all_reduce of 11 x float32 (sum)"),
    ),
    "large-shape": Differing(
        lambda *_: distributed.all_reduce(ones(LARGE)),
        lambda *_: distributed.all_reduce(ones(LARGE + 1)),
        (f"all_reduce of {LARGE} x float32 (sum)", f"all_reduce of {LARGE + 1} x float32 (sum)"),
    ),
    "small-and-large": Differing(
        lambda *_: distributed.all_reduce(ones(LARGE)),
        lambda *_: distributed.all_reduce(ones(10)),
        (f"all_reduce of {LARGE} x float32 (sum)", "all_reduce of 10 x float32 (sum)"),
    ),
    "dtype": Differing(
        lambda *_: distributed.all_reduce(ones(10)),
        lambda *_: distributed.all_reduce(ones(10, torch.int32)),
        ("all_reduce of 10 x float32 (sum)", "all_reduce of 10 x int32 (sum)"),
    ),
    "large-dtype": Differing(
        lambda *_: distributed.broadcast(ones(LARGE), 0),
        lambda *_: distributed.broadcast(ones(LARGE, torch.int32), 0),
        (f"broadcast of {LARGE} x float32", f"broadcast of {LARGE} x int32"),
    ),
    "operator": Differing(
        lambda *_: distributed.all_reduce(ones(10)),
        lambda *_: distributed.all_reduce(ones(10), ReduceOp.MAX),
        ("all_reduce of 10 x float32 (sum)", "all_reduce of 10 x float32 (max)"),
    ),
    "root-of-broadcast": Differing(
        lambda *_: distributed.broadcast(ones(10), 0),
        lambda *_: distributed.broadcast(ones(10), 1),
        ("with root 0", "with root 1"),
    ),
    "root-of-reduce": Differing(
        lambda *_: distributed.reduce(ones(LARGE), 2),
        lambda *_: distributed.reduce(ones(LARGE), 0),
        ("with root 2", "with root 0"),
    ),
    "root-of-gather": Differing(
        lambda rank, size: distributed.gather(ones(5), [ones(5)] * size if rank == 0 else None, 0),
        lambda rank, size: distributed.gather(ones(5), [ones(5)] * size, 1),
        ("gather of float32 with root 0", "gather of float32 with root 1"),
    ),
    "root-of-scatter": Differing(
        lambda rank, size: distributed.scatter(ones(5), [ones(5)] * size if rank == 0 else None, 0),
        lambda rank, size: distributed.scatter(ones(5), [ones(5)] * size, 1),
        ("scatter of float32 with root 0", "scatter of float32 with root 1"),
    ),
    "operation": Differing(
        lambda *_: distributed.all_reduce(ones(10)),
        lambda *_: distributed.broadcast(ones(10), 0),
        ("all_reduce of 10 x float32 (sum)", "broadcast of 10 x float32 with root 0"),
    ),
    "barrier": Differing(
        lambda rank, size: distributed.all_gather([ones(LARGE) for _ in range(size)], ones(LARGE)),
        lambda *_: distributed.barrier(),
        ("all_gather of float32", "barrier"),
    ),
    "outputs-of-all-gather": exchanged("all_gather", (10, 10, 10), (10, 10, 11)),
    "large-outputs-of-all-gather": exchanged("all_gather", (LARGE, LARGE, LARGE), (LARGE, LARGE, LARGE - 1)),
    "input-of-gather": exchanged("gather", (10, 10, 10), (10, 11, 10)),
    "output-of-scatter": exchanged("scatter", (LARGE, LARGE, LARGE), (LARGE, LARGE - 7, LARGE)),
    "outputs-of-all-to-all": exchanged("all_to_all", (10, 20, 30), (10, 20, 31)),
    "large-outputs-of-all-to-all": exchanged("all_to_all", (LARGE, 20, LARGE), (LARGE, 20, LARGE + 3)),
    "inputs-of-reduce-scatter": exchanged("reduce_scatter", (10, 10, 10), (10, 10, 12)),
    "splits-of-all-to-all": Differing(
        lambda rank, size: distributed.all_to_all_single(ones(6), ones(6), [2, 2, 2], [2, 2, 2]),
        lambda rank, size: distributed.all_to_all_single(ones(6), ones(6), [2, 2, 2], [3, 2, 1]),
        ("rank 1 has 12 bytes for rank 0, which expects 8 bytes", "all_to_all"),
    ),
}


def differs(rank: int, name: str) -> tuple[Told, bool]:
    size = distributed.get_world_size()
    case = DIFFERING[name]
    outcome = told(lambda: (case.wrong if rank == 1 else case.right)(rank, size))
    return outcome, all_is_well(rank)


def all_is_well(rank: int) -> bool:
    """The group still gives right results, small and large."""
    size = distributed.get_world_size()
    cases = [prepared(kind, rank, size, count) for kind in KINDS for count in (SMALL, LARGE)]
    for case in cases:
        case.do("now")
    return all(case.right for case in cases)


@pytest.mark.parametrize("name", DIFFERING)
def test_ranks_that_do_different_things_are_all_told_and_can_go_on(name: str) -> None:
    with band(3, IMPATIENT) as pool:
        for outcome, well in pool.run(differs, name):
            assert outcome.kind == "Mismatch", outcome
            for word in DIFFERING[name].words:
                assert word in outcome.text, outcome
            assert outcome.names(1)
            assert well


@pytest.mark.parametrize("name", ["large-shape", "large-dtype", "large-outputs-of-all-to-all"])
def test_they_are_told_where_memory_is_closed(name: str) -> None:
    with band(3, IMPATIENT, closed=True) as pool:
        for outcome, well in pool.run(differs, name):
            assert outcome.kind == "Mismatch", outcome
            assert well


def differs_in_the_queue(rank: int) -> list[str]:
    size = distributed.get_world_size()
    cases = [prepared("all_reduce", rank, size, SMALL + (number == 2 and rank == 1)) for number in range(5)]
    works = [case.call(True) for case in cases]
    outcomes = [told(work.wait) for work in works]
    return [outcome.kind or ("right" if case.right else "wrong") for outcome, case in zip(outcomes, cases, strict=True)]


def test_of_operations_that_were_begun_only_the_differing_one_fails() -> None:
    assert run_group(differs_in_the_queue, 3) == [["right", "right", "Mismatch", "right", "right"]] * 3


def asks_wrongly(rank: int) -> Told:
    if rank == 1:
        with pytest.raises(UsageError):
            distributed.all_gather_into_tensor(torch.empty(7), torch.ones(3))
        time.sleep(IMPATIENT + 0.5)
    return told(lambda: distributed.all_gather_into_tensor(torch.empty(9), torch.ones(3)))


def test_what_one_rank_alone_can_see_to_be_wrong_does_not_hang_the_others() -> None:
    with band(3, IMPATIENT) as pool:
        zero, _, two = pool.run(asks_wrongly)
        for outcome in (zero, two):
            assert outcome.kind == "TeamTimeout"
            assert outcome.names(1)


def one_fewer(rank: int, leaves: bool) -> Told:
    for number in range(3):
        if rank == 1 and number == 2:
            if leaves:
                distributed.destroy_process_group()
                return Told("left", "", 0.0, True)
            return told(distributed.barrier)
        outcome = told(lambda: distributed.all_reduce(ones(10)))
        if outcome.kind:
            return outcome
    return outcome


@pytest.mark.parametrize("leaves", [True, False])
def test_a_rank_that_does_one_operation_fewer_is_named(leaves: bool) -> None:
    with band(3) as pool:
        start = time.monotonic()
        zero, one, two = pool.run(one_fewer, leaves)
        assert one.kind == ("left" if leaves else "Mismatch")
        for outcome in (zero, two):
            assert outcome.kind == ("WorkerLost" if leaves else "Mismatch")
            assert outcome.names(1)
            assert outcome.at - start < SOON


def sends_another(rank: int, sent: torch.Tensor, expected: torch.Tensor) -> tuple[Told, bool]:
    outcome = told((lambda: distributed.send(sent, 1)) if rank == 0 else (lambda: distributed.recv(expected, 0)))
    again = torch.full((LARGE,), 5.0) if rank == 0 else torch.empty(LARGE)
    distributed.send(again, 1) if rank == 0 else distributed.recv(again, 0)
    return outcome, bool(again.eq(5).all())


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (ones(10), ones(11)),
        (ones(10), ones(10, torch.int32)),
        (ones(LARGE), ones(LARGE - 1)),
        (ones(LARGE), ones(LARGE, torch.int32)),
        (ones(LARGE), ones(10)),
        (ones(10), ones(LARGE)),
    ],
    ids=["size", "dtype", "large-size", "large-dtype", "large-for-small", "small-for-large"],
)
def test_a_message_that_is_not_what_was_expected(sent: torch.Tensor, expected: torch.Tensor, closed: bool) -> None:
    with band(2, IMPATIENT, closed) as pool:
        (sender, fine), (receiver, good) = pool.run(sends_another, sent, expected)
        assert receiver.kind == "Mismatch"
        assert f"{sent.numel()} x {sent.dtype}" in receiver.text
        assert f"{expected.numel()} x {expected.dtype}" in receiver.text
        if sent.nbytes > 16 * 1024:  # a small one was on its way before anybody could object
            assert sender.kind == "Mismatch"
            assert f"{sent.numel()} x {sent.dtype}" in sender.text
            assert f"{expected.numel()} x {expected.dtype}" in sender.text
            assert sender.names(1)
        assert fine
        assert good


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------


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
        wait_until((folder / "struck").exists, 10, "rank 0 to be interrupted")

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
        wait_until((tmp_path / "waiting").exists, 10, "rank 0 to wait")
        time.sleep(0.3)
        sent = time.monotonic()
        os.kill(pool.pids[0], signal.SIGINT)
        zero, *others = pool.finish()
        assert zero.kind == "KeyboardInterrupt"
        assert zero.at - sent < 1
        for outcome in others:
            assert outcome.ours, outcome
            assert outcome.names(0), outcome
            assert outcome.at - zero.at < SOON


def interrupted_in_message(rank: int, folder: Path) -> Any:
    if rank == 1:
        wait_until((folder / "struck").exists, 10, "rank 0 to be interrupted")
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
        wait_until((tmp_path / "waiting").exists, 10, "rank 0 to wait")
        time.sleep(0.3)
        sent = time.monotonic()
        os.kill(pool.pids[0], signal.SIGINT)
        result = pool.finish()[0]
        assert not isinstance(result, BaseException), repr(result)
        at, right = result
        assert at - sent < 1
        assert right


# -- many at once ----------------------------------------------------------------------------------------------------


def in_threads(count: int, work: Callable[[int], None]) -> list[str]:
    """What went wrong in so many threads."""
    wrong: list[str] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            wrong.append(f"{number}: {error!r}")

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for number, thread in enumerate(threads):
        thread.join(40)
        if thread.is_alive():
            wrong.append(f"{number}: hangs")
    return wrong


def twenty_groups(rank: int) -> list[str]:
    size = distributed.get_world_size()
    groups = [distributed.new_group(list(range(size))) for _ in range(20)]

    def work(number: int) -> None:
        group, chance = groups[number], random.Random(number)
        begun = []
        for _ in range(25):
            count = chance.choice((1, 50, 3000, 40_000))
            tensor = torch.full((count,), float(rank + number))
            begun.append((tensor, distributed.all_reduce(tensor, group=group, async_op=True)))
        for tensor, operation in begun:
            operation.wait()
            assert tensor.eq(sum(range(size)) + size * number).all()

    return in_threads(len(groups), work)


@pytest.mark.parametrize("closed", [False, True])
def test_twenty_threads_use_twenty_groups(closed: bool) -> None:
    with band(2, closed=closed) as pool:
        assert pool.run(twenty_groups) == [[], []]


def two_threads(rank: int) -> list[str]:
    size, rounds = distributed.get_world_size(), 300

    def collect() -> None:
        chance = random.Random(1)
        for _ in range(rounds):
            case = prepared(chance.choice(KINDS), rank, size, chance.choice((7, SMALL, LARGE // 2)))
            case.do(chance.choice(("now", "async")))
            assert case.right

    def converse() -> None:
        chance = random.Random(2)
        for number in range(rounds):
            count = chance.choice((1, 100, 20_000))
            given, taken = torch.full((count,), float(1000 * rank + number)), torch.empty(count)
            sending = distributed.isend(given, (rank + 1) % size, tag=number % 5)
            distributed.recv(taken, (rank - 1) % size, tag=number % 5)
            sending.wait()  # type: ignore[union-attr]
            assert taken.eq(1000 * ((rank - 1) % size) + number).all()

    return in_threads(2, lambda number: (collect, converse)[number]())


def test_collectives_and_messages_of_two_threads_do_not_mix() -> None:
    assert run_group(two_threads, 3) == [[], [], []]


def hundreds(rank: int) -> str:
    size, chance = distributed.get_world_size(), random.Random(3)
    cases = [prepared(chance.choice(KINDS), rank, size, chance.choice((7, SMALL, LARGE // 2))) for _ in range(300)]
    begun = [case.call(True) for case in cases]
    for work in reversed(begun):
        work.wait()
    assert all(case.right for case in cases)
    peer = rank ^ 1
    counts = [chance.choice((1, 100, 20_000)) for _ in range(300)]
    taken = [torch.empty(count) for count in counts]
    receiving = [distributed.irecv(tensor, peer) for tensor in taken]
    sending = [distributed.isend(torch.full((count,), float(number)), peer) for number, count in enumerate(counts)]
    for transfer in reversed([*sending, *receiving]):
        transfer.wait()  # type: ignore[union-attr]
    assert all(tensor.eq(number).all() for number, tensor in enumerate(taken))
    return "right"


@pytest.mark.parametrize("closed", [False, True])
def test_hundreds_of_operations_are_outstanding(closed: bool) -> None:
    with band(2, closed=closed) as pool:
        assert pool.run(hundreds) == ["right", "right"]


def backwards(rank: int, count: int) -> str:
    tags = range(100)
    if rank == 0:
        for sending in [distributed.isend(torch.full((count,), float(tag)), 1, tag=tag) for tag in tags]:
            sending.wait()  # type: ignore[union-attr]
        return "right"
    for tag in reversed(tags):
        tensor = torch.empty(count)
        distributed.recv(tensor, 0, tag=tag)
        assert tensor.eq(tag).all()
    return "right"


@pytest.mark.parametrize("count", [10, 20_000], ids=["small", "large"])
def test_messages_may_be_asked_for_in_any_order(count: int) -> None:
    with band(2, 2 * IMPATIENT) as pool:
        pool.begin(backwards, count)
        assert [repr(result) for result in pool.finish()] == ["'right'", "'right'"]


def from_a_callback(rank: int, blocking: bool) -> float:
    """As communication hooks do it: what is done with one result is another operation."""

    def then(_: Any) -> torch.Tensor:
        tensor = ones(10)
        if blocking:
            distributed.all_reduce(tensor)
            return tensor
        begun: Any = distributed.all_reduce(tensor, async_op=True)
        return begun.get_future().wait()[0]

    begun: Any = distributed.all_reduce(ones(10), async_op=True)
    chained = begun.get_future().then(then)
    return float(chained.wait()[0])


@pytest.mark.parametrize("blocking", [True, False])
def test_an_operation_may_be_done_in_the_callback_of_another(blocking: bool) -> None:
    with band(2, IMPATIENT) as pool:
        pool.begin(from_a_callback, blocking)
        assert pool.finish(2 * SOON) == [2.0, 2.0]


def every_kind(rank: int, rounds: int, seed: int) -> list[str]:
    size, chance = distributed.get_world_size(), random.Random(seed)
    wrong = []
    for number in range(rounds):
        kind, root = chance.choice([*KINDS, "barrier"]), chance.randrange(size)
        case = prepared(kind, rank, size, chance.randrange(1, 50), root)
        case.do("async" if chance.random() < 0.1 else "now")
        if not case.right:
            wrong.append(f"{number}: {kind}")
    return wrong


def test_eight_ranks_on_few_cores_do_thousands_of_collectives() -> None:
    with band(8) as pool:
        start = time.monotonic()
        assert pool.run(every_kind, 2000, 4) == [[]] * 8
        assert time.monotonic() - start < 30


def test_three_ranks_do_thousands_of_collectives_where_memory_is_closed() -> None:
    with band(3, closed=True) as pool:
        assert pool.run(every_kind, 1000, 5) == [[]] * 3


# -- leaving in the middle -------------------------------------------------------------------------------------------


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
        assert took < SOON
        assert other.ours
        assert other.names(0)


ENDINGS = """
import datetime, json, os, sys, tempfile, time
import torch
from torch import distributed as dist
import paceline, paceline.collectives.process_group

way, trials, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
children, own = [], None
for trial in range(trials):
    for rank in range(2):
        pid = os.fork()
        if not pid:
            own = trial, rank
            break
        children.append((trial, rank, pid))
    if own:
        break

def said(text):
    with open(f"{folder}/said-{trial}-{rank}", "w") as file:
        file.write(text)

if own:
    sys.stderr = open(f"{folder}/stderr-{trial}-{rank}", "w")
    os.dup2(sys.stderr.fileno(), 2)
    store = dist.FileStore(f"{folder}/store-{trial}", 2)
    limit = datetime.timedelta(seconds=20)
    dist.init_process_group("paceline", store=store, rank=rank, world_size=2, timeout=limit)
    dist.barrier()
    if rank == 0:
        if way in ("small", "large", "destroy"):
            works = [dist.all_reduce(torch.ones(1_000_000 if way == "large" else 10), async_op=True) for _ in range(20)]
            works += [dist.irecv(torch.empty(10), 1)]
            time.sleep(0.003 * trial)
            if way == "destroy":
                dist.destroy_process_group()
        elif way == "raise":
            raise ValueError("planted fault")
        said("ends")
    else:
        try:
            for _ in range(40):
                dist.all_reduce(torch.ones(1_000_000 if way == "large" else 10))
                if way == "small" or way == "destroy":
                    time.sleep(0.001)
        except paceline.TeamError as error:
            said(f"{time.monotonic()} {type(error).__name__}: {error}")
else:
    codes = {}
    for trial, rank, pid in children:
        codes[f"{trial}-{rank}"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(json.dumps(codes))
"""
"""Interpreters that come to their ends, two for each trial, forked so that torch is imported once."""


@pytest.mark.parametrize("way", ["small", "large", "destroy", "raise"])
def test_a_script_may_end_at_any_time_and_the_others_are_told(way: str, tmp_path: Path) -> None:
    trials, folder = 6, tmp_path / "notes"
    folder.mkdir()
    start = time.monotonic()
    command = [PYTHON, write_script(tmp_path, ENDINGS), way, str(trials), str(folder)]
    outcome = finished(command, tmp_path, 40.0)
    assert outcome.code == 0, outcome.err
    assert time.monotonic() - start < 15
    codes = json.loads(outcome.out)
    for trial in range(trials):
        words = (folder / f"said-{trial}-1").read_text()
        assert "rank 0" in words
        assert "WorkerLost" in words or "TeamError" in words or "Mismatch" in words
        if way == "raise":
            assert "planted fault" in (folder / f"stderr-{trial}-0").read_text()
        else:
            assert (folder / f"said-{trial}-0").read_text() == "ends"
    expected = {f"{trial}-{rank}": int(way == "raise" and rank == 0) for trial in range(trials) for rank in range(2)}
    crashed = {key: (folder / f"stderr-{key}").read_text() for key, code in codes.items() if code < 0}
    assert codes == expected, f"{len(crashed)} of {len(codes)} crashed at their end: {crashed}"


# -- nothing is left -------------------------------------------------------------------------------------------------


def test_nothing_is_left_of_a_group_that_failed(tmp_path: Path) -> None:
    before = shared_files()
    with band(3) as pool:
        pids = pool.pids
        pool.begin(in_operation, tmp_path, 1, "all_reduce", True, "async", "told", "kill")
        assert_all_are_told(pool, tmp_path, 1)
        start = time.monotonic()
    assert time.monotonic() - start < SOON
    assert all(state_of(pid) == "" for pid in pids)
    wait_until(lambda: shared_files() <= before, 5, "/dev/shm to be as it was")


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def held() -> tuple[int, int]:
    """Descriptors, and mapped segments, of this process."""
    maps = Path("/proc/self/maps").read_text()
    return descriptors(), maps.count("memfd:paceline")


def makes_groups(rank: int, count: int) -> list[tuple[int, int]]:
    seen = []
    for _ in range(count):
        group = distributed.new_group([0, 1])
        distributed.all_reduce(ones(LARGE), group=group)
        distributed.all_reduce(ones(10), group=group, async_op=True).wait()  # type: ignore[union-attr]
        if rank:
            distributed.isend(ones(LARGE), 0, group=group).wait()  # type: ignore[union-attr]
        else:
            distributed.irecv(ones(LARGE), 1, group=group).wait()  # type: ignore[union-attr]
        distributed.destroy_process_group(group)
        del group
        seen.append(held())
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and threading.active_count() > 1:
        time.sleep(0.02)  # threads of the last group are about to end
    gc.collect()
    return [seen[0], held()]


def test_groups_that_were_destroyed_hold_nothing() -> None:
    for first, last in run_group(makes_groups, 2, 50):
        assert last[0] <= first[0] + 4, f"{last[0] - first[0]} more descriptors after 50 groups"
        assert last[1] <= first[1] + 4, f"{last[1] - first[1]} more mapped segments after 50 groups"


def makes_tensors(rank: int, count: int) -> dict[str, int]:
    most = {"descriptors": 0, "segments": 0, "megabytes": 0}
    for number in range(count):
        tensor = collectives.empty(2_000_000)
        tensor.fill_(rank + 1)
        distributed.all_reduce(tensor)
        assert tensor[number] == 3
        if number > count // 4:
            opened, segments = held()
            status = Path("/proc/self/status").read_text()
            resident = int(re.findall(r"RssShmem:\s+(\d+)", status)[0]) // 1024
            now = {"descriptors": opened, "segments": segments, "megabytes": resident}
            most = {key: max(most[key], now[key]) for key in most}
    return most


def test_segments_that_their_owner_let_go_are_dropped_by_all() -> None:
    for most in run_group(makes_tensors, 2, 200):
        assert most["segments"] < 12
        assert most["megabytes"] < 100, "each tensor has 8"
        assert most["descriptors"] < 60


def begins_and_forgets(rank: int) -> int:
    """Megabytes that 40 operations of 8 MB leave behind."""
    gc.collect()
    gc.disable()  # or it depends on chance when garbage is found
    distributed.all_reduce(torch.ones(2_000_000), async_op=True).wait()  # type: ignore[union-attr]
    before = resident_megabytes()
    for _ in range(40):
        distributed.all_reduce(torch.ones(2_000_000), async_op=True).wait()  # type: ignore[union-attr]
    return resident_megabytes() - before


def resident_megabytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 2**20


def test_an_operation_that_is_done_holds_no_tensors() -> None:
    for grown in run_group(begins_and_forgets, 2):
        assert grown < 80, f"{grown} MB of tensors are kept by operations that are done"


def makes_nothing(rank: int) -> int:
    before = descriptors()
    for _ in range(50):
        collectives.empty(0)
        collectives.empty(3, 0, 2)
    gc.collect()
    return descriptors() - before


def test_empty_tensors_hold_no_descriptors() -> None:
    assert run_group(makes_nothing, 1) == [0]
