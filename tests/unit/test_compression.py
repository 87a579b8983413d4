"""Compressed gradients: what each form keeps, and that what it leaves out comes later."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import parse_compression
from paceline.parameters.compression import Codec, Feedback, codec_class
from paceline.parameters.layout import Layout
from paceline.transport import Memory

FORMS = ["bf16", "fp16", "int8", "topk", "topk:0.1", "topk:1"]
BLOCK = 1024


def layout(*counts: int, doubles: int = 0) -> Layout:
    parameters = [torch.nn.Parameter(torch.zeros(count)) for count in counts]
    if doubles:
        parameters.append(torch.nn.Parameter(torch.zeros(doubles, dtype=torch.float64)))
    return Layout([(str(index), parameter) for index, parameter in enumerate(parameters)], 2)


def make(form: str, where: Layout, workers: int = 1) -> Codec:
    kind = codec_class(parse_compression(form))
    assert kind is not None
    return kind(where, Memory.create(kind.memory_size(where, workers)), workers)


def gradient(where: Layout, flat: int = 0, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Elements of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    one = where.flats[flat]
    drawn = torch.randn(one.count, generator=generator, dtype=torch.float64)
    return (scale * drawn * torch.exp(2 * torch.randn(one.count, generator=generator).double())).to(one.dtype)


def decoded(codec: Codec, where: Layout, rank: int = 0, flat: int = 0) -> torch.Tensor:
    return codec.decode(rank, flat, 0, where.flats[flat].count)


# -- what a form keeps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "bits"), [("bf16", 8), ("fp16", 11)])
@pytest.mark.parametrize("flat", [0, 1])
def test_sixteen_bits_round_every_element_to_the_nearest(form: str, bits: int, flat: int) -> None:
    where = layout(3000, 17, doubles=500)
    codec, value = make(form, where), gradient(where, flat)
    codec.encode(0, flat, value)
    got = decoded(codec, where, flat=flat)
    assert got.dtype == value.dtype
    smallest = torch.finfo({"bf16": torch.bfloat16, "fp16": torch.float16}[form]).tiny
    assert bool(((got - value).abs() <= value.abs() * 2.0**-bits + smallest * 2.0**-bits).all())
    assert float((got - value).abs().max()) > 0


@pytest.mark.parametrize("flat", [0, 1])
def test_int8_is_within_half_a_step_of_its_block(flat: int) -> None:
    where = layout(2 * BLOCK + 100, 333, doubles=BLOCK + 5)
    codec, value = make("int8", where), gradient(where, flat)
    value[BLOCK : 2 * BLOCK] *= 1e-6  # a block of small elements is not drowned by a large neighbour
    codec.encode(0, flat, value)
    got = decoded(codec, where, flat=flat)
    assert got.dtype == value.dtype
    for start in range(0, value.numel(), BLOCK):
        block, ours = value[start : start + BLOCK].double(), got[start : start + BLOCK].double()
        step = float(block.abs().max()) / 127
        assert float((block - ours).abs().max()) <= step / 2 * (1 + 1e-4)
        largest = int(block.abs().argmax())
        assert float(ours[largest]) == pytest.approx(float(block[largest]), rel=1e-6)


def test_int8_of_nothing_is_nothing() -> None:
    where = layout(BLOCK + 1)
    codec = make("int8", where)
    codec.encode(0, 0, torch.zeros(where.flats[0].count))
    assert not decoded(codec, where).any()


@pytest.mark.parametrize(("form", "share"), [("topk", 0.01), ("topk:0.1", 0.1), ("topk:1", 1.0)])
@pytest.mark.parametrize("flat", [0, 1])
def test_top_k_keeps_the_largest_exactly_and_nothing_else(form: str, share: float, flat: int) -> None:
    where = layout(2000, 48, doubles=1000)
    codec, value = make(form, where), gradient(where, flat)
    codec.encode(0, flat, value)
    got = decoded(codec, where, flat=flat)
    kept = int(value.numel() * share)
    largest = torch.zeros(value.numel(), dtype=torch.bool)
    largest[value.abs().argsort(descending=True)[:kept]] = True
    assert torch.equal(got[largest], value[largest])
    assert not got[~largest].any()


def test_top_k_keeps_at_least_one_element() -> None:
    where = layout(16)
    codec, value = make("topk:0.001", where), torch.arange(16.0)
    codec.encode(0, 0, value)
    assert decoded(codec, where).tolist() == [0.0] * 15 + [15.0]


@pytest.mark.parametrize("form", FORMS)
def test_a_sender_knows_what_is_read_from_its_gradient(form: str) -> None:
    where = layout(1500, 700, doubles=300)
    codec = make(form, where)
    for flat in range(2):
        said = codec.encode(0, flat, gradient(where, flat))
        assert torch.equal(said, decoded(codec, where, flat=flat))


@given(st.sampled_from(FORMS), st.integers(0, 3600), st.integers(0, 3600), st.integers(0, 1))
def test_a_part_is_a_slice_of_the_whole(form: str, first: int, second: int, flat: int) -> None:
    where = layout(2 * BLOCK, 1500, doubles=3000)
    codec = make(form, where)
    codec.encode(0, flat, gradient(where, flat))
    whole = decoded(codec, where, flat=flat)
    start, stop = (min(bound, whole.numel()) for bound in sorted((first, second)))
    assert torch.equal(codec.decode(0, flat, start, stop), whole[start:stop])


@pytest.mark.parametrize("form", FORMS)
def test_workers_do_not_write_over_each_other(form: str) -> None:
    where = layout(900, 77, doubles=130)
    codec, alone = make(form, where, workers=3), make(form, where)
    for rank in range(3):
        for flat in range(2):
            codec.encode(rank, flat, gradient(where, flat, seed=rank))
    for rank in range(3):
        for flat in range(2):
            alone.encode(0, flat, gradient(where, flat, seed=rank))
            assert torch.equal(decoded(codec, where, rank, flat), decoded(alone, where, 0, flat))


def test_a_push_takes_as_many_bytes_as_its_form_says() -> None:
    where = layout(64 * BLOCK)
    count = 64 * BLOCK
    assert where.size == 4 * count
    assert make("bf16", where).bytes == make("fp16", where).bytes == 2 * count
    assert make("int8", where).bytes == count + 4 * 64
    assert 8 * int(count * 0.01) <= make("topk", where).bytes < 8 * int(count * 0.01) + 128
    assert make("int8", where, workers=3).bytes == make("int8", where).bytes


@pytest.mark.parametrize("form", ["none", "fp32"])
def test_a_gradient_as_it_is_needs_no_form(form: str) -> None:
    assert codec_class(parse_compression(form)) is None


# -- what a form leaves out ------------------------------------------------------------------------------------------


def pushed(form: str, gradients: list[torch.Tensor], where: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of what can be read of these gradients, pushed one after the other, and the last one."""
    codec = make(form, where)
    own = [torch.zeros(flat.count, dtype=flat.dtype) for flat in where.flats]
    feedback = Feedback(codec, 0, own)
    total = torch.zeros(where.flats[0].count, dtype=torch.float64)
    last = total
    for value in gradients:
        own[0].copy_(value)
        feedback.encode()
        assert torch.equal(own[0], value) or not value.isfinite().all()  # `.grad` stays the script's own
        last = decoded(codec, where)
        total += last.double()
    return total, last


@pytest.mark.parametrize("form", FORMS)
def test_what_is_left_out_comes_later(form: str) -> None:
    """What is missing after any number of pushes is no more than one push leaves out, so the mean comes to be exact."""
    where = layout(1200)
    steady = gradient(where, scale=0.1)
    shortfalls = {}
    for steps in (10, 400):
        drawn = [steady + 0.1 * gradient(where, seed=1 + step, scale=0.1) for step in range(steps)]
        total, _ = pushed(form, drawn, where)
        wanted = torch.stack(drawn).double().sum(0)
        shortfalls[steps] = float((total - wanted).norm() / wanted.norm())
    assert shortfalls[400] < {"topk": 0.3, "topk:0.1": 0.03}.get(form, 2e-4)
    assert shortfalls[400] <= shortfalls[10] / 2 or shortfalls[400] < 1e-6


def test_without_it_small_elements_would_never_come() -> None:
    where = layout(32)
    value = torch.full((32,), 1e-3)
    value[0] = 1.0
    total, _ = pushed("int8", [value] * 500, where)
    assert total[1:].tolist() == pytest.approx([0.5] * 31, abs=0.01)


def test_top_k_sends_every_element_in_the_end() -> None:
    where = layout(64)
    value = torch.linspace(0.1, 1.0, 64)
    total, _ = pushed("topk:0.02", [value] * 640, where)
    assert bool((total > 0).all())
    assert float((total - 640 * value.double()).abs().max()) < 64 * 1.5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_gradient_that_is_not_finite_does_not_poison_later_ones(form: str, bad: float) -> None:
    where = layout(64)
    fine, broken = torch.full((64,), 0.5), torch.full((64,), 0.5)
    broken[3] = bad
    codec = make(form, where)
    own = [torch.zeros(64)]
    feedback = Feedback(codec, 0, own)
    own[0].copy_(broken)
    feedback.encode()
    sums = torch.zeros(64, dtype=torch.float64)
    for _ in range(200):
        own[0].copy_(fine)
        feedback.encode()
        got = decoded(codec, where)
        assert bool(got.isfinite().all())
        sums += got
    kept = {"topk": 1, "topk:0.1": 6}.get(form, 64)
    assert float(sums.sum()) == pytest.approx(200 * 32.0, abs=64 / kept * 32.0 + 32.0)
    assert float(sums.max()) < 200 * 0.5 + 64 / kept * 1.5


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("form", FORMS)
def test_a_gradient_that_is_not_finite_can_be_seen_not_to_be(form: str, bad: float) -> None:
    """As plain torch would: a broken gradient must not become a large but finite one in silence."""
    where = layout(64)
    value = torch.full((64,), 0.5)
    value[3] = bad
    _, last = pushed(form, [value], where)
    assert not bool(last.isfinite().all())


def test_what_is_too_large_for_fp16_is_cut_and_comes_later() -> None:
    where = layout(32)
    value = torch.zeros(32)
    value[5] = 150_000.0
    value[6] = -70_000.0
    rest = [torch.zeros(32)] * 3
    _, first = pushed("fp16", [value], where)
    assert bool(first.isfinite().all())
    assert (float(first[5]), float(first[6])) == (65504.0, -65504.0)
    total, last = pushed("fp16", [value, *rest], where)
    assert float(total[5]) == pytest.approx(150_000.0, abs=1.0)
    assert float(total[6]) == pytest.approx(-70_000.0, abs=1.0)
    assert float(last.abs().max()) < 1.0


@pytest.mark.parametrize("form", FORMS)
def test_every_dtype_has_its_own_remainder(form: str) -> None:
    where = layout(100, doubles=100)
    codec = make(form, where)
    own = [gradient(where, flat) for flat in range(2)]
    feedback = Feedback(codec, 0, own)
    sums = [torch.zeros_like(value) for value in own]
    for _ in range(300):
        feedback.encode()
        for flat in range(2):
            sums[flat] += decoded(codec, where, flat=flat)
    for total, value in zip(sums, own, strict=True):
        assert float((total / 300 - value).norm() / value.norm()) < (0.2 if form == "topk" else 0.02)
