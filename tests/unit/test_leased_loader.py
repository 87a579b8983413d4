"""A leased loader is an ordinary DataLoader whose batches come when a worker asks for them."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler

from paceline.data.leased_loader import LeasedEpoch, LeasedLoader, Minibatch
from paceline.data.ledger import Lease, Ledger
from paceline.errors import TeamTimeout, UsageError


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self.count
        return index


class Lender:
    """A server that only lends, to workers who take turns to ask in one process."""

    def __init__(self, size: int = 1, rank: int = 0, ledger: Ledger | None = None) -> None:
        self.size, self.rank = size, rank
        self.ledger = ledger or Ledger(range(size), in_turns=False)
        self.begun: list[Lease] = []
        self.minibatches: list[Minibatch] = []
        self.asked: list[bool] = []
        self.left: list[tuple[int, int]] = []
        self.drawn: list[LeasedEpoch] = []
        self.fails: Exception | None = None
        self.batches = self.steps = 0
        self.lengths: tuple[int, list[tuple[int, int]]] = (0, [])
        self.evaluates = self.splits = self.in_turns = False
        self.first: bytes | None = None

    def from_first(self, draw: Callable[[], bytes]) -> bytes:
        if self.first is None:
            self.first = draw()
        return self.first

    def enter(self, loader: int, epoch: int, draw: Callable[[], LeasedEpoch], shards: int = 0) -> bytes:
        if not self.ledger.is_open(loader, epoch):
            drawn = draw()
            self.drawn.append(drawn)
            order = msgspec.msgpack.decode(drawn.order)
            self.ledger.open(loader, epoch, order, drawn.sizes, drop_last=drawn.drop_last)
        self.ledger.enter(self.rank, loader)
        return b""

    def ask(self, loader: int, epoch: int, *, ahead: bool, lane: int = 0, most: int = 0) -> Lease | None:
        assert self.ledger.is_open(loader, epoch)
        self.asked.append(ahead)
        if self.fails is not None:
            raise self.fails
        return self.ledger.lease(self.rank, loader, ahead=ahead)

    def ask_batch(self) -> None:
        self.batches += 1

    def keeps(self, _lease: Lease, _last: bool) -> bool:
        return True

    def begin(self, minibatch: Minibatch) -> None:
        self.begun += minibatch.leases
        self.minibatches.append(minibatch)
        self.ledger.done([lease.number for lease in minibatch.leases])

    def skip(self, lease: Lease) -> None:
        raise AssertionError("only a stream has leases without samples")

    def report(self, *_: Any, **_more: Any) -> None:
        raise AssertionError("only a stream is read by the worker itself")

    def from_replica(self, payload: bytes) -> list[bytes]:
        return [payload]

    def quit(self, loader: int, epoch: int) -> None:
        self.left.append((loader, epoch))
        self.ledger.quit(self.rank, loader, epoch)


def make(count: int, lender: Lender | None = None, *, share: dict[str, Any] | None = None, **options: Any) -> Any:
    options.setdefault("collate_fn", list)
    return LeasedLoader(DataLoader(Numbers(count), **options), lender or Lender(), 0, **(share or {}))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_alone_a_worker_gets_all_batches_as_plain_pytorch_makes_them(num_workers: int, drop_last: bool) -> None:
    lender = Lender()
    loader = make(23, lender, batch_size=4, drop_last=drop_last, num_workers=num_workers)
    plain = list(DataLoader(Numbers(23), batch_size=4, drop_last=drop_last, collate_fn=list))
    for epoch in range(2):
        assert list(loader) == plain
        assert [lease.keys for lease in lender.begun[-len(plain) :]] == plain
        assert {lease.epoch for lease in lender.begun[-len(plain) :]} == {epoch}
    assert len(loader) == len(plain)
    assert lender.left == []


@given(st.integers(0, 60), st.integers(1, 7), st.integers(1, 4), st.booleans())
def test_workers_that_share_a_ledger_get_every_sample_once(
    count: int, batch: int, workers: int, drop_last: bool
) -> None:
    ledger = Ledger(range(workers), in_turns=False)
    lenders = [Lender(workers, rank, ledger) for rank in range(workers)]
    loaders = [make(count, lender, batch_size=batch * workers, drop_last=drop_last) for lender in lenders]
    streams = [iter(loader) for loader in loaders]
    seen: list[int] = []
    asking = list(streams)
    while asking:
        stream = asking.pop(0)
        for part in stream:
            seen += part
            asking.append(stream)
            break
    assert sorted(seen) == list(range(count // batch * batch if drop_last else count))
    assert sum(len(lender.drawn) for lender in lenders) == 1


def test_a_batch_per_worker_is_a_minibatch() -> None:
    loader = make(12, Lender(2), batch_size=3, share={"per_worker": True})
    assert [len(batch) for batch in loader] == [3] * 4  # the other worker asks for none
    assert len(loader) == 2
    sampler = [[0, 1, 2], [3], [4, 5]]
    loader = make(6, Lender(2), batch_sampler=sampler, share={"per_worker": True})
    assert list(loader) == sampler
    assert len(loader) == 2


@given(st.integers(0, 60), st.integers(1, 7), st.integers(1, 4), st.booleans())
def test_workers_in_turns_have_equally_many_minibatches_of_a_batch_per_worker(
    count: int, batch: int, workers: int, drop_last: bool
) -> None:
    lender = Lender(workers)
    lender.in_turns = True
    loader = make(count, lender, batch_size=batch, drop_last=drop_last, share={"per_worker": True})
    if 0 < count < workers:
        return
    leases = list(loader)
    assert list(chain(*leases)) == list(range(count // (batch * workers) * batch * workers if drop_last else count))
    assert len(leases) == workers * len(loader)
    shares = [minibatch.share or 0.0 for minibatch in lender.minibatches]
    batches = [minibatch.batch for minibatch in lender.minibatches]
    for number in range(len(loader)):
        assert batches[number * workers : (number + 1) * workers] == [number] * workers
        assert sum(shares[number * workers : (number + 1) * workers]) == pytest.approx(1.0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_is_announced_before_it_is_handed_out_and_not_when_it_is_fetched(num_workers: int) -> None:
    lender = Lender()
    for number, batch in enumerate(make(20, lender, batch_size=2, num_workers=num_workers), 1):
        assert len(lender.begun) == number
        assert lender.begun[-1].keys == batch


def test_loader_processes_fetch_ahead_and_what_comes_back_is_loaded_here() -> None:
    ledger = Ledger(range(2), in_turns=False)
    lender = Lender(2, 0, ledger)
    loader = make(30, lender, batch_size=2, num_workers=2)
    stream = iter(loader)
    assert next(stream) == [0]
    assert all(lender.asked) and len(lender.asked) > 1
    seen = [0, *(value for batch in stream for value in batch)]
    assert sorted(seen) == list(range(30))
    assert lender.asked[-1] is False


def test_without_loader_processes_nothing_is_fetched_ahead() -> None:
    lender = Lender()
    loader = make(6, lender, batch_size=2)
    stream = iter(loader)
    next(stream)
    assert lender.asked == [False]
    assert list(chain(*stream)) == [2, 3, 4, 5]


def test_the_user_s_collate_function_makes_the_batches() -> None:
    loader = make(5, batch_size=2, collate_fn=lambda batch: ("sum", sum(batch)))
    assert list(loader) == [("sum", 1), ("sum", 5), ("sum", 4)]
    tensors = LeasedLoader(DataLoader(Numbers(4), batch_size=2), Lender(), 0)
    assert [batch.tolist() for batch in tensors] == [[0, 1], [2, 3]]


class Growing(Sampler[list[int]]):
    """Batches of 1, 2, 3, … samples."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in range(1, self.count + 1):
            yield list(range(start, start + size))
            start += size


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_batches_of_a_batch_sampler_are_leased_in_parts(num_workers: int) -> None:
    lender = Lender()
    loader = make(100, lender, batch_sampler=Growing(6), num_workers=num_workers)
    assert list(loader) == list(Growing(6))
    assert [lease.first for lease in lender.begun] == list(range(6))
    assert len(loader) == 6
    lender = Lender(4)
    loader = make(100, lender, batch_sampler=Growing(6), num_workers=num_workers)
    assert len(loader) == 6
    assert list(chain(*loader)) == list(range(21))
    parts = [[1], [1, 1], [1, 1, 1], [1, 1, 1, 1], [2, 1, 1, 1], [2, 2, 1, 1]]
    assert [len(lease.keys) for lease in lender.begun] == list(chain(*parts))


def test_a_batch_sampler_of_torch_s_own_kind_is_the_user_s_too() -> None:
    def sampler() -> BatchSampler:
        order = RandomSampler(range(22), generator=torch.Generator().manual_seed(4))
        return BatchSampler(order, batch_size=5, drop_last=True)

    assert list(make(22, batch_sampler=sampler())) == list(sampler())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_without_batches_samples_are_leased_one_by_one(num_workers: int) -> None:
    lender = Lender()
    loader = make(9, lender, batch_size=None, collate_fn=None, num_workers=num_workers)
    assert list(loader) == list(range(9))
    assert [lease.keys for lease in lender.begun] == [[number] for number in range(9)]
    assert len(loader) == 9
    assert len(make(9, Lender(2), batch_size=None, collate_fn=None)) == 5


def test_the_length_is_a_worker_s_part_if_all_are_equally_fast() -> None:
    assert [len(make(26, Lender(3), batch_size=12, drop_last=drop)) for drop in (False, True)] == [3, 2]
    assert len(make(24, Lender(2), share={"global_batch": 6}, batch_size=1)) == 4


def test_a_global_batch_is_divided_among_minibatches() -> None:
    lender = Lender(3)
    loader = make(20, lender, share={"global_batch": 8}, batch_size=5)
    assert [len(batch) for batch in loader] == [3, 3, 2, 3, 3, 2, 3, 1]
    assert loader.global_batch == 8
    assert make(20, Lender(3), batch_size=5).global_batch == 5
    with pytest.raises(UsageError, match="global_batch is 2; it must be at least the number of workers, 3"):
        make(20, Lender(3), share={"global_batch": 2}, batch_size=5)


def test_in_turns_only_the_last_batch_of_a_batch_sampler_may_be_too_small_for_all_workers() -> None:
    lender = Lender(3)
    lender.in_turns = True
    assert [len(batch) for batch in make(8, lender, batch_sampler=[[0, 1, 2], [3, 4, 5], [6, 7]])] == [1] * 8
    lender = Lender(3)
    lender.in_turns = True
    with pytest.raises(UsageError, match="has 2 samples, which cannot be divided among 3 workers"):
        list(make(8, lender, batch_sampler=[[0, 1, 2], [6, 7], [3, 4, 5]]))


@pytest.mark.parametrize("options", [{"batch_size": 8}, {"batch_size": None, "collate_fn": None}])
def test_workers_that_share_a_model_evaluate_it_in_one_order(options: dict[str, Any]) -> None:
    lender = Lender(2)
    lender.evaluates = lender.splits = True
    first, second = (list(make(20, lender, shuffle=True, **options)) for _ in range(2))
    assert first == second
    assert sorted(first if options["batch_size"] is None else [one for batch in first for one in batch]) == [*range(20)]


def test_an_epoch_that_is_only_evaluated_is_not_leased() -> None:
    lender = Lender(3)
    loader = make(20, lender, share={"global_batch": 9}, batch_size=8)
    lender.evaluates = True
    assert list(loader) == list(DataLoader(Numbers(20), batch_size=8, collate_fn=list))
    assert (len(loader), lender.asked) == (3, [])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_to_leave_in_the_middle_is_to_quit_the_epoch(num_workers: int) -> None:
    lender = Lender()
    loader = make(24, lender, batch_size=2, num_workers=num_workers)
    for batch in loader:
        assert batch == [0, 1]
        break
    assert lender.left == [(0, 0)]
    assert lender.ledger.held_by(0) == []
    assert list(chain(*loader)) == list(range(24))
    assert lender.left == [(0, 0)]
    assert {lease.epoch for lease in lender.begun[1:]} == {1}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batches", [0, 2])
def test_to_begin_the_next_epoch_is_to_quit_the_one_before(num_workers: int, batches: int) -> None:
    lender = Lender()
    loader = make(24, lender, batch_size=2, num_workers=num_workers)
    before = iter(loader)
    for _ in range(batches):
        next(before)
    following = iter(loader)
    assert next(following) == [0, 1]

    assert lender.left == ([(0, 0)] if batches or num_workers else [])
    with pytest.raises(UsageError, match="iterated twice at the same time"):
        next(before)
    assert list(chain(*following)) == list(range(2, 24))


def test_an_error_in_the_script_is_to_quit_the_epoch_too() -> None:
    lender = Lender()

    def train() -> None:
        for _ in make(24, lender, batch_size=2):
            raise ValueError("the script's own")

    with pytest.raises(ValueError, match="the script's own"):
        train()
    assert lender.left == [(0, 0)]


def test_a_team_that_has_failed_is_told_nothing_more() -> None:
    lender = Lender()
    stream = iter(make(24, lender, batch_size=2))
    next(stream)
    lender.fails = TeamTimeout("rank 1 did not come")
    with pytest.raises(TeamTimeout):
        next(stream)
    assert lender.left == []


# -- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_order_is_plain_pytorch_s_for_the_same_seed_through_all_epochs(num_workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": num_workers}
    torch.manual_seed(5)
    plain = DataLoader(Numbers(30), collate_fn=list, **options)
    wanted = [list(plain) for _ in range(3)]
    torch.manual_seed(5)
    loader = make(30, **options)
    assert [list(loader) for _ in range(3)] == wanted


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_that_are_iterated_at_the_same_time_draw_plain_pytorch_s_orders(num_workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": num_workers}
    plain = [DataLoader(Numbers(count), collate_fn=list, **options) for count in (12, 18)]
    leased = [make(count, **options) for count in (12, 18)]
    orders = []
    for one, other in (plain, leased):
        torch.manual_seed(5)
        orders.append([pair for _ in range(2) for pair in zip(one, other, strict=False)])
    assert orders[0] == orders[1]


def test_with_a_generator_the_order_is_plain_pytorch_s_through_all_epochs() -> None:
    plain = DataLoader(
        Numbers(30), batch_size=4, shuffle=True, collate_fn=list, generator=torch.Generator().manual_seed(9)
    )
    wanted = [list(plain) for _ in range(3)]
    loader = make(30, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(9))
    assert [list(loader) for _ in range(3)] == wanted


def test_a_sampler_may_give_tensors_and_strings() -> None:
    class Table(Dataset[str]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, key: str) -> str:
            return key.upper()

    class Tensors(Sampler[torch.Tensor]):
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.tensor([3, 1, 2, 0]))

    class Keys(Sampler[str]):
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[str]:
            return iter("abcd")

    table = LeasedLoader(DataLoader(Table(), 2, sampler=Keys(), collate_fn=list), Lender(), 0)
    assert list(table) == [["A", "B"], ["C", "D"]]
    assert list(make(4, batch_size=2, sampler=Tensors())) == [[3, 1], [2, 0]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_is_asked_for_the_very_keys_of_its_sampler(num_workers: int) -> None:
    places = [(0, "left"), (0, "right"), (1, "left")]

    class Scenes(Dataset[int]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, key: tuple[int, str]) -> int:
            return {place: number for number, place in enumerate(places)}[key]

    sampler: Any = places[::-1]
    original = DataLoader(Scenes(), 2, sampler=sampler, collate_fn=list, num_workers=num_workers)
    assert list(LeasedLoader(original, Lender(), 0)) == [[2, 1], [0]]


def test_keys_that_cannot_travel_are_refused() -> None:
    class Objects(Sampler[object]):
        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Iterator[object]:
            return iter([object(), object()])

    with pytest.raises(UsageError, match="they must be numbers, strings, or lists of them"):
        list(make(2, batch_size=1, sampler=Objects()))


def test_what_is_not_the_team_s_is_the_user_s_own_loader_s() -> None:
    original = DataLoader(Numbers(8), batch_size=2, num_workers=0, drop_last=True)
    loader = LeasedLoader(original, Lender(2), 0)
    assert loader.dataset is original.dataset
    assert loader.batch_size == 2
    assert loader.collate_fn is original.collate_fn
    assert loader.sampler is original.sampler
    assert loader.drop_last is True
    with pytest.raises(AttributeError):
        _ = loader.nothing_of_the_kind
