import contextlib
from collections.abc import Iterator
from itertools import accumulate, chain, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler

from paceline.data.fetched_batches import FetchedBatches, fetched
from paceline.data.keys import pack, unpack
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

    def ask_batch(self, loader: TeamLoader | None = None) -> None:
        self.asked += 1

    def passes_by(self, loader: TeamLoader) -> bool:
        return False

    def from_lead(self, payload: bytes, loader: int, *, evaluates: bool = False) -> bytes:
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


@given(counts, batches, sizes, flags)
def test_a_batch_per_worker_gives_all_workers_equally_many_and_every_sample_once(
    count: int, batch: int, size: int, drop_last: bool
) -> None:
    team = Team(size, count, batch_size=batch, drop_last=drop_last, share={"per_worker": True})
    if 0 < count < size:
        with pytest.raises(UsageError, match=f"cannot be divided among {size} workers"):
            team.epoch()
        return
    rounds = team.epoch()
    assert list(chain(*team.order())) == list(range(count // (batch * size) * batch * size if drop_last else count))
    assert all(part for parts in rounds.values() for part in parts)
    assert all(len(part) <= batch + 1 for parts in rounds.values() for part in parts)
    assert {len(loader) for loader in team.loaders} == {len(rounds)}


def test_batches_of_a_batch_sampler_can_be_one_workers_each() -> None:
    def batches(sizes: list[int]) -> list[list[int]]:
        ends = list(accumulate(sizes, initial=0))
        return [list(range(start, end)) for start, end in pairwise(ends)]

    def team(sizes: list[int]) -> Team:
        return Team(2, sum(sizes), batch_sampler=batches(sizes), share={"per_worker": True})

    even_team = team([3, 1, 2, 4])
    assert list(even_team.epoch().values()) == [[[0, 1, 2], [3]], [[4, 5], [6, 7, 8, 9]]]
    assert list(team([3, 1, 3]).epoch().values()) == [[[0, 1, 2], [3]], [[4, 5], [6]]]
    assert [len(loader) for loader in team([3, 1, 3]).loaders] == [2, 2]
    with pytest.raises(UsageError, match="1 sample at the end of an epoch cannot be divided among 2 workers"):
        team([3, 1, 1]).epoch()


def test_items_without_batches_that_cannot_be_dealt_out_evenly_are_refused_per_worker() -> None:
    share = {"per_worker": True}
    assert len(Team(2, 4, batch_size=None, collate_fn=None, share=share).epoch()) == 2
    with pytest.raises(UsageError, match="1 sample at the end of an epoch"):
        Team(2, 5, batch_size=None, collate_fn=None, share=share).epoch()


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


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loaders_that_are_iterated_at_the_same_time_draw_plain_pytorch_s_orders(num_workers: int) -> None:
    options: dict[str, Any] = {"shuffle": True, "num_workers": num_workers, "collate_fn": list}
    plain = [DataLoader(Numbers(count), batch_size=4, **options) for count in (12, 18)]
    shared = [TeamLoader(loader, Hand(0, 1, Wire())) for loader in plain]
    orders = []
    for one, other in (plain, shared):
        torch.manual_seed(5)
        orders.append([*zip(one, other, strict=False), *zip(one, one, strict=True)])
    assert orders[0] == orders[1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_epochs_of_one_loader_at_the_same_time_have_rounds_of_their_own(num_workers: int) -> None:
    team = Team(2, 14, batch_size=4, num_workers=num_workers)
    for hand, loader in zip(team.hands, team.loaders, strict=True):
        assert [one for one, other in zip(loader, loader, strict=True) if one != other] == []
        assert hand.taken == [(size, 0.5, number + late) for number, size in enumerate((2, 2, 2, 1)) for late in (0, 4)]


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


class Eager(Sampler[Any]):
    """Draws as soon as there is an iterator."""

    def __init__(self, batch: int | None) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(12).tolist()
        return iter(order if self.batch is None else [order[i : i + self.batch] for i in range(0, 12, self.batch)])

    def __len__(self) -> int:
        return 12 // (self.batch or 1)


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
@pytest.mark.parametrize("kind", ["sampler", "batch sampler", "no batches"])
def test_orders_are_plain_torch_s_also_of_a_sampler_that_draws_at_once(kind: str, workers: dict[str, Any]) -> None:
    options: dict[str, Any] = {
        "sampler": {"batch_size": 4, "sampler": Eager(None)},
        "batch sampler": {"batch_sampler": Eager(4)},
        "no batches": {"batch_size": None, "sampler": Eager(None)},
    }[kind]
    torch.manual_seed(3)
    plain = DataLoader(Numbers(12), collate_fn=(lambda x: x) if kind == "no batches" else list, **options, **workers)
    expected = [[*list(plain), torch.rand(()).item()] for _ in range(3)]
    torch.manual_seed(3)
    team = Team(1, 12, **options, **workers, collate_fn=plain.collate_fn)
    seen = [[*list(team.loaders[0]), torch.rand(()).item()] for _ in range(3)]
    assert seen == expected


# -- what is refused -------------------------------------------------------------------------------------------------


def test_what_is_no_loader_is_refused_by_its_kind() -> None:
    with pytest.raises(UsageError, match=r"torch\.utils\.data\.DataLoader objects last; it got a list"):
        check_loader([1, 2, 3])


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


def test_a_distributed_sampler_is_refused_since_the_team_divides_the_loader() -> None:
    sampler = DistributedSampler(Numbers(8), num_replicas=2, rank=0)
    for loader in (
        DataLoader(Numbers(8), sampler=sampler),
        DataLoader(Numbers(8), batch_sampler=BatchSampler(sampler, 2, False)),
    ):
        with pytest.raises(UsageError, match="has a DistributedSampler, which draws one of 2 parts"):
            check_loader(loader)
    check_loader(DataLoader(Numbers(8), sampler=DistributedSampler(Numbers(8), num_replicas=1, rank=0)))


class _Fetched(Numbers):
    """Counts how it is asked."""

    calls = 0

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.calls += 1
        return [self[index] for index in indices]


@pytest.mark.parametrize("options", [{"batch_size": 3}, {"batch_size": None}, {"batch_size": 3, "num_workers": 1}])
def test_batches_are_fetched_as_torch_fetches_them(options: dict[str, Any]) -> None:
    loader = DataLoader(_Fetched(10), shuffle=True, **options)
    torch.manual_seed(3)
    expected = [batch.tolist() if torch.is_tensor(batch) else batch for batch in loader]
    after = torch.rand(1)
    torch.manual_seed(3)
    got = [batch.tolist() if torch.is_tensor(batch) else batch for batch in fetched(iter(loader))]
    assert got == expected
    assert torch.equal(torch.rand(1), after)


def test_a_batch_is_fetched_at_once_and_without_torchs_event_unless_a_profiler_wants_it() -> None:
    loader = DataLoader(_Fetched(9), batch_size=3)
    batches = fetched(iter(loader))
    assert isinstance(batches, FetchedBatches)
    first = next(batches).tolist()
    with torch.autograd.profiler.profile() as profile:
        second = next(batches).tolist()
    third = next(batches).tolist()
    assert [first, second, third] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert next(batches, None) is None
    assert loader.dataset.calls == 3  # type: ignore[attr-defined]
    assert any("DataLoader" in event.name for event in profile.function_events or ())


def test_keys_that_are_not_plain_numbers_arrive_as_they_are() -> None:
    for keys in ([], [3, 1, 2], [True, 2], [(1, "a"), (2, [3, (4,)])], ["a", 1], [{"x": (1, 2)}]):
        assert unpack(pack(keys, batches=False)) == keys
        assert unpack(pack([keys, keys], batches=True)) == [keys, keys]
    assert unpack(pack(torch.arange(3), batches=False)) == [0, 1, 2]


def test_a_worker_that_joins_copies_the_rounds_that_were_cut_with_a_lost_one_of_its_rank() -> None:
    team = Team(3, 48, batch_size=6)
    running = [iter(loader) for loader in team.loaders[:2]]
    counted = [list(chain(*(next(batches) for _ in range(2)))) for batches in running]
    assert counted == [[0, 1, 6, 7], [2, 3, 8, 9]]
    for loader in team.loaders[:2]:  # rank 2 is lost in round 0, and parts up to round 4 are fetched
        loader._shares.orphans.lose({2}, 0, 5, [0, 1])
    state = team.loaders[0].state()
    team.loaders[2].enter(state, 1)
    for loader in team.loaders:
        loader.gain(2, 6)
    for hand, batches in zip(team.hands, [*running, iter(team.loaders[2])], strict=True):
        for batch in batches:
            samples, weight, _ = hand.taken[-1]
            assert bool(weight) == bool(samples)
            counted.append(batch if weight else [])
    assert sorted(chain(*counted)) == list(range(48)), "each counts once"
    assert [weight for _, weight, number in team.hands[2].taken if number < 6] == [0.0] * 4
    assert [samples for samples, _, number in team.hands[2].taken if number >= 6][:2] == [2, 2]
