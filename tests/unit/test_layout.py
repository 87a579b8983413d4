import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.parameters.layout import Layout

Named = list[tuple[str, torch.nn.Parameter]]


def parameters() -> Named:
    torch.manual_seed(0)
    values = {
        "weight": torch.randn(7, 5),
        "scale": torch.randn(()),
        "conv": torch.randn(4, 3, 3, 2).to(memory_format=torch.channels_last),
        "half": torch.randn(33).to(torch.bfloat16),
        "nothing": torch.randn(0, 3),
        "double": torch.randn(2, 9, dtype=torch.float64),
        "transposed": torch.randn(6, 5).t(),
        "volume": torch.randn(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d),
        "sparse": torch.randn(8, 6)[::2, ::3],
        "expanded": torch.randn(1, 4).expand(3, 4),
        "column": torch.randn(5, 1),
        "half scale": torch.randn((), dtype=torch.bfloat16),
    }
    return [(name, torch.nn.Parameter(value)) for name, value in values.items()]


dtypes = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.complex64])
named = st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=4), dtypes), min_size=1, max_size=12).map(
    lambda kinds: [
        (str(index), torch.nn.Parameter(torch.empty(shape, dtype=dtype))) for index, (shape, dtype) in enumerate(kinds)
    ]
)
workers = st.integers(1, 6)


def buffers_of(layout: Layout) -> list[torch.Tensor]:
    return [torch.zeros(flat.count, dtype=flat.dtype) for flat in layout.flats]


def test_slots_stand_in_the_order_of_the_parameters() -> None:
    given_order = parameters()
    layout = Layout(given_order, 3)
    assert [(slot.name, slot.parameter) for slot in layout.slots] == given_order
    assert [slot.index for slot in layout.slots] == list(range(len(given_order)))


def test_every_dtype_has_one_flat_buffer() -> None:
    layout = Layout(parameters(), 2)
    assert [flat.dtype for flat in layout.flats] == [torch.float32, torch.bfloat16, torch.float64]
    assert all(slot.parameter.dtype == flat.dtype for flat in layout.flats for slot in flat.slots)
    assert layout.size == sum(flat.count * flat.dtype.itemsize for flat in layout.flats)


def test_a_view_has_its_parameter_s_shape_and_memory_format() -> None:
    layout = Layout(parameters(), 2)
    views = layout.buffers(buffers_of(layout))
    for slot, view in zip(layout.slots, views, strict=True):
        assert view.shape == slot.parameter.shape
        assert view.dtype == slot.parameter.dtype
        if slot.name in ("sparse", "expanded"):
            assert view.is_contiguous()
        else:
            assert view.stride() == slot.parameter.stride()


def test_a_channels_last_weight_stays_channels_last() -> None:
    layout = Layout(parameters(), 2)
    conv = layout.buffers(buffers_of(layout))[2]
    assert conv.is_contiguous(memory_format=torch.channels_last)
    assert not conv.is_contiguous()


@given(named, workers)
def test_views_do_not_overlap(given_parameters: Named, size: int) -> None:
    layout = Layout(given_parameters, size)
    flats = buffers_of(layout)
    for view in layout.buffers(flats):
        view.add_(1)
    written = sum(int(flat.real.sum()) for flat in flats)
    assert written == sum(parameter.numel() for _, parameter in given_parameters)
    assert all(bool((flat.real <= 1).all()) for flat in flats)


@given(named, workers)
def test_every_slot_lies_inside_its_buffer_on_a_cache_line_of_its_own(given_parameters: Named, size: int) -> None:
    for flat in Layout(given_parameters, size).flats:
        end = 0
        for slot in flat.slots:
            assert slot.offset >= end
            assert slot.offset * flat.dtype.itemsize % 64 == 0
            end = slot.offset + slot.count
        assert end <= flat.count


@given(named, workers)
def test_shards_cover_everything_exactly_once(given_parameters: Named, size: int) -> None:
    for flat in Layout(given_parameters, size).flats:
        assert len(flat.shards) == size
        bounds = [flat.shards[0][0], *(stop for _, stop in flat.shards)]
        assert bounds[0] == 0
        assert bounds[-1] == flat.count
        assert [start for start, _ in flat.shards] == bounds[:-1]
        assert bounds == sorted(bounds)


@given(named, workers)
def test_shards_are_aligned_and_alike_in_size(given_parameters: Named, size: int) -> None:
    for flat in Layout(given_parameters, size).flats:
        assert all(start * flat.dtype.itemsize % 64 == 0 for start, _ in flat.shards)
        sizes = [(stop - start) * flat.dtype.itemsize for start, stop in flat.shards]
        assert max(sizes) - min(sizes) <= 64


@pytest.mark.parametrize("name", [name for name, _ in parameters()])
def test_flatten_is_what_a_view_undoes(name: str) -> None:
    layout = Layout(parameters(), 3)
    slot = next(slot for slot in layout.slots if slot.name == name)
    flat = slot.flatten(slot.parameter.detach())
    assert flat.shape == (slot.parameter.numel(),)
    whole = torch.zeros(slot.offset + slot.count, dtype=flat.dtype)
    whole[slot.offset :] = flat
    assert torch.equal(slot.view(whole), slot.parameter)


def test_flatten_takes_a_value_in_whatever_memory_format() -> None:
    layout = Layout(parameters(), 1)
    slot = layout.slots[2]
    value = torch.randn(slot.shape)
    assert torch.equal(slot.flatten(value), slot.flatten(value.to(memory_format=torch.channels_last)))


def test_the_layout_is_the_same_on_every_worker() -> None:
    first, second = Layout(parameters(), 4), Layout(parameters(), 4)
    assert [(slot.offset, slot.stride) for slot in first.slots] == [(slot.offset, slot.stride) for slot in second.slots]
    assert [flat.shards for flat in first.flats] == [flat.shards for flat in second.flats]


def sized(*megabytes: float) -> Named:
    return [
        (str(index), torch.nn.Parameter(torch.empty(int(size * (1 << 20)) // 4, device="meta")))
        for index, size in enumerate(megabytes)
    ]


def test_in_stripes_every_owner_has_a_part_of_every_large_parameter() -> None:
    layout = Layout(sized(16, 0.1, 64, 0.1, 16), 3, striped=True)
    assert [[slot.name for slot in flat.slots] for flat in layout.flats] == [["0"], ["1"], ["2"], ["3"], ["4"]]
    for flat in layout.flats:
        sizes = [stop - start for start, stop in flat.shards]
        assert sum(sizes) == flat.count
        assert max(sizes) - min(sizes) <= 16
    assert [slot.name for slot in layout.slots] == ["0", "1", "2", "3", "4"]


def test_stripes_join_small_neighbours() -> None:
    layout = Layout(sized(1, 1, 1, 1, 1, 8, 0.5, 0.5), 2, striped=True)
    assert [[slot.name for slot in flat.slots] for flat in layout.flats] == [
        ["0", "1", "2", "3"],
        ["4"],
        ["5"],
        ["6", "7"],
    ]


def test_whole_parameters_are_not_striped() -> None:
    assert len(Layout(sized(16, 16), 2, whole=True, striped=True).flats) == 1
