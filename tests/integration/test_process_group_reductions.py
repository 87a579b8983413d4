"""Reductions of the process group give the bits that one process gets, which combines all values in rank order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from helpers.oracle import (
    COMPLEX,
    EIGHT_BIT_FLOATS,
    FACTOR,
    NUMERIC,
    OPERATORS,
    PLAIN,
    SIZES,
    Layout,
    Pools,
    Seen,
    defined,
    fold,
    lay,
    layouts,
    numbers,
    quiet,
    reduce_op,
    seen,
    shapes,
    thoroughly,
    turned,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed
from torch.distributed import ReduceOp

from paceline.transport.control_block import ControlBlock

torch.set_num_threads(1)
pytestmark = quiet


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with Pools() as made:
        yield made


@pytest.fixture(scope="module")
def closed() -> Iterator[Pools]:
    with Pools(reaching=False) as made:
        yield made


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def large(dtype: torch.dtype) -> tuple[int]:
    """More than a slot holds."""
    return (ControlBlock.SLOT // dtype.itemsize + 333,)


# -- every operator, every dtype, every size -------------------------------------------------------------------------


def combine_all(
    rank: int, size: int, dtype: torch.dtype, operators: list[str], several: list[tuple[int, ...]]
) -> dict[Any, Seen]:
    results = {}
    for shape in several:
        own = numbers(7, rank, shape, dtype)
        for operator in operators:
            op = reduce_op(operator)
            if not (dtype.is_complex and operator == "product"):  # which torch refuses, before it asks the backend
                tensor = own.clone()
                distributed.all_reduce(tensor, op)
                results["all_reduce", operator, shape] = seen(tensor)
            tensor = own.clone()
            distributed.reduce(tensor, size - 1, op)
            results["reduce", operator, shape] = seen(tensor)
            tensor = torch.zeros(shape).to(dtype)
            distributed.reduce_scatter(tensor, [own] * size, op)
            results["reduce_scatter", operator, shape] = seen(tensor)
    return results


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(size, dtype) for number, dtype in enumerate(NUMERIC) for size in (1, 2, (3, 5)[number % 2])],
    ids=lambda value: name_of(value) if isinstance(value, torch.dtype) else str(value),
)
def test_every_operator_combines_every_dtype_in_rank_order(pools: Pools, size: int, dtype: torch.dtype) -> None:
    operators = [name for name in OPERATORS if defined(name, dtype)]
    if dtype in EIGHT_BIT_FLOATS:
        operators.remove("premul_sum")  # has a test of its own
    assert len(operators) >= 4
    agree(pools, size, dtype, operators)


@pytest.mark.parametrize("dtype", EIGHT_BIT_FLOATS, ids=name_of)
@pytest.mark.parametrize("size", [1, 3])
def test_floats_of_eight_bits_can_be_premultiplied(pools: Pools, size: int, dtype: torch.dtype) -> None:
    agree(pools, size, dtype, ["premul_sum"])


def agree(pools: Pools, size: int, dtype: torch.dtype, operators: list[str]) -> None:
    """All ranks get what one process gets, of some shapes."""
    several: list[tuple[int, ...]] = [(), (0,), (3, 7), large(dtype)]
    told = pools.run(size, combine_all, dtype, operators, several)
    count = 0
    for shape in several:
        parts = [numbers(7, rank, shape, dtype) for rank in range(size)]
        for operator in operators:
            expected, by_part = seen(fold(operator, parts)), seen(fold(operator, parts, real=True))
            for rank in range(size):
                result = told[rank]
                assert result.get(("all_reduce", operator, shape), by_part) == by_part, (operator, rank)
                assert result["reduce_scatter", operator, shape] == expected, (operator, rank)
                at_root = expected if rank == size - 1 else seen(parts[rank])
                assert result["reduce", operator, shape] == at_root, (operator, rank)
            count += 2 if dtype.is_complex and operator == "product" else 3
    assert [len(result) for result in told] == [count] * size


def refuse(rank: int, size: int, dtype: torch.dtype, operator: str) -> tuple[list[tuple[str, str]], bool, Seen]:
    refusals, unchanged = [], True
    for shape in [(3,), large(dtype)]:
        own = numbers(5, rank, shape, dtype)
        tensor, op = own.clone(), reduce_op(operator)
        calls = [
            lambda tensor=tensor, op=op: distributed.reduce(tensor, 0, op),
            lambda tensor=tensor, op=op, own=own: distributed.reduce_scatter(tensor, [own] * size, op),
        ]
        if not dtype.is_complex:  # torch has refused these already
            calls.append(lambda tensor=tensor, op=op: distributed.all_reduce(tensor, op))
        for call in calls:
            try:
                call()
            except ValueError as error:
                refusals.append((type(error).__name__, str(error)))
            unchanged = unchanged and seen(tensor) == seen(own)
    after = numbers(6, rank, (1000,), torch.float32)
    distributed.all_reduce(after)
    return refusals, unchanged, seen(after)


UNDEFINED = [
    (operator, dtype)
    for operator in OPERATORS
    for dtype in (torch.float16, torch.float32, torch.float8_e5m2, torch.bool, *COMPLEX)
    if not defined(operator, dtype)
]


@pytest.mark.parametrize("size", [1, 3])
def test_what_is_not_defined_is_refused_in_one_sentence_and_the_group_goes_on(pools: Pools, size: int) -> None:
    assert len(UNDEFINED) == 1 + 3 * 3 + 5 * 3
    after = seen(fold("sum", [numbers(6, rank, (1000,), torch.float32) for rank in range(size)]))
    for operator, dtype in UNDEFINED:
        for refusals, unchanged, sums in pools.run(size, refuse, dtype, operator):
            assert len(refusals) == (4 if dtype.is_complex else 6), (operator, dtype)
            for kind, message in refusals:
                assert kind == "InvalidCall"
                assert message.startswith(f"{operator} is not defined for {name_of(dtype)}")
                assert "\n" not in message
            assert unchanged
            assert sums == after


def nans(rank: int, size: int, count: int, operator: str) -> tuple[bool, Seen]:
    tensor = numbers(3, rank, (count,), torch.float32)
    tensor[rank::10] = float("nan")
    distributed.all_reduce(tensor, reduce_op(operator))
    return bool(tensor.isnan()[:size].all() and not tensor[size:10].isnan().any()), seen(tensor.nan_to_num(nan=5.0))


@pytest.mark.parametrize("operator", ["sum", "avg", "product", "min", "max"])
@pytest.mark.parametrize("size", [2, 3])
def test_what_is_no_number_anywhere_is_none_in_the_result(pools: Pools, size: int, operator: str) -> None:
    for count in (40, 100_000):
        parts = [numbers(3, rank, (count,), torch.float32) for rank in range(size)]
        for rank, part in enumerate(parts):
            part[rank::10] = float("nan")
        expected = seen(fold(operator, parts).nan_to_num(nan=5.0))
        assert pools.run(size, nans, count, operator) == [(True, expected)] * size


# -- however tensors lie in memory -----------------------------------------------------------------------------------


class Case(NamedTuple):
    """A reduction, in all that it may depend on."""

    kind: str
    operator: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    layouts: list[Layout]
    root: int
    later: bool


KINDS = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single"]


def reduce_case(rank: int, size: int, case: Case) -> tuple[Seen, Seen | None, bool]:
    """What this rank got; what its input is after that, if that is another tensor; whether nothing else changed."""
    op, layout = reduce_op(case.operator), case.layouts[rank]
    if case.kind in ("all_reduce", "reduce"):
        laid = lay(numbers(1, rank, case.shape, case.dtype), layout)
        if case.kind == "all_reduce":
            work = distributed.all_reduce(laid.tensor, op, async_op=case.later)
        else:
            work = distributed.reduce(laid.tensor, case.root, op, async_op=case.later)
        if work is not None:
            work.wait()
        return seen(laid.tensor), None, laid.unharmed()
    parts = [numbers(1 + taker, rank, case.shape, case.dtype) for taker in range(size)]
    out = lay(torch.zeros(case.shape).to(case.dtype), layout)
    if case.kind == "reduce_scatter":
        inputs = [lay(part, layout).tensor for part in parts]
        work = distributed.reduce_scatter(out.tensor, inputs, op, async_op=case.later)
    else:
        inputs = [lay(torch.stack(parts), layout).tensor]
        work = distributed.reduce_scatter_single(out.tensor, inputs[0], op, async_op=case.later)
    if work is not None:
        work.wait()
    return seen(out.tensor), seen(torch.cat([part.detach().reshape(-1) for part in inputs])), out.unharmed()


def expect(case: Case, size: int) -> list[tuple[Seen, Seen | None, bool]]:
    parts = [[numbers(1 + taker, rank, case.shape, case.dtype) for rank in range(size)] for taker in range(size)]
    if case.kind == "all_reduce":
        return [(seen(fold(case.operator, parts[0], real=True)), None, True)] * size
    if case.kind == "reduce":
        total = fold(case.operator, parts[0])
        return [(seen(total if rank == case.root else parts[0][rank]), None, True) for rank in range(size)]
    return [
        (seen(fold(case.operator, parts[rank])), seen(torch.stack([given[rank] for given in parts]).view(-1)), True)
        for rank in range(size)
    ]


@st.composite
def cases(draw: st.DrawFn, size: int, kind: str) -> Case:
    turn = 7 * KINDS.index(kind) + size
    dtype = draw(st.sampled_from(turned(NUMERIC, turn)))
    fine = [name for name in OPERATORS if defined(name, dtype)]
    if kind == "all_reduce" and dtype.is_complex:
        fine.remove("product")  # which torch refuses
    most = 6_000_000 // size if kind in ("all_reduce", "reduce") else 2_000_000 // size**2
    return Case(
        kind,
        draw(st.sampled_from(turned(fine, turn))),
        dtype,
        draw(shapes(dtype, most)),
        draw(layouts(size, turn)),
        draw(st.integers(0, size - 1)),
        draw(st.booleans()),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
@thoroughly
@given(st.data())
def test_a_reduction_is_that_of_one_process_however_tensors_lie(
    pools: Pools, size: int, kind: str, data: st.DataObject
) -> None:
    case = data.draw(cases(size, kind))
    assert pools.run(size, reduce_case, case) == expect(case, size)


@pytest.mark.parametrize("kind", KINDS)
@thoroughly
@given(st.data())
def test_members_that_cannot_reach_each_other_reduce_the_same(closed: Pools, kind: str, data: st.DataObject) -> None:
    case = data.draw(cases(3, kind))
    assert closed.run(3, reachable) == [False] * 3
    assert closed.run(3, reduce_case, case) == expect(case, 3)


def reachable(rank: int, size: int) -> bool:
    return bool(distributed.group.WORLD.group.peers.private)


def test_members_that_can_reach_each_other_do(pools: Pools) -> None:
    assert pools.run(3, reachable) == [True] * 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_what_just_fits_into_a_slot_and_what_just_does_not_are_reduced_alike(
    pools: Pools, size: int, kind: str
) -> None:
    slot = ControlBlock.SLOT // 4
    for count in (slot - 1, slot, slot + 1, slot // 2 - 1, slot // 2, slot // 2 + 1):  # one part, or one per peer
        case = Case(kind, "sum", torch.float32, (count,), [PLAIN] * size, 1, False)
        assert pools.run(size, reduce_case, case) == expect(case, size), count


def large_and_mixed(rank: int, size: int, count: int, pattern: int) -> list[Seen]:
    results = []
    for operator in ("sum", "max"):
        laid = lay(numbers(2, rank, (count,), torch.float32), Layout("offset", bool(pattern >> rank & 1)))
        for _ in range(2):
            distributed.all_reduce(laid.tensor, reduce_op(operator))
        results.append(seen(laid.tensor))
    return results


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shared_and_private_memory_mix_over_ranks(pools: Pools, size: int) -> None:
    count = 300_001
    parts = [numbers(2, rank, (count,), torch.float32) for rank in range(size)]
    expected = [seen(fold(op, [fold(op, parts)] * size)) for op in ("sum", "max")]
    for pattern in range(2**size):
        assert pools.run(size, large_and_mixed, count, pattern) == [expected] * size, f"{pattern:b}"


@pytest.mark.parametrize("operator", ["sum", "product"])
@pytest.mark.parametrize("kind", ["reduce", "reduce_scatter"])
@pytest.mark.parametrize("shape", [(5, 3), (50_000,)], ids=["small", "large"])
@pytest.mark.parametrize("forms", [("conj",) * 3, ("plain", "conj", "plain"), ("conj", "plain", "conj")])
def test_a_conjugate_that_is_still_to_be_taken_counts_as_taken(
    pools: Pools, forms: tuple[str, ...], shape: tuple[int, ...], kind: str, operator: str
) -> None:
    case = Case(kind, operator, torch.complex64, shape, [Layout(form) for form in forms], 1, False)
    assert pools.run(3, reduce_case, case) == expect(case, 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(5, 3), (50_000,)], ids=["small", "large"])
def test_a_sign_that_is_still_to_be_changed_counts_as_changed(pools: Pools, shape: tuple[int, ...], kind: str) -> None:
    forms = [Layout("neg"), PLAIN, Layout("neg")]
    case = Case(kind, "sum", torch.float32, shape, forms, 0, False)
    assert pools.run(3, reduce_case, case) == expect(case, 3)


def zeros_of_both_signs(rank: int, size: int, count: int, operator: str, forms: list[str]) -> Seen:
    content = torch.zeros(count).copysign(numbers(4, rank, (count,), torch.float32))
    laid = lay(content, Layout(forms[rank]))
    distributed.all_reduce(laid.tensor, reduce_op(operator))
    return seen(laid.tensor)


@pytest.mark.parametrize("count", [50, 50_000], ids=["small", "large"])
@pytest.mark.parametrize("operator", ["min", "max"])
def test_all_ranks_get_the_same_bits_even_of_zeros(pools: Pools, operator: str, count: int) -> None:
    # Torch takes another zero in a vector than at its end, so that all must have gone the same way.
    for forms in (["plain"] * 3, ["plain", "strided", "plain"]):
        told = pools.run(3, zeros_of_both_signs, count, operator, forms)
        assert told == [told[0]] * 3, forms


def all_products(rank: int, size: int, count: int, forms: list[str]) -> Seen:
    laid = lay(numbers(4, rank, (count,), torch.complex128), Layout(forms[rank]))
    distributed.group.WORLD.allreduce([laid.tensor], ReduceOp.PRODUCT).wait()
    return seen(laid.tensor)


@pytest.mark.parametrize("count", [51, 50_001], ids=["small", "large"])
def test_all_ranks_get_the_same_bits_even_of_complex_products(pools: Pools, count: int) -> None:
    expected = seen(fold("product", [numbers(4, rank, (count,), torch.complex128) for rank in range(3)]))
    for forms in (["plain"] * 3, ["plain", "strided", "plain"]):
        assert pools.run(3, all_products, count, forms) == [expected] * 3, forms


def scatter_in_place(rank: int, size: int, count: int) -> Seen:
    whole = torch.stack([numbers(1 + taker, rank, (count,), torch.float64) for taker in range(size)])
    distributed.reduce_scatter_single(whole[rank], whole)
    return seen(whole[rank])


@pytest.mark.parametrize("count", [11, 40_001])
def test_the_output_of_a_reduce_scatter_may_be_its_own_part_of_the_input(pools: Pools, count: int) -> None:
    expected = [
        seen(fold("sum", [numbers(1 + taker, rank, (count,), torch.float64) for rank in range(4)]))
        for taker in range(4)
    ]
    assert pools.run(4, scatter_in_place, count) == expected


def scatter_uneven(rank: int, size: int, base: int) -> Seen:
    inputs = [numbers(1 + taker, rank, (base + 3 * taker, 2), torch.float32) for taker in range(size)]
    out = torch.zeros(base + 3 * rank, 2)
    distributed.reduce_scatter(out, inputs, ReduceOp.MAX)
    return seen(out)


@pytest.mark.parametrize("base", [0, 5, 16_380])
def test_the_parts_of_a_reduce_scatter_may_differ_in_size(pools: Pools, base: int) -> None:
    expected = [
        seen(fold("max", [numbers(1 + taker, rank, (base + 3 * taker, 2), torch.float32) for rank in range(3)]))
        for taker in range(3)
    ]
    assert pools.run(3, scatter_uneven, base) == expected


# -- several at once, and what is sparse -----------------------------------------------------------------------------


def several_tensors(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [numbers(number, rank, shape, dtype) for number, shape in enumerate([(), (0,), (3, 5), large(dtype), (7,)])]


def coalesced(rank: int, size: int, dtype: torch.dtype, way: str) -> list[Seen]:
    tensors = several_tensors(rank, dtype)
    if way == "function":
        distributed.all_reduce_coalesced(tensors, ReduceOp.AVG)
    elif way == "future":
        distributed.all_reduce_coalesced(tensors, ReduceOp.AVG, async_op=True).wait()
    else:
        later = way == "manager, later"
        with distributed._coalescing_manager(async_ops=later) as manager:
            for tensor in tensors:
                distributed.all_reduce(tensor, ReduceOp.AVG)
        if later:
            manager.wait()
    return [seen(tensor) for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int16])
@pytest.mark.parametrize("way", ["function", "future", "manager", "manager, later"])
def test_tensors_reduced_together_are_as_those_reduced_alone(pools: Pools, way: str, dtype: torch.dtype) -> None:
    by_rank = [several_tensors(rank, dtype) for rank in range(3)]
    expected = [seen(fold("avg", parts, real=True)) for parts in zip(*by_rank, strict=True)]
    assert pools.run(3, coalesced, dtype, way) == [expected] * 3


def coalesced_scatter(rank: int, size: int, later: bool) -> list[Seen]:
    counts = [1, 6, 40_000]
    inputs = [torch.stack([numbers(9 * c + taker, rank, (c,), torch.float32) for taker in range(size)]) for c in counts]
    outs = [torch.zeros(count) for count in counts]
    with distributed._coalescing_manager(async_ops=later) as manager:
        for out, source in zip(outs, inputs, strict=True):
            distributed.reduce_scatter_single(out, source, ReduceOp.MIN)
    if later:
        manager.wait()
    return [seen(out) for out in outs]


@pytest.mark.parametrize("later", [False, True])
def test_tensors_reduced_and_scattered_together_are_as_those_alone(pools: Pools, later: bool) -> None:
    expected = [
        [
            seen(fold("min", [numbers(9 * count + taker, rank, (count,), torch.float32) for rank in range(3)]))
            for count in (1, 6, 40_000)
        ]
        for taker in range(3)
    ]
    assert pools.run(3, coalesced_scatter, later) == expected


def premultiplied(rank: int, size: int, own_factor: bool) -> list[Seen]:
    results = []
    for count in (10, 50_000):
        factor = torch.tensor(FACTOR + rank if own_factor else FACTOR)
        tensor = numbers(8, rank, (count,), torch.float32)
        distributed.all_reduce(tensor, distributed._make_nccl_premul_sum(factor))
        results.append(seen(tensor))
    return results


@pytest.mark.parametrize("own_factor", [False, True])
def test_a_factor_may_be_a_tensor_and_each_rank_s_own(pools: Pools, own_factor: bool) -> None:
    expected = []
    for count in (10, 50_000):
        parts = [numbers(8, rank, (count,), torch.float32) for rank in range(3)]
        parts = [part * (FACTOR + rank if own_factor else FACTOR) for rank, part in enumerate(parts)]
        expected.append(seen(fold("sum", parts)))
    assert pools.run(3, premultiplied, own_factor) == [expected] * 3


def sparse(rank: int, dtype: torch.dtype, entries: int, dense: tuple[int, ...]) -> torch.Tensor:
    """Some entries, the same place now and then twice; of rank 1 none. Whole numbers: any order has the same sum."""
    source = torch.Generator().manual_seed(rank)
    count = 0 if rank == 1 else entries + rank
    indices = torch.randint(0, 40, (2, count), generator=source)
    values = torch.randint(-50, 50, (count, *dense), generator=source).to(dtype)
    return torch.sparse_coo_tensor(indices, values, (40, 40, *dense))


def reduce_sparse(
    rank: int, size: int, grad: bool, entries: int, dense: tuple[int, ...], op: str, later: bool
) -> tuple[bool, Seen]:
    tensor = sparse(rank, torch.float64, entries, dense).requires_grad_(grad)
    work = distributed.all_reduce(tensor, reduce_op(op), async_op=later)
    if work is not None:
        work.wait()
    return tensor.is_sparse, seen(tensor.to_dense())


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("operator", ["sum", "avg"])
@pytest.mark.parametrize(("entries", "dense"), [(0, ()), (9, ()), (9, (3,)), (400, (90,))])
@pytest.mark.parametrize(("size", "grad"), [(1, False), (2, False), (2, True), (4, False)])
def test_sparse_tensors_add_up_to_a_sparse_tensor(
    pools: Pools, size: int, grad: bool, entries: int, dense: tuple[int, ...], operator: str, later: bool
) -> None:
    parts = [sparse(rank, torch.float64, entries, dense).to_dense() for rank in range(size)]
    expected = seen(fold(operator, parts))
    assert pools.run(size, reduce_sparse, grad, entries, dense, operator, later) == [(True, expected)] * size


def sparse_extremes(rank: int, size: int) -> tuple[str, Seen]:
    with pytest.raises(ValueError, match="sparse") as refused:
        distributed.all_reduce(sparse(rank, torch.float64, 3, ()), ReduceOp.MAX)
    after = torch.tensor(rank + 1)
    distributed.all_reduce(after)
    return str(refused.value), seen(after)


def test_of_sparse_tensors_there_is_no_maximum_and_the_group_goes_on(pools: Pools) -> None:
    told = pools.run(3, sparse_extremes)
    assert told == [("all_reduce of sparse tensors takes sum or avg, not max", seen(torch.tensor(6)))] * 3
