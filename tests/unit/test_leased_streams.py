"""A leased stream gives every sample to one worker, whatever is cancelled, dropped or lost."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from helpers.streams import Count, Cut, Forever, ranges
from torch.utils.data import DataLoader, get_worker_info

from paceline.data import ShardedDataset
from paceline.data.epochs import Want
from paceline.data.leased_loader import LeasedEpoch, Minibatch
from paceline.data.ledger import Lease, Ledger
from paceline.data.stream.leased_stream import LeasedStream
from paceline.data.stream_epoch import StreamPlan
from paceline.errors import UsageError


class Server:
    """A ledger for workers that are threads."""

    def __init__(self, size: int, *, in_turns: bool = False) -> None:
        self.ledger = Ledger(range(size), in_turns=in_turns)
        self.changed = threading.Condition()
        self.drawing = False
        self.lost = 0
        self.ends: dict[tuple[int, int], int] = {}
        self.differs = False


class Lender:
    """One worker's leases."""

    splits = evaluates = False
    steps = 0
    lengths: tuple[int, Sequence[tuple[int, int]]] = (0, ())

    def __init__(self, server: Server, rank: int, size: int, *, in_turns: bool = False) -> None:
        self.server, self.rank, self.size, self.in_turns = server, rank, size, in_turns
        self.begun: list[Minibatch] = []
        self.marks: list[Any] = []

    def ask_batch(self) -> None:
        pass

    def from_first(self, draw: Callable[[], bytes]) -> bytes:
        return draw()

    def from_replica(self, payload: bytes) -> list[bytes]:
        return [payload]

    def enter(self, loader: int, epoch: int, draw: Callable[[], LeasedEpoch], shards: int = 0) -> bytes:
        server = self.server
        with server.changed:
            while not server.ledger.is_open(loader, epoch) and not server.ledger.is_past(loader, epoch):
                if not server.drawing and server.ledger.may_open(loader, epoch):
                    drawn = draw()
                    assert drawn.stream is not None
                    server.ledger.open_stream(loader, epoch, drawn.stream, drawn.sizes)
                else:
                    server.changed.wait(1.0)
            server.ledger.enter(self.rank, loader)
            server.changed.notify_all()
            return server.ledger.note(loader)

    def ask(self, loader: int, epoch: int, *, ahead: bool, lane: int = 0, most: int = 0) -> Lease | None:
        ledger = self.server.ledger
        with self.server.changed:
            while ledger.is_open(loader, epoch):
                lease = ledger.lease(self.rank, loader, ahead=ahead, want=Want(lane, not ahead, most))
                if lease is not None or ahead or ledger.is_over(loader):
                    self.lengths = ledger.lengths(loader)
                    return lease
                self.server.changed.wait(0.5)
            self.lengths = (0, ())
            return None

    def begin(self, minibatch: Minibatch) -> None:
        self.begun.append(minibatch)

    def skip(self, lease: Lease) -> None:
        self.done([lease])

    def done(self, leases: Sequence[Lease]) -> None:
        with self.server.changed:
            self.server.ledger.done([lease.number for lease in leases])
            self.server.changed.notify_all()

    def give_back(self, leases: Sequence[Lease]) -> None:
        with self.server.changed:
            self.server.ledger.give_back([lease.number for lease in leases])
            self.server.changed.notify_all()

    def report(
        self, loader: int, turn: int, marks: Sequence[Any] = (), ends: Sequence[tuple[int, int]] = (), lost: int = 0
    ) -> None:
        with self.server.changed:
            self.server.lost += lost
            self.marks += marks
            for source, length in ends:
                self.server.differs |= self.server.ends.setdefault((turn, source), length) != length
                self.server.ledger.end_source(loader, source, turn, length)
            self.server.changed.notify_all()

    def quit(self, loader: int, epoch: int) -> None:
        with self.server.changed:
            self.server.ledger.quit(self.rank, loader, epoch)
            self.server.changed.notify_all()

    def die(self) -> None:
        with self.server.changed:
            self.server.ledger.leave(self.rank)
            self.server.changed.notify_all()


Train = Callable[[Lender, Any, Minibatch], bool]
"""What a worker does with a batch: returns True if it has trained on it; None of it counts if it dies."""


class Died(Exception):
    """A worker was killed."""


def run(
    size: int,
    dataset: Any,
    *,
    epochs: int = 1,
    in_turns: bool = False,
    train: Train = lambda _lender, _batch, _minibatch: True,
    share: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[list[list[Any]]], Server]:
    """Per worker and epoch, the samples that it has trained on."""
    options.setdefault("collate_fn", list)
    server = Server(size, in_turns=in_turns)
    results: list[list[list[Any]]] = [[[] for _ in range(epochs)] for _ in range(size)]
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        lender = Lender(server, rank, size, in_turns=in_turns)
        try:
            loader = LeasedStream(DataLoader(dataset, **options), lender, 0, **(share or {}))
            for epoch in range(epochs):
                for batch in loader:
                    minibatch = lender.begun[-1]
                    if train(lender, batch, minibatch):
                        results[rank][epoch] += batch if isinstance(batch, list) else [batch]
                        lender.done(minibatch.leases)
                    else:
                        lender.give_back(minibatch.leases)
        except Died:
            lender.die()
        except BaseException as error:
            errors.append(error.with_traceback(None))  # whose frames would keep the loader's processes
            lender.die()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return results, server


def together(results: list[list[list[Any]]], epoch: int = 0) -> list[Any]:
    return sorted(itertools.chain(*(worker[epoch] for worker in results)))


def shards(sizes: list[int]) -> ShardedDataset:
    return ShardedDataset(ranges(sizes), lambda shard: range(*shard))


KINDS: dict[str, Callable[[], Any]] = {
    "plain": lambda: Count(83, divides=True),
    "shards": lambda: shards([20, 1, 30, 5, 7, 11, 9]),
    "small shards": lambda: shards([1] * 83),
    "parts": lambda: Cut(83),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("in_turns", [False, True])
def test_every_sample_goes_to_one_worker_in_every_epoch(kind: str, processes: int, in_turns: bool) -> None:
    results, server = run(2, KINDS[kind](), epochs=2, in_turns=in_turns, batch_size=8, num_workers=processes)
    for epoch in range(2):
        assert together(results, epoch) == list(range(83))
    assert not server.lost and not server.differs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("seed", range(2))
def test_what_is_cancelled_or_dropped_is_given_out_again(kind: str, processes: int, seed: int) -> None:
    chance = random.Random(seed)
    results, server = run(
        3, KINDS[kind](), epochs=2, train=lambda *_: chance.random() < 0.6, batch_size=12, num_workers=processes
    )
    for epoch in range(2):
        assert together(results, epoch) == list(range(83))
    assert not server.lost


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processes", [0, 2])
def test_the_samples_of_a_lost_worker_are_read_by_others(kind: str, processes: int) -> None:
    killed = threading.Event()

    def train(lender: Lender, _batch: Any, _minibatch: Minibatch) -> bool:
        if lender.rank == 1 and len(lender.begun) == 3:
            killed.set()
            raise Died
        if lender.rank == 0 and len(lender.begun) == 2:
            assert killed.wait(10.0)
        return True

    results, server = run(2, KINDS[kind](), epochs=2, train=train, batch_size=8, num_workers=processes)
    if server.lost:  # a plain stream cannot be read again, and may have gone by
        assert kind == "plain" and len(together(results)) + server.lost >= 83
    else:
        assert together(results) == list(range(83))
    assert together(results, 1) == list(range(83))


def test_a_minibatch_is_filled_up_from_several_shards() -> None:
    counts: list[int] = []

    def train(_lender: Lender, batch: Any, minibatch: Minibatch) -> bool:
        counts.append(len(batch))
        assert minibatch.samples == len(batch)
        return True

    run(1, shards([5, 1, 1, 9, 4, 13]), train=train, batch_size=8)
    assert counts == [8, 8, 8, 8, 1]
    counts.clear()
    results, _ = run(2, shards([3] * 11), train=train, batch_size=16, num_workers=2)
    assert together(results) == list(range(33))
    assert sum(count >= 6 for count in counts) >= 4  # whole ends of shards, as many as there is room for


def test_a_fast_worker_reads_more_shards() -> None:
    slow = threading.Event()

    def train(lender: Lender, _batch: Any, _minibatch: Minibatch) -> bool:
        if lender.rank == 1:
            slow.wait(0.05)
        return True

    results, _ = run(2, shards([10] * 12), train=train, batch_size=10)
    assert together(results) == list(range(120))
    assert len(results[0][0]) >= 2 * len(results[1][0])


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("in_turns", [False, True])
def test_an_epoch_of_so_many_steps_goes_on_where_the_last_one_stopped(processes: int, in_turns: bool) -> None:
    results, _ = run(
        2,
        Count(None, divides=True),
        epochs=3,
        in_turns=in_turns,
        share={"steps": 4},
        batch_size=6,
        num_workers=processes,
    )
    for epoch in range(3):
        assert len(together(results, epoch)) == 24
    found = sorted(itertools.chain(*(together(results, epoch) for epoch in range(3))))
    for process in range(processes or 1):  # one may be further than the other, where workers take what they need
        own = [number for number in found if number % (processes or 1) == process]
        assert own == list(range(process, own[-1] + 1, processes or 1))
    assert found == list(range(72)) or (processes and not in_turns)


def test_steps_end_the_epochs_of_shards_too() -> None:
    results, _ = run(2, shards([7] * 10), epochs=4, share={"steps": 4}, batch_size=6)
    assert [len(together(results, epoch)) for epoch in range(4)] == [24, 24, 22, 24]
    assert sorted(itertools.chain(*(together(results, epoch) for epoch in range(3)))) == list(range(70))


def test_a_loop_that_is_left_leaves_its_samples_to_others() -> None:
    results: list[list[list[int]]] = []
    for share in ({}, {"steps": 5}):
        server = Server(1)
        lender = Lender(server, 0, 1)
        loader = LeasedStream(DataLoader(Count(None), batch_size=2, collate_fn=list), lender, 0, **share)
        results.append([])
        for _ in range(2):
            for number, batch in enumerate(loader):
                if number == 2:
                    break
                results[-1].append(batch)
                lender.done(lender.begun[-1].leases)
    # What was left was not trained on.
    assert results == [[[0, 1], [2, 3], [0, 1], [2, 3]], [[0, 1], [2, 3], [4, 5], [6, 7]]]


def test_in_turns_every_worker_has_its_part_of_the_batches_of_one_process() -> None:
    parts: dict[int, dict[int, list[int]]] = {}

    def train(lender: Lender, batch: Any, minibatch: Minibatch) -> bool:
        parts.setdefault(minibatch.batch, {})[lender.rank] = batch
        return True

    run(3, Count(20), in_turns=True, train=train, batch_size=9)
    whole = [[value for rank in sorted(found) for value in found[rank]] for _, found in sorted(parts.items())]
    assert whole == [list(range(9)), list(range(9, 18)), [18, 19]]
    assert {len(part) for found in list(parts.values())[:2] for part in found.values()} == {3}


def test_a_small_batch_in_the_middle_is_refused_where_workers_take_turns() -> None:
    class Uneven(Count):
        def __iter__(self) -> Iterator[int]:
            return iter(range(1 if self.start else 12))

    def shorten(number: int) -> None:
        process = get_worker_info()
        assert process is not None
        dataset: Any = process.dataset
        dataset.start = number == 0

    with pytest.raises(UsageError, match="too few samples to be divided"):
        run(2, Uneven(12), in_turns=True, batch_size=4, num_workers=2, worker_init_fn=shorten)


def test_drop_last_drops_incomplete_minibatches() -> None:
    results, _ = run(2, Count(22), batch_size=8, drop_last=True)
    assert together(results) == list(range(20))
    results, _ = run(2, shards([11, 11]), batch_size=8, drop_last=True)
    assert len(together(results)) in (16, 20)


def test_keys_of_a_sampler_without_a_length_are_leased() -> None:
    for processes in (0, 2):
        results, _ = run(
            2, [10, 11, 12, 13, 14], share={"steps": 5}, batch_size=4, sampler=Forever(), num_workers=processes
        )
        assert Counter(together(results)) == dict.fromkeys(range(10, 15), 4)


def test_workers_that_read_a_stream_alike_have_equal_marks() -> None:
    marks: list[list[Any]] = []

    def train(lender: Lender, _batch: Any, _minibatch: Minibatch) -> bool:
        marks.append(lender.marks)
        return True

    run(2, Count(64), train=train, batch_size=4)
    known: dict[tuple[int, int], int] = {}
    for mark in itertools.chain(*marks):
        assert known.setdefault(mark[:2], mark[2]) == mark[2]
    assert (0, 1) in known and (0, 32) in known


def test_a_stream_s_epoch_is_over_when_all_sources_have_ended_and_all_is_done() -> None:
    ledger = Ledger(range(2), in_turns=False)
    ledger.open_stream(0, 0, StreamPlan(2, shared=False), [4])
    ledger.enter(0, 0)
    first, second = ledger.lease(0, 0), ledger.lease(1, 0)
    assert first is not None and second is not None
    assert (first.stretch, second.stretch) != (None, None)
    ledger.enter(1, 0)
    ledger.done([first.number])
    for source in range(2):
        ledger.end_source(0, source, 0, 4)
    assert not ledger.is_over(0)
    lost = ledger.leave(1)
    assert [lease.number for lease in lost] == [second.number]
    again = ledger.lease(0, 0)
    assert again is not None and again.stretch is not None and second.stretch is not None
    assert (again.stretch.source, again.stretch.start) == (second.stretch.source, 0)
    ledger.done([again.number])
    assert ledger.is_over(0)
