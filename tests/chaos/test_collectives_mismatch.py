"""Ranks that do different things: all are told what both wanted, nobody hangs, and the group goes on."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers.faults import IMPATIENT, KINDS, LARGE, SMALL, SOON, Told, band, prepared, told
from helpers.groups import run_group
from helpers.load import allowed
from torch import distributed
from torch.distributed import ReduceOp

from paceline.errors import UsageError


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
    store = distributed.distributed_c10d._get_default_store()
    if rank == 1:
        with pytest.raises(UsageError):
            distributed.all_gather_into_tensor(torch.empty(7), torch.ones(3))
        # Only now, however late they began to wait.
        store.wait(["given up/0", "given up/2"], datetime.timedelta(seconds=IMPATIENT + 20))
    outcome = told(lambda: distributed.all_gather_into_tensor(torch.empty(9), torch.ones(3)))
    store.set(f"given up/{rank}", "")
    return outcome


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
            assert outcome.at - start < allowed(SOON)


Message = tuple[int, torch.dtype]
"""How many elements of what."""


def spoken(message: Message) -> str:
    return f"{message[0]} x {message[1]}"


def sends_another(rank: int, sent: Message, expected: Message) -> tuple[Told, bool]:
    given, wanted = ones(*sent), ones(*expected)
    outcome = told((lambda: distributed.send(given, 1)) if rank == 0 else (lambda: distributed.recv(wanted, 0)))
    again = torch.full((LARGE,), 5.0) if rank == 0 else torch.empty(LARGE)
    distributed.send(again, 1) if rank == 0 else distributed.recv(again, 0)
    return outcome, bool(again.eq(5).all())


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ((10, torch.float32), (11, torch.float32)),
        ((10, torch.float32), (10, torch.int32)),
        ((LARGE, torch.float32), (LARGE - 1, torch.float32)),
        ((LARGE, torch.float32), (LARGE, torch.int32)),
        ((LARGE, torch.float32), (10, torch.float32)),
        ((10, torch.float32), (LARGE, torch.float32)),
    ],
    ids=["size", "dtype", "large-size", "large-dtype", "large-for-small", "small-for-large"],
)
def test_a_message_that_is_not_what_was_expected_is_refused(sent: Message, expected: Message, closed: bool) -> None:
    with band(2, IMPATIENT, closed) as pool:
        (sender, fine), (receiver, good) = pool.run(sends_another, sent, expected)
        assert receiver.kind == "Mismatch"
        assert spoken(sent) in receiver.text
        assert spoken(expected) in receiver.text
        assert receiver.names(0)
        # A small one was on its way before anybody could object.
        assert sender.kind == ("Mismatch" if sent[0] == LARGE else "")
        assert fine
        assert good


def test_who_sent_it_is_told_what_was_expected() -> None:
    with band(2, IMPATIENT) as pool:
        (sender, _), _ = pool.run(sends_another, (LARGE, torch.float32), (LARGE - 1, torch.int32))
        assert sender.names(1)
        assert spoken((LARGE, torch.float32)) in sender.text
        assert spoken((LARGE - 1, torch.int32)) in sender.text
