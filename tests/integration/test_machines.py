"""Groups over several machines: all that torch.distributed can do, and each byte crosses the network once.

Most machines here are pretended: members are told that they are on different ones, so that what would cross a network
goes through gloo. In the end there are two hosts that share nothing but a cable: network namespaces.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # DistributedDataParallel loads it: here once, instead of in each member
from helpers import groups as forked
from helpers.groups import Pool
from helpers.hosts import Host, hosts
from helpers.oracle import COMPLEX, NUMERIC, OPERATORS, defined, fold, reduce_op
from helpers.primitives import CHECKS, Groups, Here, bits, check_everything, same, same_bits, topologies, whole
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from paceline import collectives
from paceline.collectives import hierarchical as machines
from paceline.collectives import process_group
from paceline.errors import UsageError

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:ComplexHalf", "ignore:Sparse invariant")
LAYOUTS = ["aabb", "aaab", "abcc", "abab", "ab"]
"""On which machine each rank is."""
LARGE = machines._LARGE // 4
"""Elements of four bytes from which on a tensor is cut."""


def settle(layout: str) -> Callable[..., Pool]:
    """Makes pools whose members believe that they are on these machines."""

    def make(size: int, backend: str, timeout: float) -> Pool:
        original = forked._member

        def member(end: Any, rank: int, *settings: Any) -> None:
            process_group.machine = lambda: layout[rank]
            original(end, rank, *settings)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forked, "_member", member)
            return Pool(size, backend, timeout)

    return make


class Machines(contextlib.AbstractContextManager["Machines"]):
    """A group for each layout."""

    def __init__(self) -> None:
        self._known: dict[str, Groups] = {}

    def run(self, layout: str, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `work(rank, size, *arguments)` returned on each member."""
        if layout not in self._known:
            self._known[layout] = Groups(10.0, settle(layout))
        return self._known[layout].run(len(layout), work, len(layout), *arguments)

    def __exit__(self, *_: object) -> None:
        for known in self._known.values():
            known.__exit__()


@pytest.fixture(scope="module")
def several() -> Iterator[Machines]:
    with Machines() as made:
        yield made


def look_around(rank: int, size: int) -> tuple[bool, int, int]:
    group: Any = distributed.group.WORLD
    return group.on_one_machine, group.group.rank, group.group.size


def test_members_share_memory_with_those_on_their_machine(several: Machines) -> None:
    assert several.run("aabb", look_around) == [(False, 0, 2), (False, 1, 2), (False, 0, 2), (False, 1, 2)]
    assert several.run("aaab", look_around) == [(False, 0, 3), (False, 1, 3), (False, 2, 3), (False, 0, 1)]
    assert several.run("abab", look_around) == [(False, 0, 2), (False, 0, 2), (False, 1, 2), (False, 1, 2)]


# -- reductions ------------------------------------------------------------------------------------------------------

Kinds = list[tuple[str, torch.dtype]]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (5, 3), (LARGE - 1,), (LARGE,), (3 * LARGE + 1,)]


def combine(rank: int, size: int, kinds: Kinds, shapes: list[tuple[int, ...]]) -> int:
    """Every reduction of torch.distributed, against what one process gets."""
    count = 0
    for number, ((name, dtype), shape) in enumerate(itertools.product(kinds, shapes)):
        op, root = reduce_op(name), number % size
        parts = [whole(number, other, shape, dtype) for other in range(size)]
        total = fold(name, parts)
        if not (dtype.is_complex and name == "product"):  # which torch refuses, before it asks the backend
            tensor = parts[rank].clone()
            distributed.all_reduce(tensor, op)
            same(tensor, total, name, dtype, shape)
        tensor = parts[rank].clone()
        distributed.reduce(tensor, root, op)
        same(tensor, total if rank == root else parts[rank], name, dtype, shape)
        tensor = torch.empty(shape, dtype=dtype)
        distributed.reduce_scatter(tensor, [parts[rank]] * size, op)
        same(tensor, total, name, dtype, shape)
        if shape:
            tensor = torch.empty(shape, dtype=dtype)
            distributed.reduce_scatter_tensor(tensor, torch.cat([parts[rank]] * size), op)
            same(tensor, total, name, dtype, shape)
        count += 1
    return count


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_any_size_combine_over_machines(several: Machines, layout: str) -> None:
    assert several.run(layout, combine, [("sum", torch.float32), ("avg", torch.int32)], SHAPES) == [14] * len(layout)


@pytest.mark.parametrize("layout", ["aabb", "aaab"])
def test_every_operator_combines_the_values_of_all_machines(several: Machines, layout: str) -> None:
    kinds = [(name, torch.int64 if name in ("band", "bor", "bxor") else torch.float32) for name in OPERATORS]
    assert all(several.run(layout, combine, kinds, [(5, 3), (LARGE + 1,)]))


@pytest.mark.parametrize(("layout", "names"), [("aabb", ["sum", "max"]), ("aaab", ["avg", "bxor"])])
def test_every_dtype_crosses_machines(several: Machines, layout: str, names: list[str]) -> None:
    # The one that is left out has no sign.
    dtypes = [dtype for dtype in NUMERIC if dtype is not torch.float8_e8m0fnu]
    kinds = [(name, dtype) for name in names for dtype in dtypes if defined(name, dtype)]
    assert all(several.run(layout, combine, kinds, [(7,), (LARGE + 3,)]))


def lie_elsewhere(rank: int, size: int) -> None:
    """Tensors that are not in one piece, and tensors in shared memory."""
    for count in (6, 2 * LARGE):
        parts = [whole(count, other, (count, 2)) for other in range(size)]
        apart = parts[rank].repeat_interleave(2, 1)[:, ::2]
        assert not apart.is_contiguous()
        distributed.all_reduce(apart)
        same(apart, fold("sum", parts))
        turned = parts[rank].t().contiguous().t()
        distributed.broadcast(turned, 1)
        same(turned, parts[1])
        shared = collectives.empty(count, 2)
        shared.copy_(parts[rank])
        distributed.all_reduce(shared, distributed.ReduceOp.MAX)
        same(shared, fold("max", parts))
        outs = [torch.empty(2, count).t() for _ in range(size)]
        distributed.all_gather(outs, parts[rank].t().contiguous().t())
        for out, part in zip(outs, parts, strict=True):
            same(out, part)


@pytest.mark.parametrize("layout", ["aabb", "abcc"])
def test_tensors_may_lie_anywhere(several: Machines, layout: str) -> None:
    several.run(layout, lie_elsewhere)


def change_signs(rank: int, size: int) -> None:
    for count in (3, 2 * LARGE):
        parts = [whole(count, other, (count,), torch.complex64) for other in range(size)]
        lazily = parts[rank].clone().conj().imag
        assert lazily.is_neg()
        distributed.all_reduce(lazily)
        same(lazily.resolve_neg(), -fold("sum", [part.imag for part in parts]))
        lazily = parts[rank].clone().conj().imag
        distributed.broadcast(lazily, 1)
        same(lazily.resolve_neg(), -parts[1].imag)


@pytest.mark.parametrize("layout", ["aabb", "aaab"])
def test_signs_that_torch_has_not_changed_yet_are_changed(several: Machines, layout: str) -> None:
    several.run(layout, change_signs)


def add_sparse(rank: int, size: int) -> torch.Tensor:
    tensor = torch.sparse_coo_tensor(torch.tensor([[rank, 5]]), torch.tensor([1.0, rank + 1.0]), (6,)).coalesce()
    distributed.all_reduce(tensor)
    return tensor.to_dense()


def test_sparse_tensors_are_added_up_over_machines(several: Machines) -> None:
    for result in several.run("aabb", add_sparse):
        assert result.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0, 10.0]


# -- moving ----------------------------------------------------------------------------------------------------------


def move(rank: int, size: int, dtypes: list[torch.dtype], group: Any = None) -> int:
    """Every other collective of torch.distributed; ranks are those of the group."""
    count = 0

    def at(other: int) -> int:
        return distributed.get_global_rank(group, other) if group is not None else other

    for number, (dtype, shape) in enumerate(itertools.product(dtypes, [(), (0, 2), (3, 2), (2 * LARGE, 1)])):
        root = number % size
        parts = [bits(number, other, shape, dtype) for other in range(size)]
        tensor = parts[rank].clone()
        distributed.broadcast(tensor, at(root), group=group)
        same_bits(tensor, parts[root])
        outs = [torch.empty(shape, dtype=dtype) for _ in range(size)]
        distributed.all_gather(outs, parts[rank], group=group)
        for out, part in zip(outs, parts, strict=True):
            same_bits(out, part)
        outs = [torch.empty(shape, dtype=dtype) for _ in range(size)]
        distributed.gather(parts[rank], outs if rank == root else None, at(root), group=group)
        if rank == root:
            for out, part in zip(outs, parts, strict=True):
                same_bits(out, part)
        out = torch.empty(shape, dtype=dtype)
        distributed.scatter(out, parts if rank == root else None, at(root), group=group)
        same_bits(out, parts[rank])
        if shape:
            rows = torch.empty((size * shape[0], *shape[1:]), dtype=dtype)
            distributed.all_gather_into_tensor(rows, parts[rank], group=group)
            for out, part in zip(rows.chunk(size) if len(rows) else [rows] * size, parts, strict=True):
                same_bits(out, part)
        # To each member another number of rows.
        gives = [bits(number + taker, rank, (rank + taker, 2), dtype) for taker in range(size)]
        takes = [bits(number + rank, giver, (rank + giver, 2), dtype) for giver in range(size)]
        outs = [torch.empty_like(part) for part in takes]
        distributed.all_to_all(outs, gives, group=group)
        for out, part in zip(outs, takes, strict=True):
            same_bits(out, part)
        joined = torch.empty((sum(map(len, takes)), 2), dtype=dtype)
        source = _joined(gives)
        distributed.all_to_all_single(joined, source, [*map(len, takes)], [*map(len, gives)], group=group)
        same_bits(joined, _joined(takes))
        count += 1
    distributed.barrier(group=group)
    return count


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """As torch.cat, for all dtypes."""
    content = torch.cat([part.reshape(-1).view(torch.uint8) for part in parts if part.numel()])
    return content.view(parts[0].dtype).view(-1, 2)


MOVED = [torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex128, torch.uint16, torch.float8_e5m2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_moved_between_machines_arrives_bit_for_bit(several: Machines, layout: str) -> None:
    assert several.run(layout, move, MOVED) == [4 * len(MOVED)] * len(layout)


def tell(rank: int, size: int) -> list[Any]:
    """Objects, which torch sends as bytes of lengths that it sends before."""
    everybody: list[Any] = [None] * size
    distributed.all_gather_object(everybody, {"rank": rank, "text": "x" * 1000 * rank})
    told = [f"from {rank}", rank]
    distributed.broadcast_object_list(told, 1)
    gathered: list[Any] | None = [None] * size if rank == 2 else None
    distributed.gather_object(("at", rank), gathered, 2)
    received: list[Any] = [None]
    distributed.scatter_object_list(received, [f"for {other}" for other in range(size)] if rank == 0 else None, 0)
    return [[len(item["text"]) for item in everybody], told, gathered, received]


@pytest.mark.parametrize("layout", ["aabb", "abcc"])
def test_objects_cross_machines(several: Machines, layout: str) -> None:
    for rank, (lengths, told, gathered, received) in enumerate(several.run(layout, tell)):
        assert lengths == [0, 1000, 2000, 3000]
        assert told == ["from 1", 1]
        assert gathered == ([("at", other) for other in range(4)] if rank == 2 else None)
        assert received == [f"for {rank}"]


# -- later -----------------------------------------------------------------------------------------------------------


def begin_many(rank: int, size: int) -> int:
    """Many operations under way at once, waited for in another order, or by their futures."""
    tensors, works, expected = [], [], []
    for number in range(20):
        shape = (3 * LARGE,) if number % 5 == 0 else (number,)
        parts = [whole(number, other, shape) for other in range(size)]
        tensor = parts[rank].clone()
        tensors.append(tensor)
        if number % 2:
            works.append(distributed.all_reduce(tensor, async_op=True))
            expected.append(fold("sum", parts))
        else:
            works.append(distributed.broadcast(tensor, number % size, async_op=True))
            expected.append(parts[number % size])
    outs = [torch.empty(5) for _ in range(size)]
    gathering = distributed.all_gather(outs, torch.full((5,), float(rank)), async_op=True)
    now = torch.ones(1)
    distributed.all_reduce(now)  # is done after all of those
    assert float(now) == size
    assert gathering.is_completed()
    for number, work in reversed(list(enumerate(works))):
        if number % 3:
            work.wait()
        else:
            work.get_future().wait()
        assert work.is_completed()
        assert work.is_success()
    for tensor, right in zip(tensors, expected, strict=True):
        same(tensor, right)
    gathering.wait()
    assert [float(out[4]) for out in outs] == list(range(size))
    return len(works)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_operations_may_be_under_way(several: Machines, layout: str) -> None:
    assert several.run(layout, begin_many) == [20] * len(layout)


# -- messages --------------------------------------------------------------------------------------------------------


def send_to_all(rank: int, size: int) -> int:
    """Everybody to everybody else, in tags that are taken in another order."""
    count = 0
    for number, (dtype, shape) in enumerate(itertools.product([*MOVED, *COMPLEX], [(), (0,), (4, 3), (2 * LARGE,)])):
        sent = [
            distributed.isend(bits(number + tag, 10 * rank + to, shape, dtype), to, tag=tag)
            for to in range(size)
            for tag in (5, 0)
            if to != rank
        ]
        for tag in (0, 5):
            for source in reversed(range(size)):
                if source != rank:
                    tensor = torch.empty(shape, dtype=dtype)
                    assert distributed.recv(tensor, source, tag=tag) == source
                    same_bits(tensor, bits(number + tag, 10 * source + rank, shape, dtype), dtype, shape)
                    count += 1
        for work in sent:
            work.wait()
    return count


@pytest.mark.parametrize("layout", ["aabb", "aaab", "abcc"])
def test_messages_with_tags_find_their_receiver(several: Machines, layout: str) -> None:
    assert all(several.run(layout, send_to_all))


def receive_from_anybody(rank: int, size: int) -> list[Any]:
    if rank:
        sent = [distributed.isend(torch.full((3,), value * rank), 0, tag=tag) for tag, value in ((2, 1.0), (9, 10.0))]
        for work in sent:
            work.wait()
        return []
    seen = []
    for tag in (9, 2):
        for _ in range(size - 1):
            tensor = torch.empty(3, 2)[:, 0] if tag == 9 else torch.empty(3)
            source = distributed.recv(tensor, tag=tag)
            seen.append((tag, source, float(tensor[0])))
    return sorted(seen)


@pytest.mark.parametrize("layout", ["aabb", "aaab", "abcc"])
def test_a_message_from_anybody_tells_from_whom(several: Machines, layout: str) -> None:
    seen = several.run(layout, receive_from_anybody)[0]
    assert seen == [(2, rank, float(rank)) for rank in (1, 2, 3)] + [(9, rank, 10.0 * rank) for rank in (1, 2, 3)]


def receive_later(rank: int, size: int) -> None:
    """Receives that were begun before anything was sent, in batches, and into tensors that are not in one piece."""
    after, before = (rank + 1) % size, (rank - 1) % size
    boxes = [torch.zeros(4, 2)[:, 0] for _ in range(3)]
    awaited = [distributed.irecv(box, before, tag=tag) for tag, box in enumerate(boxes)]
    tensor = torch.ones(2 * LARGE)
    distributed.all_reduce(tensor)  # collectives go on meanwhile
    assert float(tensor[-1]) == size
    sent = [distributed.isend(torch.full((4, 3), 10.0 * rank + tag)[:, 1], after, tag=tag) for tag in (2, 0, 1)]
    for work in (*awaited, *sent):
        work.wait()
    assert [box.tolist() for box in boxes] == [[10.0 * before + tag] * 4 for tag in range(3)]
    box = torch.empty(LARGE)
    batch = [
        distributed.P2POp(distributed.isend, torch.full((LARGE,), float(rank)), after),
        distributed.P2POp(distributed.irecv, box, before),
    ]
    for work in distributed.batch_isend_irecv(batch):
        work.wait()
    assert float(box[-1]) == before


@pytest.mark.parametrize("layout", ["aabb", "abab", "ab"])
def test_receives_may_be_begun_before_anything_is_sent(several: Machines, layout: str) -> None:
    several.run(layout, receive_later)


def send_to_itself(rank: int, size: int) -> float:
    sending = distributed.isend(torch.full((3,), rank + 1.0), rank)
    tensor = torch.empty(3)
    distributed.recv(tensor, rank)
    sending.wait()
    return float(tensor[0])


def test_a_member_may_send_to_itself(several: Machines) -> None:
    assert several.run("aabb", send_to_itself) == [1.0, 2.0, 3.0, 4.0]


def meet_under_watch(rank: int, size: int) -> float:
    distributed.monitored_barrier(timeout=datetime.timedelta(seconds=5))
    tensor = torch.ones(1)
    distributed.all_reduce(tensor)
    return float(tensor)


def test_a_monitored_barrier_goes_over_machines(several: Machines) -> None:
    assert several.run("aabb", meet_under_watch) == [4.0] * 4


# -- parts of the group ----------------------------------------------------------------------------------------------


def in_subgroups(rank: int, size: int) -> list[Any]:
    """On one machine, over two, over both but not all; at the same time where they do not overlap."""
    told = []
    for ranks in ([0, 1], [2, 3], [0, 2], [1, 2, 3], [3, 0]):
        group: Any = distributed.new_group(ranks)
        if rank not in ranks:
            continue
        own = distributed.get_group_rank(group, rank)
        move(own, len(ranks), [torch.float32], group)
        parts = [whole(3, other, (3 * LARGE,)) for other in range(len(ranks))]
        tensor = parts[own].clone()
        distributed.all_reduce(tensor, group=group)
        same(tensor, fold("sum", parts))
        told.append((ranks, group.on_one_machine))
    tensor = torch.ones(1)
    distributed.all_reduce(tensor)
    assert float(tensor) == size
    return told


def test_parts_of_the_group_are_on_one_machine_or_on_several(several: Machines) -> None:
    results = several.run("aabb", in_subgroups)
    told = {tuple(ranks): alone for result in results for ranks, alone in result}
    assert told == {(0, 1): True, (2, 3): True, (0, 2): False, (1, 2, 3): False, (3, 0): False}


# -- paceline.collectives and torch on it ----------------------------------------------------------------------------


def check(rank: int, size: int, operation: str) -> int:
    several = topologies(operation, shared=False)[:3]
    return sum(CHECKS[operation](Here(rank, size, topology, brief=True)) for topology in several)


@pytest.mark.parametrize("operation", CHECKS)
def test_topologies_span_machines(several: Machines, operation: str) -> None:
    assert all(several.run("aab", check, operation))


def use_collectives(rank: int, size: int) -> tuple[int, str]:
    with pytest.raises(UsageError) as caught:
        collectives.all_reduce(torch.ones(1), topology="shared")
    inside = distributed.new_group([0, 1])
    if rank < 2:  # these share memory
        assert float(collectives.all_reduce(torch.ones(1), topology="shared", group=inside)) == 2.0
    return check_everything(rank, size), str(caught.value)


def test_every_primitive_spans_machines(several: Machines) -> None:
    for count, text in several.run("aab", use_collectives):
        assert count > 50
        assert text == "the topology shared needs a group of the backend paceline, on one machine"


def backward(rank: int, size: int) -> list[float]:
    x = torch.tensor([rank + 1.0, 2.0], requires_grad=True)
    total = collectives.all_reduce(x, "product")
    parts = collectives.all_gather(x)
    ((total * (rank + 1)).sum() + torch.stack(parts).sum()).backward()
    return x.grad.tolist()


def test_gradients_cross_machines(several: Machines) -> None:
    expected = [[6.0 * 6.0 / (rank + 1) + 3.0, 6.0 * 4.0 + 3.0] for rank in range(3)]
    assert several.run("aab", backward) == expected


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 120), nn.Tanh(), nn.Linear(120, 1)).double()


def train(module: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        (module(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return [value.detach() for value in module.parameters()]


def train_ddp(rank: int, size: int) -> list[torch.Tensor]:
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return train(DistributedDataParallel(model()), inputs.chunk(size)[rank])


@pytest.mark.parametrize("layout", ["aabb", "abcc"])
def test_ddp_over_machines_learns_what_one_process_learns(several: Machines, layout: str) -> None:
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    alone = train(model(), inputs)
    for result in several.run(layout, train_ddp):
        torch.testing.assert_close(result, alone)


# -- two hosts that share nothing but a cable ------------------------------------------------------------------------

SIZE = 16 * 2**20
"""Bytes of the tensor whose way is watched."""


@pytest.fixture
def two() -> Iterator[list[Host]]:
    if os.geteuid() != 0:
        reason = "only root can make network namespaces, which stand for hosts here"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason}: run this job as root")
        pytest.skip(reason)
    with hosts(2) as made:
        yield made


def crossed() -> list[int]:
    """Bytes that this host has sent and received so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (words,) = [line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:")]
    return [int(words[8]), int(words[0])]


def on_a_host(rank: int) -> dict[str, Any]:
    """What each process does there."""
    with pytest.raises(UsageError) as caught:
        collectives.barrier()
    distributed.init_process_group("paceline", timeout=datetime.timedelta(seconds=30))
    group: Any = distributed.group.WORLD
    counts = [
        combine(rank, 4, [("sum", torch.float32), ("max", torch.int64), ("avg", torch.bfloat16)], SHAPES),
        move(rank, 4, [torch.float32, torch.bool]),
        begin_many(rank, 4),
        send_to_all(rank, 4),
        check_everything(rank, 4),
    ]
    tensor = torch.full((SIZE // 4,), rank + 1.0)
    each_time = []
    for _ in range(2):
        distributed.barrier()
        before = crossed()
        distributed.barrier()
        distributed.all_reduce(tensor, distributed.ReduceOp.AVG)
        distributed.barrier()
        each_time.append([late - early for early, late in zip(before, crossed(), strict=True)])
    alike = bool((tensor == 2.5).all())
    distributed.barrier()
    distributed.destroy_process_group()
    return {
        "refused": str(caught.value),
        "on_one_machine": group.on_one_machine,
        "beside": group.group.size,
        "counts": counts,
        "crossed": each_time,
        "alike": alike,
    }


def member_on(host: Host, environment: dict[str, str], end: Any) -> None:
    """What was forked moves there."""
    host.enter()
    os.environ.update(environment)
    try:
        end.send(on_a_host(int(environment["RANK"])))
    except BaseException:
        end.send(traceback.format_exc())


def test_between_two_hosts_each_byte_crosses_the_cable_once(two: list[Host]) -> None:
    context = multiprocessing.get_context("fork")
    members = []
    for rank in range(4):
        place = {"RANK": rank, "LOCAL_RANK": rank % 2, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 29400}
        environment = {name: str(value) for name, value in place.items()}
        environment |= {"MASTER_ADDR": two[0].address, "GLOO_SOCKET_IFNAME": "eth0"}
        ours, theirs = context.Pipe(duplex=False)
        member = context.Process(target=member_on, args=(two[rank // 2], environment, theirs), daemon=True)
        member.start()
        members.append((member, ours))
    results = []
    for rank, (_, ours) in enumerate(members):
        assert ours.poll(100.0), f"rank {rank} said nothing"
        results.append(ours.recv())
        assert isinstance(results[-1], dict), results[-1]
    for member, _ in members:
        member.join(30.0)
        assert member.exitcode == 0
    for result in results:
        assert "this team is on 2 machines" in result["refused"]
        assert not result["on_one_machine"]
        assert result["beside"] == 2
        assert all(result["counts"])
        assert result["alike"]
        for sent, received in result["crossed"]:
            # Of M = 2 machines each sends 2(M−1)/M·S = S; besides there are headers, and a few words at barriers.
            assert SIZE <= sent <= 1.05 * SIZE
            assert SIZE <= received <= 1.05 * SIZE
