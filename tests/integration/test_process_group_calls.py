"""Calls of a group's methods do as on torch's own backends: arguments, errors, handles, timeouts, profiles."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.load import allowed
from helpers.oracle import Pools, hear, quiet, tell, token
from torch import distributed
from torch.distributed import ReduceOp, distributed_c10d

from paceline.errors import InvalidCall, TeamTimeout

torch.set_num_threads(1)
pytestmark = quiet
functional: Any = torch.ops._c10d_functional
UPSTREAM = Path(__file__).parents[2] / "benchmarks" / "upstream.py"


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with Pools() as made:
        yield made


def own(rank: int, *shape: int) -> torch.Tensor:
    return torch.full(shape or (2,), rank + 1.0)


def options(kind: Any, **values: Any) -> Any:
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def world() -> Any:
    return distributed.group.WORLD


# -- wrong arguments -------------------------------------------------------------------------------------------------


def wrong_calls(rank: int, size: int) -> list[tuple[str, str]]:
    """The calls that did not raise as gloo does, or after which the group was unusable; each with its error."""
    group, one = world(), own(rank)
    c10d: Any = distributed
    calls: list[tuple[Callable[[], Any], str]] = []
    for root in (7, -1, size):
        rooted: dict[str, Callable[..., Any]] = {
            "broadcast": lambda root=root: distributed.broadcast(one, group_src=root),
            "reduce": lambda root=root: distributed.reduce(one, group_dst=root),
            "gather": lambda root=root: distributed.gather(one, None, group_dst=root),
            "scatter": lambda root=root: distributed.scatter(one, None, group_src=root),
        }
        calls += [(call, f"{name}: invalid root rank: {root}") for name, call in rooted.items()]
    at_root = options(c10d.GatherOptions, rootRank=rank), options(c10d.ScatterOptions, rootRank=rank)
    elsewhere = options(c10d.GatherOptions, rootRank=(rank + 1) % size)
    calls += [
        (lambda: group.broadcast([one], options(c10d.BroadcastOptions, rootTensor=3)), "invalid root tensor: 3"),
        (lambda: group.reduce([one], options(c10d.ReduceOptions, rootTensor=-1)), "invalid root tensor: -1"),
        (lambda: group.gather([], [one], at_root[0]), f"requires a single-element output list .* {size} tensors"),
        (lambda: group.gather([[one] * size], [one], elsewhere), "requires empty output on non-root"),
        (lambda: group.scatter([one], [], at_root[1]), f"requires a single-element input list .* {size} tensors"),
        (lambda: group.allreduce([one, own(rank, 3)]), "invalid tensor size at index 1"),
        (lambda: group.allreduce([one, one.int()]), "invalid tensor type at index 1"),
        (lambda: group.send([one, one], 0, 0), "requires a single-element tensor list"),
        (lambda: group.send([one], 9, 0), "there is no rank 9"),
        (lambda: group.allgather([[one]], [one]), f"invalid output tensor list .expected length {size}"),
        (lambda: distributed.all_reduce(one, op=ReduceOp.BAND), "band is not defined for float32"),
        *((lambda name=name: getattr(group, name)([]), "requires a non-empty tensor list") for name in NAMES),
    ]
    wrong = []
    for number, (call, text) in enumerate(calls):
        try:
            call()
        except InvalidCall as error:
            with pytest.raises(RuntimeError, match=text):  # code for gloo catches this kind
                raise error
        else:
            wrong.append((str(number), text))
        total = own(rank)
        distributed.all_reduce(total)
        if total.tolist() != [size * (size + 1) / 2] * 2:
            wrong.append((str(number), "unusable"))
    return wrong


NAMES = ("allreduce", "allreduce_coalesced", "broadcast", "reduce")


def test_wrong_arguments_raise_at_once_and_the_group_stays_usable(pools: Pools) -> None:
    assert pools.run(3, wrong_calls) == [[], [], []]


# -- forms of calls --------------------------------------------------------------------------------------------------


def keywords(rank: int, size: int) -> dict[str, Any]:
    """Each result of a call by the keywords of torch's own groups."""
    group, first = world(), rank == 0
    a, b, c, d, e = (own(rank) for _ in range(5))
    group.broadcast(tensor=a, root=1).wait()
    group.reduce(tensor=b, root=0, op=ReduceOp.MAX).wait()
    group.allreduce(tensors=[c], op=ReduceOp.PRODUCT).wait()
    parts = [own(9) for _ in range(size)]
    group.gather(output_tensors=parts if first else [], input_tensor=d, root=0).wait()
    group.scatter(output_tensor=e, input_tensors=[own(10 * r) for r in range(size)] if first else [], root=0).wait()
    whole, part, turned = torch.zeros(2 * size), torch.zeros(2), torch.zeros(size)
    group._allgather_base(output=whole, input=own(rank)).wait()
    group._reduce_scatter_base(outputTensor=part, inputTensor=own(rank, 2 * size)).wait()
    group.alltoall_base(
        output=turned, input=own(rank, size), output_split_sizes=[], input_split_sizes=[], timeout=None
    ).wait()
    rows = [own(9) for _ in range(size)]
    group.allgather(output_tensors=[rows], input_tensors=[own(rank)]).wait()
    group.barrier(opts=distributed.BarrierOptions()).wait()  # type: ignore[attr-defined]
    group.barrier(timeout=datetime.timedelta(seconds=20)).wait()
    if rank < 2:
        message = own(rank)
        sends = group.send(tensors=[message], dstRank=1, tag=3) if first else None
        (sends or group.recv(tensors=[message], srcRank=0, tag=3)).wait()
        a += message
    return {
        "moved": [tensor.tolist() for tensor in (a, e, whole, turned)],
        "reduced": [tensor.tolist() for tensor in (b, c, part)],
        "gathered": [[tensor.tolist() for tensor in one] for one in (parts, rows)],
    }


def test_methods_take_the_keywords_of_torchs_own_groups(pools: Pools) -> None:
    results = pools.run(2, keywords)
    for rank, got in enumerate(results):
        both = [[1.0, 1.0], [2.0, 2.0]]
        assert got["moved"] == [[3.0, 3.0], [[1.0, 11.0][rank]] * 2, [1.0, 1.0, 2.0, 2.0], [1.0, 2.0]]
        assert got["reduced"] == [[2.0, 2.0], [2.0, 2.0], [3.0, 3.0]]
        assert got["gathered"] == [both if rank == 0 else [[10.0, 10.0]] * 2, both]


def lists(rank: int, size: int) -> list[Any]:
    group = world()
    a, b = own(rank), own(rank) * 10
    group.allreduce([a, b]).wait()
    x = own(rank, 4)
    distributed_c10d.all_reduce_coalesced([x, x, x[1:3]])  # memory that is in several tensors
    y, z = own(rank), own(rank) * 10
    group.broadcast([y, z], options(distributed.BroadcastOptions, rootRank=1, rootTensor=1)).wait()  # type: ignore[attr-defined]
    return [tensor.tolist() for tensor in (a, b, x, y, z)]


def test_several_tensors_are_reduced_together_and_shared_memory_once(pools: Pools) -> None:
    assert pools.run(2, lists) == [[[33.0] * 2, [33.0] * 2, [3.0] * 4, [20.0] * 2, [20.0] * 2]] * 2


# -- handles ---------------------------------------------------------------------------------------------------------


def handles(rank: int, size: int, begun: str) -> dict[str, Any]:
    group = world()
    parts = [own(9) for _ in range(size)]
    work = distributed.all_gather(parts, own(rank), async_op=True)
    gathered = [one.tolist() for one in work.get_future().wait()]
    again = [one.tolist() for one in work.result()]
    at_root = distributed.gather(own(rank), parts if rank == 0 else None, 0, async_op=True)
    got = [one.tolist() for one in at_root.get_future().wait()]
    early = ""
    if rank == 0:
        work = group.allreduce([own(rank)])
        try:
            work.result()
        except RuntimeError as error:
            early = str(error)
        tell(begun)
    else:
        hear(begun)
        work = group.allreduce([own(rank)])
    work.wait()
    backend = group._get_backend(torch.device("cpu"))
    before = group._get_sequence_number_for_group()
    distributed.all_reduce(own(rank))
    distributed.barrier()
    distributed_c10d.monitored_barrier(timeout=20.0)
    return {
        "gathered": [gathered, again, got],
        "early": early,
        "result": [one.tolist() for one in work.result()],
        "counted": group._get_sequence_number_for_group() - before,
        "options": (backend.options.backend, backend.options.global_ranks_in_group, backend.options.group_name),
        "names": (group.name(), distributed.get_backend(), group.get_group_store() is not None),
    }


def test_handles_and_options_are_those_of_torchs_own_groups(pools: Pools) -> None:
    for rank, got in enumerate(pools.run(2, handles, token())):
        both = [[1.0, 1.0], [2.0, 2.0]]
        assert got["gathered"] == [both, both, both if rank == 0 else []]
        assert ("Work needs to be completed before calling result()" in got["early"]) == (rank == 0)
        assert got["result"] == [[3.0, 3.0]]
        assert got["counted"] == 3
        assert got["options"] == ("paceline", [], "0")
        assert got["names"] == ("custom", "paceline", True)


def functionals(rank: int, size: int) -> list[Any]:
    """Functional collectives for which torch asks a group for a backend in C++, on ours and on gloo."""
    results = []
    for group in (world(), distributed.new_group(backend="gloo")):
        name, other = group.group_name, (rank + 1) % size
        out = functional.all_gather_into_tensor_out(own(rank), size, name, out=torch.zeros(2 * size))
        tensors = [own(rank, 3), torch.zeros(3)]
        sent, received = functional.batch_p2p_ops(["isend", "irecv"], [other, other], [0, 0], tensors, name)
        results.append([functional.wait_tensor(one).tolist() for one in (out, sent, received)])
    return results


def test_functional_collectives_reach_the_group(pools: Pools) -> None:
    for rank, (ours, gloo) in enumerate(pools.run(2, functionals)):
        assert ours == gloo == [[1.0, 1.0, 2.0, 2.0], [], [2.0 - rank] * 3]


# -- timeouts --------------------------------------------------------------------------------------------------------


def too_late(rank: int, size: int, how: str, given_up: str) -> str:
    """The error of rank 0, which waits for rank 1 in vain."""
    group = distributed.new_group(timeout=datetime.timedelta(seconds=100))
    short = datetime.timedelta(milliseconds=50)
    if how == "of the group":
        distributed_c10d._set_pg_timeout(short, group)
        assert group._get_backend(torch.device("cpu")).options._timeout == short
    if rank == 1:
        hear(given_up)
        return ""
    try:
        if how == "of a call":
            group.allreduce([own(rank)], options(distributed.AllreduceOptions, timeout=short)).wait()  # type: ignore[attr-defined]
        else:
            group.allreduce([own(rank)]).wait()
    except TeamTimeout as error:
        return str(error)
    finally:
        tell(given_up)
    return "none"


@pytest.mark.parametrize("how", ["of the group", "of a call"])
def test_a_timeout_can_be_set_later_and_for_one_call(pools: Pools, how: str) -> None:
    error, _ = pools.run(2, too_late, how, token(), timeout=allowed(60.0))
    assert "for rank 1 at all_reduce" in error
    assert error.endswith("the timeout is 0.05 s")


# -- profiles --------------------------------------------------------------------------------------------------------


def profiled(rank: int, size: int) -> list[tuple[str, bool, Any]]:
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        distributed.all_reduce(own(rank))
        distributed.all_reduce(own(rank, 3), async_op=True).wait()
        distributed.all_gather([own(0) for _ in range(size)], own(rank))
        distributed.barrier()
        if rank == 0:
            distributed.send(own(rank, 5), 1)
        else:
            distributed.recv(own(rank, 5), 0)
    events = [event for event in profile.function_events or () if event.name.startswith(("c10d::", "paceline:"))]
    return sorted((event.name, bool(event.is_async), event.input_shapes) for event in events)


def test_operations_are_in_profiles_under_torchs_names(pools: Pools) -> None:
    for rank, events in enumerate(pools.run(2, profiled)):
        message = ("send", "send") if rank == 0 else ("recv_", "recv")
        assert events == sorted(
            [
                ("c10d::allgather_", False, [[2]]),
                ("c10d::allreduce_", False, [[2]]),
                ("c10d::allreduce_", False, [[3]]),
                ("c10d::barrier", False, []),
                (f"c10d::{message[0]}", False, [[5]]),
                ("paceline:all_gather", True, [[2]]),
                ("paceline:all_reduce", True, [[2]]),
                ("paceline:all_reduce", True, [[3]]),
                ("paceline:barrier", True, []),
                (f"paceline:{message[1]}", True, [[5]]),
            ]
        )


# -- torch's own tests -----------------------------------------------------------------------------------------------

CHOSEN = [
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_full_group",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_sum_async",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo",
    "test_gather_full_group",
    "test_get_backend",
    "test_monitored_barrier_gloo",
    "test_reduce_full_group_sum",
    "test_scatter_full_group",
    "test_send_recv_any_source_torch_profiler",
    "test_sparse_all_reduce_sum",
]
"""Those that tell backends apart; `benchmarks/upstream.py` runs all of them."""


def test_torchs_own_tests_pass() -> None:
    command = [sys.executable, str(UPSTREAM), "--run", "paceline", "--world", "3", "--only", ",".join(CHOSEN)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=allowed(300.0), check=True)
    results: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    assert [(name, text) for name, (outcome, text) in results.items() if outcome == "failed"] == []
    passed = {name for name, (outcome, _) in results.items() if outcome == "passed"}
    assert passed >= set(CHOSEN)
