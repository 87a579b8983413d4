import contextlib
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from paceline.data.loader import TeamLoader, check_loader
from paceline.data.split import even
from paceline.errors import UsageError


class Wire:
    """Carries the lead's last payload to the others."""

    payload = b""


class Hand:
    """A worker who only takes batches."""

    def __init__(self, rank: int, size: int, connection: Wire) -> None:
        self.rank, self.size, self.lead, self._connection = rank, size, 0, connection
        self.replica, self.replicas, self.lockstep, self.evaluates = rank, size, False, False
        self.taken: list[tuple[int, float, int]] = []
        self.epochs = self.asked = self.steps = 0

    def ask_batch(self) -> None:
        self.asked += 1

    def from_lead(self, payload: bytes) -> bytes:
        if self.rank == 0:
            self._connection.payload = payload
        else:
            assert payload == b""
        return self._connection.payload

    def take_batch(self, samples: int, weight: float, loader: TeamLoader, round_number: int) -> None:
        self.taken.append((samples, weight, round_number))

    def finish_epoch(self) -> None:
        self.epochs += 1


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self.count
        return index


class Team:
    """All workers' shares of loaders that are made alike."""

    def __init__(self, size: int, count: int, *, share: dict[str, Any] | None = None, **options: Any) -> None:
        connection = Wire()
        self.hands = [Hand(rank, size, connection) for rank in range(size)]
        options.setdefault("collate_fn", list)
        self.originals = [DataLoader(Numbers(count), **options) for _ in range(size)]
        self.loaders = [
            TeamLoader(loader, hand, **(share or {})) for loader, hand in zip(self.originals, self.hands, strict=True)
        ]

    def epoch(self) -> dict[int, list[list[int]]]:
        """Per round, what each worker got; the lead goes first, as the others need its order."""
        rounds: dict[int, list[list[int]]] = {}
        for hand, loader in zip(self.hands, self.loaders, strict=True):
            before = len(hand.taken)
            batches = list(loader)
            for batch, (samples, _, number) in zip(batches, hand.taken[before:], strict=True):
                assert samples == (len(batch) if isinstance(batch, list) else 1)
                parts = rounds.setdefault(number, [[] for _ in self.hands])
                parts[hand.rank] = batch if isinstance(batch, list) else [batch]
        return dict(sorted(rounds.items()))

    def order(self) -> list[list[int]]:
        """The global batches of an epoch."""
        return [list(chain(*parts)) for parts in self.epoch().values()]


counts = st.integers(0, 150)
batches = st.integers(1, 9)
sizes = st.integers(1, 5)
flags = st.booleans()


@given(counts, batches, sizes, flags, flags)
def test_every_sample_is_given_out_exactly_once(
    count: int, batch: int, size: int, drop_last: bool, shuffle: bool
) -> None:
    shuffle = shuffle and count > 0
    whole = batch * size
    team = Team(size, count, batch_size=whole, drop_last=drop_last, shuffle=shuffle)
    for _ in range(2):
        given_out = list(chain(*team.order()))
        assert len(set(given_out)) == len(given_out)
        assert len(given_out) == (count // whole * whole if drop_last else count)
        if not shuffle:
            assert given_out == list(range(len(given_out)))
    assert [hand.epochs for hand in team.hands] == [2] * size


@given(counts, batches, sizes)
def test_in_lockstep_everybody_has_as_many_batches_and_copies_count_for_nothing(
    count: int, batch: int, size: int
) -> None:
    team = Team(size, count, batch_size=batch * size)
    for hand in team.hands:
        hand.lockstep = True
    batches = [list(loader) for loader in team.loaders]
    assert {len(own) for own in batches} == {len(team.loaders[0])}
    taken = [zip(own, hand.taken, strict=True) for own, hand in zip(batches, team.hands, strict=True)]
    counted = [sample for own in taken for batch, (samples, weight, _) in own if weight for sample in batch[:samples]]
    assert sorted(counted) == list(range(count))
    assert all(batch for own in batches for batch in own)
    assert all((samples == 0) == (weight == 0.0) for hand in team.hands for samples, weight, _ in hand.taken)


@given(counts, batches, sizes, flags)
def test_the_weights_of_a_round_are_shares_of_its_samples_and_sum_to_one(
    count: int, batch: int, size: int, drop_last: bool
) -> None:
    team = Team(size, count, batch_size=batch * size, drop_last=drop_last)
    rounds = team.epoch()
    weights: dict[int, float] = {}
    for hand in team.hands:
        for samples, weight, number in hand.taken:
            assert weight == samples / sum(len(part) for part in rounds[number])
            weights[number] = weights.get(number, 0.0) + weight
    assert all(total == pytest.approx(1.0, abs=1e-12) for total in weights.values())
    assert set(weights) == set(rounds) == set(range(len(team.loaders[0])))


@given(counts, st.integers(5, 40), sizes, flags)
def test_a_global_batch_is_shared_out_evenly(count: int, whole: int, size: int, drop_last: bool) -> None:
    team = Team(size, count, share={"global_batch": whole}, batch_size=3, drop_last=drop_last)
    rounds = list(team.epoch().values())
    full = [[len(part) for part in parts] for parts in rounds if sum(map(len, parts)) == whole]
    assert full == [even(whole, size)] * (count // whole)
    assert len(rounds) == len(team.loaders[0]) == count // whole + (not drop_last and count % whole > 0)
    assert all(loader.global_batch == whole for loader in team.loaders)


def test_by_default_the_loader_s_batch_is_divided() -> None:
    team = Team(3, 36, batch_size=12)
    assert [[len(part) for part in parts] for parts in team.epoch().values()] == [[4, 4, 4]] * 3
    assert [len(loader) for loader in team.loaders] == [3, 3, 3]
    assert [loader.global_batch for loader in team.loaders] == [12, 12, 12]


def test_batches_of_fewer_samples_than_workers_are_refused_when_they_are_trained_on() -> None:
    team = Team(3, 36, batch_size=2)
    with pytest.raises(UsageError, match=r"batches of 2 samples cannot be divided among 3 workers; .* global_batch"):
        list(team.loaders[0])


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"batch_size": 8}, {"batch_size": None, "collate_fn": None}])
def test_an_epoch_that_is_only_evaluated_is_the_user_s_own_loader_s(options: dict[str, Any]) -> None:
    team = Team(3, 20, share={"global_batch": 6}, **options)
    for hand in team.hands:
        hand.evaluates = True
    plain = list(team.originals[0])
    assert [list(loader) for loader in team.loaders] == [plain] * 3
    assert [len(loader) for loader in team.loaders] == [len(plain)] * 3
    assert [hand.taken for hand in team.hands] == [[]] * 3


@pytest.mark.parametrize("options", [{"batch_size": 8}, {"batch_size": None, "collate_fn": None}])
def test_workers_of_one_replica_evaluate_the_same_batches(options: dict[str, Any]) -> None:
    team = Team(2, 20, **options, shuffle=True)
    for hand in team.hands:
        hand.evaluates, hand.replica, hand.replicas = True, 0, 1
    first, second = (list(loader) for loader in team.loaders)  # shuffled with a random state that goes on
    assert first == second
    assert [len(loader) for loader in team.loaders] == [len(team.originals[0])] * 2
    flat = sorted(first if options["batch_size"] is None else [one for batch in first for one in batch])
    assert flat == list(range(20))


@pytest.mark.parametrize("replicas", [1, 3])
def test_training_in_evaluation_mode_is_refused_where_training_divides_batches(replicas: int) -> None:
    team = Team(3, 20, batch_size=8)
    hand, seen = team.hands[0], 0
    hand.evaluates, hand.replicas = True, replicas
    with pytest.raises(UsageError, match="trained in evaluation mode") if replicas > 1 else contextlib.nullcontext():
        for _ in team.loaders[0]:
            hand.steps += 1
            seen += 1
    assert seen == (1 if replicas > 1 else 3)
    with torch.no_grad():  # whatever the script does between batches that it cannot train on
        for _ in team.loaders[0]:
            hand.steps += 1


def test_a_balanced_loader_follows_the_paces() -> None:
    team = Team(2, 4000, share={"global_batch": 40, "balance": True}, batch_size=20)
    changes: list[tuple[int, list[int]]] = []
    for loader in team.loaders:
        loader._balancer._changed = lambda start, shares: changes.append((start, shares))
    numbers = iter(range(100))
    streams = [iter(loader) for loader in team.loaders]
    sizes_seen = []
    for number in numbers:
        parts = [next(stream) for stream in streams]
        sizes_seen.append([len(part) for part in parts])
        paces = [(len(part) * pace, len(part)) for part, pace in zip(parts, [0.001, 0.003], strict=True)]
        for loader in team.loaders:
            loader.measure(paces, number)
    assert changes[0] == changes[1]
    start, shares = changes[0]
    assert shares == [30, 10]
    assert sizes_seen == [[20, 20]] * start + [[30, 10]] * (100 - start)


# -- order -----------------------------------------------------------------------------------------------------------


def test_every_epoch_is_shuffled_anew() -> None:
    torch.manual_seed(0)
    team = Team(2, 64, batch_size=16, shuffle=True)
    first, second = team.order(), team.order()
    assert first != second
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(64))


@pytest.mark.parametrize(("count", "size", "batch"), [(50, 2, 5), (50, 3, 4), (7, 4, 2), (64, 1, 8)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_order_is_plain_pytorch_s_for_the_same_seed(count: int, size: int, batch: int, drop_last: bool) -> None:
    options: dict[str, Any] = {"shuffle": True, "drop_last": drop_last}
    torch.manual_seed(5)
    plain = list(DataLoader(Numbers(count), batch_size=size * batch, collate_fn=list, **options))
    torch.manual_seed(5)
    assert Team(size, count, batch_size=size * batch, **options).order() == plain


def test_with_a_generator_the_order_is_plain_pytorch_s_through_all_epochs() -> None:
    generator = torch.Generator().manual_seed(9)
    plain = DataLoader(Numbers(30), batch_size=8, shuffle=True, collate_fn=list, generator=generator)
    wanted = [list(plain) for _ in range(3)]
    team = Team(2, 30, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(9))
    # In one process the workers share the generator; only the lead's draws decide.
    for original in team.originals[1:]:
        original.sampler.generator = torch.Generator().manual_seed(1)
    for loader in team.loaders[1:]:
        loader._inner.generator = torch.Generator().manual_seed(1)
    assert [team.order() for _ in range(3)] == wanted


def test_rounds_are_counted_over_all_epochs() -> None:
    team = Team(2, 20, batch_size=6)
    assert list(team.epoch()) == [0, 1, 2, 3]
    assert list(team.epoch()) == [4, 5, 6, 7]


def test_a_sampler_of_one_s_own_decides_who_comes_when() -> None:
    class Backwards(Sampler[int]):
        def __len__(self) -> int:
            return 10

        def __iter__(self) -> Iterator[int]:
            return iter(range(19, -1, -2))

    assert Team(2, 20, batch_size=6, sampler=Backwards()).order() == [[19, 17, 15, 13, 11, 9], [7, 5, 3, 1]]


def test_only_the_lead_s_sampler_counts() -> None:
    team = Team(3, 60, batch_size=6, shuffle=True)
    for rank, loader in enumerate(team.originals):
        loader.sampler.generator = torch.Generator().manual_seed(rank)
    assert sorted(chain(*team.order())) == list(range(60))


def test_a_sampler_may_give_tensors_and_strings() -> None:
    class Table(Dataset[str]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, key: str) -> str:
            return key.upper()

    class Keys(Sampler[str]):
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[str]:
            return iter("abcd")

    class Tensors(Sampler[torch.Tensor]):
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.tensor([3, 1, 2, 0]))

    connection = Wire()
    loaders = [
        TeamLoader(DataLoader(Table(), 2, sampler=Keys(), collate_fn=list), Hand(rank, 2, connection))
        for rank in (0, 1)
    ]
    assert [list(loader) for loader in loaders] == [[["A"], ["C"]], [["B"], ["D"]]]
    assert Team(2, 4, batch_size=2, sampler=Tensors()).order() == [[3, 1], [2, 0]]


def test_keys_that_cannot_travel_are_refused_on_every_worker() -> None:
    class Objects(Sampler[object]):
        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Iterator[object]:
            return iter([object(), object()])

    for loader in Team(2, 2, batch_size=2, sampler=Objects()).loaders:
        with pytest.raises(UsageError, match="they must be numbers, strings, or lists of them"):
            list(loader)


# -- loaders of other kinds ------------------------------------------------------------------------------------------


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


@given(st.integers(1, 10), sizes)
def test_the_batches_of_a_batch_sampler_are_divided(count: int, size: int) -> None:
    team = Team(size, 100, batch_sampler=Growing(count))
    wanted = list(Growing(count))
    batches = [list(loader) for loader in team.loaders]
    assert [len(own) for own in batches] == [len(loader) for loader in team.loaders] == [count] * size
    for number, batch in enumerate(wanted):
        taken = [hand.taken[number] for hand in team.hands]
        parts = [own[number] for own, (samples, *_) in zip(batches, taken, strict=True) if samples]
        assert list(chain(*parts)) == batch
        # A worker without a part gets a copy of weight 0: the next batch may be larger.
        assert [samples for samples, *_ in taken] == even(len(batch), size)
        assert [weight for _, weight, _ in taken] == [samples / len(batch) for samples, *_ in taken]


def test_a_batch_sampler_of_torch_s_own_kind_is_the_user_s_too() -> None:
    def sampler() -> BatchSampler:
        order = RandomSampler(range(22), generator=torch.Generator().manual_seed(4))
        return BatchSampler(order, batch_size=5, drop_last=True)

    team = Team(2, 22, batch_sampler=sampler())
    assert team.order() == list(sampler())


@given(st.integers(0, 20), sizes)
def test_without_batches_samples_are_dealt_out_one_by_one(count: int, size: int) -> None:
    team = Team(size, count, batch_size=None, collate_fn=None)
    assert list(chain(*team.order())) == list(range(count))
    assert len(team.loaders[0]) == -(-count // size)
    assert all(len(part) <= 1 for parts in team.epoch().values() for part in parts)


def test_without_batches_a_global_batch_beyond_one_sample_each_is_refused() -> None:
    team = Team(2, 16, share={"global_batch": 8}, batch_size=None, collate_fn=None)
    with pytest.raises(UsageError, match="global_batch is 8, but the loader has no batch size to change"):
        list(team.loaders[0])


def test_loader_processes_fetch_the_same_batches() -> None:
    torch.manual_seed(2)
    wanted = Team(2, 37, batch_size=3, shuffle=True).order()
    torch.manual_seed(2)
    team = Team(2, 37, batch_size=3, shuffle=True, num_workers=2)
    assert team.order() == wanted
    assert sorted(chain(*team.order())) == list(range(37))


def test_the_user_s_collate_function_makes_the_batches() -> None:
    connection = Wire()
    loaders = [
        TeamLoader(DataLoader(Numbers(6), 4, collate_fn=lambda batch: ("sum", sum(batch))), Hand(rank, 2, connection))
        for rank in (0, 1)
    ]
    assert [list(loader) for loader in loaders] == [[("sum", 1), ("sum", 4)], [("sum", 5), ("sum", 5)]]


def test_batches_are_tensors_as_plain_pytorch_makes_them() -> None:
    loader = TeamLoader(DataLoader(Numbers(4), batch_size=2), Hand(0, 1, Wire()))
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_what_is_not_the_team_s_is_the_user_s_own_loader_s() -> None:
    original = DataLoader(Numbers(8), batch_size=2, num_workers=0)
    loader = TeamLoader(original, Hand(0, 2, Wire()))
    assert loader.dataset is original.dataset
    assert loader.batch_size == 2
    assert loader.collate_fn is original.collate_fn
    with pytest.raises(AttributeError):
        _ = loader.nothing_of_the_kind


def test_an_epoch_left_early_does_not_disturb_the_next() -> None:
    team = Team(1, 12, batch_size=2)
    for batch in team.loaders[0]:
        assert batch == [0, 1]
        break
    assert team.order() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert [number for _, _, number in team.hands[0].taken] == [0, *range(6, 12)]


# -- what is refused -------------------------------------------------------------------------------------------------


def test_what_is_no_loader_is_refused_by_its_kind() -> None:
    with pytest.raises(UsageError, match=r"torch\.utils\.data\.DataLoader objects last; it got a list"):
        check_loader([1, 2, 3])


def test_a_stream_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    with pytest.raises(UsageError, match=r"has no length .*IterableDataset.*; use a map-style dataset"):
        check_loader(DataLoader(Stream()))


def test_a_dataset_or_sampler_without_length_is_refused() -> None:
    class Endless(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

    class Forever(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(1 << 40))

    class Batches(Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0]])

    for loader in (
        DataLoader(Endless(), batch_size=2),
        DataLoader(Numbers(4), sampler=Forever()),
        DataLoader(Numbers(4), batch_sampler=Batches()),
    ):
        with pytest.raises(UsageError, match="give its dataset and sampler a __len__"):
            check_loader(loader)


def test_an_ordinary_loader_is_not_refused() -> None:
    for options in ({}, {"batch_size": None}, {"batch_sampler": Growing(3)}, {"shuffle": True}):
        check_loader(DataLoader(Numbers(8), **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("whole", [1, 2])
def test_a_global_batch_below_the_number_of_workers_is_refused(whole: int) -> None:
    with pytest.raises(UsageError, match=f"global_batch is {whole}; it must be at least the number of workers, 3"):
        Team(3, 10, share={"global_batch": whole}, batch_size=2)


@pytest.mark.parametrize("whole", [0, -4, 2.5])
def test_a_global_batch_that_is_no_count_is_refused(whole: float) -> None:
    with pytest.raises(UsageError, match="it must be a whole number of at least 1"):
        Team(2, 10, share={"global_batch": whole}, batch_size=2)
