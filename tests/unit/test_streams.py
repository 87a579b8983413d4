"""Streams are divided among workers as map-style datasets are: every sample once, in the batches of one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from helpers.streams import Count, Cut, Forever, ranges
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from paceline.data import ShardedDataset
from paceline.data.stream.kinds import is_stream, stream_facts, whole_notice
from paceline.data.stream.reader import Request, StreamReader
from paceline.data.stream.sources import ShardSources, WholeStream, shards_of
from paceline.data.stream.team_stream import TeamStream
from paceline.data.team_view import Measured
from paceline.errors import UsageError


class Hand:
    """A worker who only takes batches; the others are taken to say what it says, but for what the lead has said."""

    def __init__(self, rank: int, size: int, replicas: int | None = None, said: list[bytes] | None = None) -> None:
        self.rank, self.size, self.lead = rank, size, 0
        self._said = [] if said is None else said
        """The lead's payloads at the start of each epoch."""
        self._begun = 0
        self.replicas = size if replicas is None else replicas
        self.replica = rank * self.replicas // size
        self.lockstep = self.evaluates = False
        self.taken: list[tuple[int, float, int]] = []
        self.epochs = self.asked = self.steps = 0

    def passes_by(self, loader: object) -> bool:
        return False

    def ask_batch(self, loader: object = None) -> None:
        self.asked += 1

    def from_lead(self, payload: bytes, loader: int, *, evaluates: bool = False) -> bytes:
        return payload

    def from_all(self, payload: bytes, loader: int, *, evaluates: bool = False) -> list[bytes]:
        if self.rank == self.lead:
            self._said.append(payload)
        self._begun += 1
        return [(self._said or [payload])[self._begun - 1], *[payload] * (self.size - 1)]

    def compare(self, payload: bytes, *, end: bool = False) -> list[bytes]:
        return [payload] * self.size

    def take_batch(self, samples: int, weight: float, loader: Measured, round_number: int) -> None:
        self.taken.append((samples, weight, round_number))

    def finish_epoch(self) -> None:
        self.epochs += 1


class Named(Cut):
    """As Hugging Face's datasets, in as many shards as it says."""

    num_shards = 5

    def shard(self, num_shards: int, index: int) -> Cut:  # type: ignore[override]
        assert num_shards == self.num_shards
        return Cut(self.count, (index, num_shards))


def team(size: int, dataset: Any, *, share: dict[str, Any] | None = None, **options: Any) -> list[TeamStream]:
    options.setdefault("collate_fn", list)
    said: list[bytes] = []
    hands = [Hand(rank, size, said=said) for rank in range(size)]
    return [TeamStream(DataLoader(dataset, **options), hand, **(share or {})) for hand in hands]


def rounds(loaders: list[TeamStream]) -> list[list[int]]:
    """The batches of an epoch, put together from the workers' parts; copies of others' parts are left out."""
    found: dict[int, list[int]] = {}
    for loader in loaders:
        hand: Any = loader._team
        before = len(hand.taken)
        own = list(loader)
        for part, (samples, _, number) in zip(own, hand.taken[before:], strict=True):
            assert samples in (0, len(part))
            found.setdefault(number, []).extend(part if samples else [])
    return [found[number] for number in sorted(found)]


@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_the_parts_of_a_plain_stream_are_the_batches_of_one_process(
    count: int, batch: int, size: int, drop_last: bool
) -> None:
    options: dict[str, Any] = {"batch_size": batch * size, "drop_last": drop_last, "collate_fn": list}
    plain = list(DataLoader(Count(count), **options))
    loaders = team(size, Count(count), **options)
    for _ in range(2):
        assert rounds(loaders) == plain
    for loader in loaders:
        hand: Any = loader._team
        assert hand.epochs == 2
        assert len(hand.taken) == 2 * len(plain)  # also where a worker has no part of the last batch


def test_the_weights_of_a_batch_are_the_shares_of_its_samples() -> None:
    loaders = team(3, Count(8), batch_size=6)
    hands: list[Any] = [loader._team for loader in loaders]
    rounds(loaders)
    assert [[taken[:2] for taken in hand.taken] for hand in hands] == [
        [(2, 1 / 3), (1, 1 / 2)],
        [(2, 1 / 3), (1, 1 / 2)],
        [(2, 1 / 3), (0, 0.0)],
    ]


def start_at_hundred(_number: int) -> None:
    process = get_worker_info()
    assert process is not None
    dataset: Any = process.dataset
    dataset.start = 100


@pytest.mark.parametrize("persistent", [False, True])
def test_processes_of_a_loader_divide_a_stream_as_in_plain_torch(persistent: bool) -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "collate_fn": list}
    plain = list(DataLoader(Count(37, divides=True), **options))
    loaders = team(2, Count(37, divides=True), persistent_workers=persistent, **options)
    for _ in range(2):
        assert rounds(loaders) == plain
    options |= {"worker_init_fn": start_at_hundred}
    assert rounds(team(2, Count(119, divides=True), **options)) == list(DataLoader(Count(119, divides=True), **options))


def test_loader_processes_draw_what_they_would_in_plain_torch() -> None:
    class Noise(IterableDataset[float]):
        def __iter__(self) -> Iterator[float]:
            yield from torch.rand(10).tolist()

    torch.manual_seed(5)
    plain = list(DataLoader(Noise(), batch_size=2, num_workers=2, collate_fn=list))
    after = torch.rand(1)
    loaders = team(2, Noise(), batch_size=2, num_workers=2)
    found: list[list[float]] = []
    for loader in loaders:
        torch.manual_seed(5)
        found.append(list(chain(*loader)))
        assert torch.equal(torch.rand(1), after)
    assert [list(pair) for pair in zip(*found, strict=True)] == plain


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("sizes", [[10, 10, 10, 10], [1, 20, 3, 7, 5], [4], []])
def test_the_shards_of_a_dataset_are_each_read_by_one_worker(processes: int, sizes: list[int]) -> None:
    opened: list[tuple[int, int]] = []

    def read(shard: tuple[int, int]) -> Iterator[int]:
        opened.append(shard)
        return iter(range(*shard))

    loaders = team(2, ShardedDataset(ranges(sizes), read), batch_size=4, num_workers=processes)
    for _ in range(2):
        opened.clear()
        assert sorted(chain(*rounds(loaders))) == list(range(sum(sizes)))
        if not processes and len(sizes) > 1:
            assert sorted(opened) == ranges(sizes)


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("kind", [Cut, Named])
def test_a_dataset_with_a_method_shard_is_divided_by_it(kind: type[Cut], processes: int) -> None:
    loaders = team(2, kind(41), batch_size=4, num_workers=processes)
    assert sorted(chain(*rounds(loaders))) == list(range(41))
    hands: list[Any] = [loader._team for loader in loaders]
    assert all(samples for hand in hands for samples, _, _ in hand.taken)


def test_a_dataset_of_too_few_shards_is_read_as_a_whole() -> None:
    dataset = ShardedDataset(ranges([7, 6]), lambda shard: range(*shard))
    said: list[str] = []
    assert rounds(team(3, dataset, batch_size=3, share={"say": said.append})) == [
        list(range(start, min(13, start + 3))) for start in range(0, 13, 3)
    ]
    assert len(said) == 3 and said[0].startswith(
        "every worker reads all 2 shards and keeps its part of each batch; with"
    )
    said.clear()
    team(2, dataset, batch_size=3, share={"say": said.append})
    assert not said


def test_a_stream_that_every_worker_reads_is_said_with_what_would_spare_it() -> None:
    shards = ShardedDataset(ranges([7, 6]), lambda shard: range(*shard))
    plain = whole_notice(DataLoader(Count(9)), 2) or ""
    assert plain.startswith("every worker reads the whole stream") and "paceline.data.ShardedDataset" in plain
    assert "with at least 3, one for each worker" in (whole_notice(DataLoader(shards), 3) or "")
    # Enough shards: the strategy, or per_worker, has every worker read them all.
    assert "here workers need equally many batches, and shards" in (whole_notice(DataLoader(shards), 2) or "")
    assert whole_notice(DataLoader(Count(9)), 1) is None
    said: list[str] = []
    team(2, shards, batch_size=3, share={"say": said.append, "per_worker": True})
    assert said == [whole_notice(DataLoader(shards), 2)] * 2


def test_workers_of_one_replica_get_the_same_batches() -> None:
    for dataset in (Count(10), ShardedDataset(ranges([5, 5]), lambda shard: range(*shard))):
        loaders = [TeamStream(DataLoader(dataset, batch_size=4, collate_fn=list), Hand(rank, 2, 1)) for rank in (0, 1)]
        assert [list(loader) for loader in loaders] == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]] * 2


@pytest.mark.parametrize("processes", [0, 2])
def test_an_epoch_of_so_many_steps_goes_on_where_the_last_one_stopped(processes: int) -> None:
    loaders = team(2, Count(None, divides=True), batch_size=4, num_workers=processes, share={"steps": 3})
    plain = DataLoader(Count(None, divides=True), batch_size=4, num_workers=processes, collate_fn=list)
    expected = list(itertools.islice(plain, 9))
    assert [rounds(loaders) for _ in range(3)] == [expected[:3], expected[3:6], expected[6:]]
    assert len(loaders[0]) == 3


def test_a_stream_that_ends_within_an_epoch_begins_anew_in_the_next() -> None:
    loaders = team(2, Count(10), batch_size=4, share={"steps": 2})
    epochs = [rounds(loaders) for _ in range(4)]
    assert epochs == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9]]] * 2


def test_a_loop_that_is_left_begins_anew_unless_epochs_have_a_number_of_steps() -> None:
    (loader,) = team(1, Count(None), batch_size=2)
    assert [next(iter(loader)), next(iter(loader))] == [[0, 1], [0, 1]]
    (loader,) = team(1, Count(None), batch_size=2, share={"steps": 5})
    assert [next(iter(loader)), next(iter(loader))] == [[0, 1], [2, 3]]


def test_without_batches_every_worker_gets_items_of_its_own() -> None:
    loaders = [TeamStream(DataLoader(Count(7), batch_size=None, collate_fn=int), Hand(rank, 2)) for rank in range(2)]
    assert [list(loader) for loader in loaders] == [[0, 2, 4, 6], [1, 3, 5, 6]]
    hands: list[Any] = [loader._team for loader in loaders]
    assert [hand.taken[-1][:2] for hand in hands] == [(1, 1.0), (0, 0.0)]


def test_a_stream_has_the_length_that_plain_torch_gives_it() -> None:
    class Long(Count):
        def __len__(self) -> int:
            return 10

    (loader,) = team(1, Count(10), batch_size=4)
    with pytest.raises(TypeError):
        len(loader)
    (loader,) = team(1, Long(10), batch_size=4)
    assert len(loader) == 3


def test_evaluation_gets_the_whole_stream() -> None:
    loaders = team(2, Count(6), batch_size=4)
    for loader in loaders:
        hand: Any = loader._team
        hand.evaluates = True
        assert list(loader) == [[0, 1, 2, 3], [4, 5]]
    loader = TeamStream(DataLoader(Count(6), batch_size=4, collate_fn=list), Hand(0, 2, 1))
    hand = loader._team
    hand.evaluates = True
    assert [list(loader), list(loader)] == [[[0, 1, 2, 3], [4, 5]]] * 2


@pytest.mark.parametrize("processes", [0, 2])
def test_a_sampler_without_a_length_is_divided_by_its_keys(processes: int) -> None:
    data = [10, 11, 12, 13, 14]
    options: dict[str, Any] = {"batch_size": 4, "sampler": Forever(), "num_workers": processes}
    assert is_stream(DataLoader(data, **options))  # type: ignore[arg-type]
    loaders = team(2, data, share={"steps": 2}, **options)
    assert rounds(loaders) == [[10, 11, 12, 13], [14, 10, 11, 12]]
    assert rounds(loaders) == [[13, 14, 10, 11], [12, 13, 14, 10]]


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(UsageError, match="datapipe"):
        team(2, IterableWrapper(range(3)), batch_size=2)

    class Batches(Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            yield [0, 1]

    with pytest.raises(UsageError, match="batch sampler has no length"):
        team(2, [1, 2], batch_sampler=Batches())

    class Endless(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(UsageError, match="give the dataset a __len__"):
        team(2, Endless(), batch_size=2)
    with pytest.raises(UsageError, match="cannot be divided among 3 workers"):
        list(team(3, Count(8), batch_size=2)[0])
    with pytest.raises(UsageError, match="a shard of the loader's dataset is a int"):
        list(team(2, ShardedDataset([1, 2], lambda shard: shard), batch_size=2)[0])


# -- the reader ------------------------------------------------------------------------------------------------------


def test_a_reader_skips_what_is_not_asked_for_and_keeps_what_may_be_asked_for_again() -> None:
    reader = StreamReader(WholeStream(Count(30), 1), stride=0, window=6)
    assert reader.read(Request(0, 4, 3, 0)).batch == [4, 5, 6]
    assert reader.read(Request(0, 20, 3, 0)).batch == [20, 21, 22]
    assert reader.read(Request(0, 18, 8, 0)).batch == [18, 19, 20, 21, 22, 23, 24, 25]
    gone = reader.read(Request(0, 4, 3, 0))
    assert gone.lost and gone.batch is None
    last = reader.read(Request(0, 28, 4, 0))
    assert (last.batch, last.length) == ([28, 29], 30)
    assert reader.read(Request(0, 4, 1, 1)).batch == [4]  # in the next turn


def test_a_shard_is_read_again_from_its_beginning() -> None:
    opened: list[Any] = []

    def read(shard: range) -> Iterator[int]:
        opened.append(shard)
        return iter(shard)

    shards = shards_of(ShardedDataset([range(10)], read), 1)
    assert shards is not None
    reader = StreamReader(ShardSources(shards), stride=0, window=2)
    assert reader.read(Request(0, 2, 6, 0)).batch == [2, 3, 4, 5, 6, 7]
    assert reader.read(Request(0, 6, 3, 0)).batch == [6, 7, 8]
    assert len(opened) == 1
    assert reader.read(Request(0, 1, 3, 0)).batch == [1, 2, 3]
    assert len(opened) == 2


def test_equal_streams_have_equal_marks_however_they_are_read() -> None:
    def marks(numbers: list[int], steps: list[tuple[int, int]]) -> list[Any]:
        reader = StreamReader(WholeStream([torch.tensor(number) for number in numbers], 1), stride=4)
        return [mark for start, count in steps for mark in reader.read(Request(0, start, count, 0)).marks]

    numbers = list(range(40))
    one, other = marks(numbers, [(0, 4), (4, 4), (30, 4)]), marks(numbers, [(2, 30)])
    assert one == other and [mark.samples for mark in one] == [1, 4, 8, 16, 32]
    assert marks([*range(8), 99, *range(9, 40)], [(2, 30)])[:3] == one[:3]
    assert marks([*range(8), 99, *range(9, 40)], [(2, 30)])[3] != one[3]


def test_a_dataset_that_divides_its_shards_by_rank_is_noticed() -> None:
    def facts(shards: list[int], first: int = 0) -> list[tuple[str, str]]:
        return stream_facts(DataLoader(ShardedDataset(shards, lambda shard: iter([shard + first]))))

    assert facts([1, 2]) == facts([1, 2])
    assert facts([1, 2]) != facts([1, 3])
    assert facts([1, 2]) != facts([1, 2], first=1)
    assert facts([1, 2]) != facts([1, 2, 3])
