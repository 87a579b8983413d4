"""Programs written for torch.distributed run on Paceline with the backend's name as the only change: the same numbers.

A program is a function of a rank, as torch's tutorials would write it. It runs on gloo and on Paceline, and all that it
returns must be equal. Two ranks add up in one order only, so what they return is equal to the bit; four calculate in
double precision, where another order makes a difference that is far smaller than any fault.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional as differentiable
from helpers.forks import done
from helpers.groups import Pool
from helpers.support import TORCHRUN
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

Program = Callable[..., Any]
EXACT = {"rtol": 0.0, "atol": 0.0}
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
HALF = {"rtol": 0.01, "atol": 0.002}
"""Of sums in half precision."""


class Backends:
    """A group on gloo and one on Paceline of each size, and what programs return on both."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, int], Pool] = {}

    def __call__(self, program: Program, size: int, *arguments: Any, tolerance: dict[str, float] = CLOSE) -> list[Any]:
        """What each rank returned on Paceline, once that is known to equal what it returned on gloo."""
        expected, result = (self.run(backend, program, size, *arguments) for backend in ("gloo", "paceline"))
        torch.testing.assert_close(result, expected, **(EXACT if size == 2 else tolerance))
        return result

    def run(self, backend: str, program: Program, size: int, *arguments: Any) -> list[Any]:
        if (backend, size) not in self._pools:
            self._pools[backend, size] = Pool(size, backend)
        try:
            return self._pools[backend, size].run(in_precision, size, program, *arguments, timeout=40.0)
        except BaseException as error:
            error.add_note(f"This was on {backend}.")
            self._pools.pop((backend, size)).close()  # its ranks may be at different places
            raise

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="module")
def same() -> Iterator[Backends]:
    # What torch loads when it first traces or compiles is loaded once, here, and not by every rank that is forked.
    torch.export.export(nn.Linear(2, 2), (torch.zeros(3, 2),), strict=False)
    torch.compile(nn.Linear(2, 2), backend="aot_eager")(torch.zeros(3, 2)).sum().backward()
    backends = Backends()
    yield backends
    backends.close()


def in_precision(rank: int, size: int, program: Program, *arguments: Any) -> Any:
    torch.set_default_dtype(torch.float32 if size == 2 else torch.float64)
    return program(rank, *arguments)


def samples(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(count: int, classes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(seed))


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers."""
    return {name.removeprefix("module."): value.detach().clone() for name, value in model.state_dict().items()}


def assert_all_the_same(results: list[Any]) -> None:
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], **EXACT)


# -- DistributedDataParallel -------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))


def wide_mlp() -> nn.Module:
    """Of three megabytes, so that ranks read each other's memory."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 800), nn.Tanh(), nn.Linear(800, 900), nn.Tanh(), nn.Linear(900, 5))


def convnet() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 5)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(160, 5),
    )


class Branches(nn.Module):
    """Which layers are used depends on the rank and on the step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(20, 32)
        self.branches = nn.ModuleList(nn.Linear(32, 5) for _ in range(3))
        self.calls = dist.get_rank()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.branches[self.calls % 2](torch.relu(self.trunk(x)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        seed = 100 * step + rank
        loss = cross_entropy(model(samples(16, 20, seed=seed)), labels(16, 5, seed))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def data_parallel(rank: int, build: Callable[[], nn.Module], options: dict[str, Any]) -> Any:
    if "device_mesh" in options:
        options = {"device_mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    model = DistributedDataParallel(build(), **options)
    losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rank)
    return losses, weights(model)


@pytest.mark.parametrize(("size", "build"), [(2, convnet), (4, mlp)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": 0.005},
        {"bucket_cap_mb": 0.005, "gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.005, "static_graph": True},
        {"broadcast_buffers": False},
        {"device_mesh": True},
    ],
    ids=lambda options: ",".join(options) or "defaults",
)
def test_data_parallel_training_is_the_same(
    same: Backends, size: int, build: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    results = same(data_parallel, size, build, options)
    names = [name for name, _ in build().named_parameters()]
    trained = [[value for name, value in values.items() if name in names] for _, values in results]
    assert_all_the_same(trained)
    assert results[0][0] != results[1][0]


@pytest.mark.parametrize(
    ("size", "options"), [(2, {"gradient_as_bucket_view": True}), (4, {})], ids=["2-views", "4-defaults"]
)
def test_large_gradients_are_the_same(same: Backends, size: int, options: dict[str, Any]) -> None:
    results = same(data_parallel, size, wide_mlp, options)
    assert_all_the_same([values for _, values in results])


@pytest.mark.parametrize("size", [2, 4])
def test_layers_may_be_used_by_some_ranks_only(same: Backends, size: int) -> None:
    options = {"find_unused_parameters": True, "bucket_cap_mb": 0.001}
    results = same(data_parallel, size, Branches, options)
    assert_all_the_same([values for _, values in results])


def accumulating(rank: int) -> Any:
    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.005)
    optimizer = torch.optim.Adam(model.parameters())
    between = []
    for step in range(12):
        seed = 100 * step + rank
        last = step % 4 == 3
        with contextlib.nullcontext() if last else model.no_sync():
            cross_entropy(model(samples(8, 20, seed=seed)), labels(8, 5, seed)).backward()
        between.append([parameter.grad.clone() for parameter in model.parameters()])
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return between, weights(model)


def test_gradients_accumulate_without_synchronization(same: Backends) -> None:
    results = same(accumulating, 2)
    between = [result[0] for result in results]
    assert not torch.equal(between[0][2][0], between[1][2][0])
    assert_all_the_same([gradients[3] for gradients in between])
    assert_all_the_same([values for _, values in results])


def hooked(rank: int, hook: str) -> Any:
    # What follows an operation there waits for another one; gloo's two threads are too few for that in many buckets.
    buckets = {} if hook == "powerSGD_hook" else {"bucket_cap_mb": 0.005}
    model = DistributedDataParallel(mlp(), **buckets)
    if hook == "powerSGD_hook":
        state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1)
        model.register_comm_hook(state, powerSGD_hook)
    elif hook == "fp16_compress_wrapper":
        model.register_comm_hook(None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
    elif hook == "own":
        model.register_comm_hook(None, own_hook)
    elif hook == "builtin":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    else:
        model.register_comm_hook(None, getattr(default_hooks, hook))
    losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, steps=6)
    return losses, weights(model)


def own_hook(_, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are text
    """An average with what torch's tutorial on hooks uses: an operation's future, and what follows it."""
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] * 1.0)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "hook",
    [
        "allreduce_hook",
        "fp16_compress_hook",
        "fp16_compress_wrapper",
        "own",
        "builtin",
        "powerSGD_hook",
    ],
)
def test_communication_hooks_are_the_same(same: Backends, hook: str, size: int) -> None:
    results = same(hooked, size, hook, tolerance=HALF if "16" in hook else CLOSE)
    assert_all_the_same([values for _, values in results])


class Bag(nn.Module):
    """An embedding whose gradient has entries for the words of the batch only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(200, 12, sparse=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(x).mean(1))


def sparse(rank: int) -> Any:
    model = DistributedDataParallel(Bag())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    entries = []
    for step in range(4):
        seed = 100 * step + rank
        optimizer.zero_grad()
        words = labels(32, 200, seed).view(8, 4)
        cross_entropy(model(words), labels(8, 5, seed)).backward()
        entries.append(model.module.words.weight.grad.coalesce()._nnz())
        optimizer.step()
    return entries, weights(model)


@pytest.mark.parametrize("size", [2, 4])
def test_sparse_gradients_of_embeddings_are_the_same(same: Backends, size: int) -> None:
    results = same(sparse, size)
    assert all(32 < entries < 200 for entries in results[0][0])
    assert_all_the_same(results)


def uneven(rank: int, sharded: bool) -> Any:
    """Ranks have from 3 to 9 batches; those who have none left still take part."""
    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.005)
    joinables: list[Any] = [model]
    if sharded:
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        joinables.append(optimizer)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 0
    with Join(joinables) if sharded else model.join():
        for step in range(3 + 2 * rank):
            seed = 100 * step + rank
            optimizer.zero_grad()
            cross_entropy(model(samples(8, 20, seed=seed)), labels(8, 5, seed)).backward()
            optimizer.step()
            steps += 1
    return steps, weights(model)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_may_run_out_of_batches(same: Backends, size: int, sharded: bool) -> None:
    results = same(uneven, size, sharded)
    assert [steps for steps, _ in results] == [3, 5, 7, 9][:size]
    assert_all_the_same([values for _, values in results])


# -- fully_shard -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """One layer of a transformer; how many heads there are follows from the width of its projections."""

    def __init__(self, width: int = 32, head: int = 8) -> None:
        super().__init__()
        self.head = head
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    def __init__(self, layers: int = 2, width: int = 32, words: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def sentences(seed: int, count: int = 4, length: int = 17) -> tuple[torch.Tensor, torch.Tensor]:
    text = labels(count * length, 64, seed).view(count, length)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, steps: int = 2, clip: bool = True) -> Any:
    """The losses, and the norms of the gradients before they were clipped."""
    losses, norms = [], []
    for step in range(steps):
        words, following = sentences(1000 * step + seed)
        optimizer.zero_grad()
        loss = cross_entropy(model(words).flatten(0, 1).to(torch.get_default_dtype()), following.flatten())
        loss.backward()
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def whole(model: nn.Module) -> Any:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def shard(model: Transformer, **options: Any) -> Transformer:
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def fully_sharded(rank: int, options: dict[str, Any], width: int = 32, shape: tuple[int, ...] | None = None) -> Any:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")) if shape else None
    model = shard(Transformer(width=width), mesh=mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # Some virtual machines announce AMX and then cannot run it: torch dies of that in bf16.
    with torch.backends.mkldnn.flags(enabled="mp_policy" not in options):
        history = learn(model, optimizer, rank)
    return *history, [p.to_local().detach().clone() for p in model.parameters()], whole(model)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ALL_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("size", "options", "width"),
    [
        (2, {}, 32),
        (2, {}, 192),
        (4, {}, 32),
        (2, {"reshard_after_forward": False}, 32),
        (2, {"mp_policy": BF16}, 32),
        (2, {"mp_policy": ALL_BF16}, 32),
    ],
    ids=["2", "2-wide", "4", "2-kept", "2-bf16", "2-all-bf16"],
)
def test_fully_sharded_training_is_the_same(same: Backends, size: int, options: dict[str, Any], width: int) -> None:
    results = same(fully_sharded, size, options, width)
    assert results[0][0] != results[1][0]
    assert_all_the_same([(norms, values) for _, norms, _, values in results])


def test_sharded_and_replicated_training_is_the_same(same: Backends) -> None:
    same(fully_sharded, 4, {}, 32, (2, 2))


def fully_sharded_before(rank: int) -> Any:
    """The first generation of fully sharded training."""
    model = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
    losses = train(model, torch.optim.AdamW(model.parameters(), lr=0.01), rank)
    with FullyShardedDataParallel.summon_full_params(model):
        return losses, weights(model)


@pytest.mark.parametrize("size", [2, 4])
def test_the_former_fully_sharded_training_is_the_same(same: Backends, size: int) -> None:
    results = same(fully_sharded_before, size)
    assert_all_the_same([values for _, values in results])


def accumulating_sharded(rank: int) -> Any:
    model = shard(Transformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        words, following = sentences(1000 * step + rank)
        model.set_requires_gradient_sync(step % 2 == 1)
        cross_entropy(model(words).flatten(0, 1), following.flatten()).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return whole(model)


def test_sharded_gradients_accumulate_without_synchronization(same: Backends) -> None:
    same(accumulating_sharded, 2)


# -- DTensor and tensor parallelism ------------------------------------------------------------------------------------


def spread(rank: int) -> list[torch.Tensor]:
    """Every way from one placement to another, and a product of what is spread."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = samples(6, 10)
    results = []
    for source in (Replicate(), Shard(0), Shard(1)):
        for target in (Replicate(), Shard(0), Shard(1)):
            moved = distribute_tensor(tensor, mesh, [source]).redistribute(mesh, [target])
            results += [moved.to_local().clone(), moved.full_tensor()]
    for target in (Replicate(), Shard(0), Shard(1)):
        partial = DTensor.from_local(samples(6, 10, seed=rank), mesh, [Partial()])
        results.append(partial.redistribute(mesh, [target]).to_local().clone())
    for op in ("avg", "max", "min"):
        results.append(DTensor.from_local(samples(6, 10, seed=rank), mesh, [Partial(op)]).full_tensor())
    product = distribute_tensor(tensor, mesh, [Shard(0)]) @ distribute_tensor(tensor.T.contiguous(), mesh, [Shard(1)])
    return [*results, product.full_tensor(), distribute_tensor(tensor, mesh, [Shard(1)]).std().full_tensor()]


@pytest.mark.parametrize("size", [2, 4])
def test_tensors_move_between_placements(same: Backends, size: int) -> None:
    same(spread, size)


def plan_of_a_block(sequence: bool) -> dict[str, Any]:
    """What is not spread over ranks by its columns or rows, is either on all of them or spread by its words."""
    outside = Shard(1) if sequence else Replicate()
    return {
        **{name: ColwiseParallel(input_layouts=outside) for name in ("q", "k", "v", "up")},
        **{name: RowwiseParallel(output_layouts=outside) for name in ("o", "down")},
        **({"norm_1": SequenceParallel(), "norm_2": SequenceParallel()} if sequence else {}),
    }


def parallel(model: Transformer, mesh: Any, sequence: bool, vocabulary: bool = False) -> Transformer:
    if sequence:
        plan = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if vocabulary else Replicate(),
                use_local_output=not vocabulary,
            ),
        }
    else:
        plan = {"output": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh, plan)
    for layer in model.layers:
        parallelize_module(layer, mesh, plan_of_a_block(sequence))
    return model


def tensor_parallel(rank: int, sequence: bool) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallel(Transformer(layers=1), mesh, sequence)
    return *learn(model, torch.optim.AdamW(model.parameters(), lr=0.01), seed=0, clip=sequence), whole(model)


@pytest.mark.parametrize(("size", "sequence"), [(2, False), (4, True)])
def test_tensor_parallel_training_is_the_same(same: Backends, size: int, sequence: bool) -> None:
    results = same(tensor_parallel, size, sequence)
    assert_all_the_same(results)


def vocabulary_parallel(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallel(Transformer(layers=1), mesh, sequence=True, vocabulary=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        words, following = sentences(step)
        optimizer.zero_grad()
        with loss_parallel():
            loss = cross_entropy(model(words).flatten(0, 1), following.flatten())
            loss.backward()
        optimizer.step()
        losses.append(float(loss.full_tensor()))
    return losses, whole(model)


def test_a_loss_over_a_spread_vocabulary_is_the_same(same: Backends) -> None:
    assert_all_the_same(same(vocabulary_parallel, 2))


def sharded_and_parallel(rank: int, sequence: bool) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = shard(parallel(Transformer(layers=1), mesh["tensor"], sequence), mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return *learn(model, optimizer, seed=mesh["data"].get_local_rank(), clip=sequence), whole(model)


@pytest.mark.parametrize("sequence", [False, True])
def test_sharded_tensor_parallel_training_is_the_same(same: Backends, sequence: bool) -> None:
    """In all groups of the mesh there are two ranks, but what is spread over both is added up over four."""
    same(sharded_and_parallel, 4, sequence)


# -- pipelines ---------------------------------------------------------------------------------------------------------


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24)) for _ in range(count)]


def piped(rank: int, schedule: Any, per_rank: int, v_shaped: bool, rows: int) -> Any:
    size = dist.get_world_size()
    count = size * per_rank
    modules = layers(count)
    own = [rank, count - 1 - rank] if v_shaped else list(range(rank, count, size))
    stages = [PipelineStage(modules[index], index, count, torch.device("cpu")) for index in own]
    optimizer = torch.optim.SGD([p for index in own for p in modules[index].parameters()], lr=0.1)
    runner = schedule(stages if per_rank > 1 else stages[0], 8, loss_fn=mse_loss)
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        given = [samples(rows, 24, seed=step)] if 0 in own else []
        if count - 1 in own:
            part: list[torch.Tensor] = []
            output = runner.step(*given, target=samples(rows, 24, seed=1000 + step), losses=part)
            losses += [output.detach(), torch.stack(part)]
        else:
            runner.step(*given)
        optimizer.step()
    return losses, [weights(modules[index]) for index in own]


@pytest.mark.parametrize(
    ("size", "schedule", "per_rank", "v_shaped", "rows"),
    [
        (2, ScheduleGPipe, 1, False, 32),
        (4, ScheduleGPipe, 1, False, 12000),
        (4, Schedule1F1B, 1, False, 32),
        (2, Schedule1F1B, 1, False, 12000),
        (2, ScheduleLoopedBFS, 2, False, 32),
        (4, ScheduleInterleaved1F1B, 2, False, 32),
        (2, ScheduleInterleavedZeroBubble, 2, False, 32),
        (4, ScheduleZBVZeroBubble, 2, True, 32),
        (2, ScheduleDualPipeV, 2, True, 32),
        (4, ScheduleDualPipeV, 2, True, 32),
    ],
)
def test_a_pipeline_is_the_same(
    same: Backends, size: int, schedule: Any, per_rank: int, v_shaped: bool, rows: int
) -> None:
    results = same(piped, size, schedule, per_rank, v_shaped, rows)
    assert sum(len(losses) for losses, _ in results) == 4


def traced(rank: int) -> Any:
    count = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(count)))
    cut = {str(index): SplitPoint.BEGINNING for index in range(1, count)}
    pipe = pipeline(model, mb_args=(samples(8, 24),), split_spec=cut)
    stage = pipe.build_stage(rank, torch.device("cpu"))
    runner = ScheduleGPipe(stage, 4, loss_fn=mse_loss)
    losses: list[torch.Tensor] = []
    if rank == 0:
        runner.step(samples(32, 24))
    elif rank == count - 1:
        runner.step(target=samples(32, 24, seed=1), losses=losses)
    else:
        runner.step()
    return losses, [parameter.grad for parameter in stage.submod.parameters()]


@pytest.mark.parametrize("size", [2, 4])
def test_a_traced_pipeline_is_the_same(same: Backends, size: int) -> None:
    same(traced, size)


# -- optimizers, averages, loaders, checkpoints ------------------------------------------------------------------------


def zero(rank: int, options: dict[str, Any]) -> Any:
    model = DistributedDataParallel(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, **options)
    losses = train(model, optimizer, rank)
    own = sum(1 for values in optimizer.optim.state.values() if values)
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict()["state"] if rank == 0 else None
    moments = [state[key]["exp_avg"] for key in sorted(state)] if state is not None else []
    return losses, own, moments, weights(model)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("options", [{}, {"parameters_as_bucket_view": True}], ids=["parameters", "buckets"])
def test_a_sharded_optimizer_is_the_same(same: Backends, size: int, options: dict[str, Any]) -> None:
    results = same(zero, size, options)
    assert sum(own for _, own, _, _ in results) == 6
    assert len(results[0][2]) == 6
    assert_all_the_same([values for *_, values in results])


def local_sgd(rank: int, hierarchical: bool) -> Any:
    model = DistributedDataParallel(mlp())
    pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
    state = PostLocalSGDState(process_group=None, subgroup=pairs[rank // 2], start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook)
    averager: Any = PeriodicModelAverager(period=3, warmup_steps=2)
    if hierarchical:
        from collections import OrderedDict

        groups = OrderedDict([(2, 2), (4, dist.get_world_size())])
        averager = HierarchicalModelAverager(groups, warmup_steps=2)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    return train(model, optimizer, rank, steps=9), weights(model)


@pytest.mark.parametrize(("size", "hierarchical"), [(2, False), (4, False), (4, True)])
def test_local_steps_with_averages_now_and_then_are_the_same(same: Backends, size: int, hierarchical: bool) -> None:
    same(local_sgd, size, hierarchical)


def epochs(rank: int) -> Any:
    """A loop as in torch's example for ImageNet: a sampler, and metrics over all ranks."""
    size = dist.get_world_size()
    images, classes = samples(203, 20), labels(203, 5)
    dataset = TensorDataset(images, classes)
    sampler = DistributedSampler(dataset, shuffle=True, seed=3)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(convnet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    metrics = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(3, dtype=torch.float64)
        for x, y in loader:
            optimizer.zero_grad()
            output = model(x)
            loss = cross_entropy(output, y)
            loss.backward()
            optimizer.step()
            right = (output.argmax(1) == y).sum()
            total += torch.tensor([loss.item() * len(y), right.item(), len(y)], dtype=torch.float64)
        dist.all_reduce(total)
        slowest = torch.tensor(float(rank))
        dist.reduce(slowest, 0, op=dist.ReduceOp.MAX)
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, {"rank": rank, "epoch": epoch, "rate": scheduler.get_last_lr()})
        assert [item["rank"] for item in gathered] == list(range(size))
        best = [f"epoch {epoch}" if rank == 0 else None]
        dist.broadcast_object_list(best, src=0)
        assert best == [f"epoch {epoch}"]
        dist.barrier()
        scheduler.step()
        metrics.append(total)
    return metrics, weights(model)


@pytest.mark.parametrize("size", [2, 4])
def test_a_loop_with_a_distributed_sampler_is_the_same(same: Backends, size: int) -> None:
    results = same(epochs, size)
    assert results[0][0][0][2] == -(-203 // size) * size
    assert results[0][0][2][1] > results[0][0][0][1]


def save(rank: int, folder: str, asynchronously: bool) -> Any:
    model = shard(Transformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    learn(model, optimizer, rank, steps=2)
    values, state = get_state_dict(model, optimizer)
    if asynchronously:
        dcp.async_save({"model": values, "optimizer": state}, checkpoint_id=folder).result()
    else:
        dcp.save({"model": values, "optimizer": state}, checkpoint_id=folder)
    return learn(model, optimizer, rank, steps=2), whole(model)


def load(rank: int, folder: str) -> Any:
    model = shard(Transformer())
    torch.nn.init.zeros_(model.output.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    values, state = get_state_dict(model, optimizer)
    dcp.load({"model": values, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=state)
    before = {name: value.clone() for name, value in whole(model).items()}
    return learn(model, optimizer, rank, steps=2), whole(model), before


def test_a_checkpoint_of_one_backend_goes_on_with_the_other(same: Backends, tmp_path: Path) -> None:
    pairs = [("gloo", "paceline", False), ("paceline", "gloo", True), ("paceline", "paceline", False)]
    for writer, reader, asynchronously in pairs:
        folder = str(tmp_path / f"{writer}-{reader}")
        going_on = same.run(writer, save, 2, folder, asynchronously)
        resumed = same.run(reader, load, 2, folder)
        torch.testing.assert_close([result[:2] for result in resumed], going_on, **EXACT)
    loaded = same.run("paceline", load, 4, folder)
    torch.testing.assert_close(loaded[0][2], resumed[0][2], check_dtype=False, **EXACT)


# -- differentiable communication --------------------------------------------------------------------------------------


def derived(rank: int) -> list[torch.Tensor]:
    """Results and gradients of all operations of `torch.distributed.nn`."""
    size = dist.get_world_size()
    results = []

    def record(function: Callable[[torch.Tensor], Any]) -> None:
        x = samples(size, 3, seed=rank).requires_grad_()
        y = function(x)
        outputs = [y] if isinstance(y, torch.Tensor) else [part for part in y if part is not None]
        loss = sum(((rank + 1) * part.square()).sum() for part in outputs)
        loss.backward()
        results.extend([part.detach().clone() for part in outputs] + [x.grad])

    record(differentiable.all_reduce)
    record(lambda x: differentiable.all_reduce(x, dist.ReduceOp.SUM) * x)
    record(differentiable.all_gather)
    record(lambda x: differentiable.broadcast(x, src=1))
    record(lambda x: differentiable.gather(x, dst=1))
    record(lambda x: differentiable.scatter([row.clone() for row in x], src=1))
    record(lambda x: differentiable.reduce(x, dst=1) if rank == 1 else 0 * differentiable.reduce(x, dst=1))
    record(lambda x: differentiable.reduce_scatter(torch.empty(3), [row.clone() for row in x]))
    record(lambda x: differentiable.all_to_all([torch.empty(3) for _ in range(size)], [row.clone() for row in x]))
    record(lambda x: differentiable.all_to_all_single(torch.empty(size, 3), x))
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_pass_through_communication(same: Backends, size: int) -> None:
    same(derived, size)


def functional(rank: int) -> list[torch.Tensor]:
    """The operations that torch's compiler knows: they return what others fill, and are waited for when it is used."""
    world, size = dist.group.WORLD, dist.get_world_size()
    x, y = samples(2 * size, 3, seed=rank), samples(2 * size, seed=100 + rank)
    results = [
        funcol.all_reduce(x, "sum", world),
        funcol.all_reduce(x, "avg", world),
        funcol.all_gather_tensor(x, 1, world),
        funcol.reduce_scatter_tensor(x, "sum", 0, world),
        funcol.broadcast(x, 1, world),
        funcol.all_to_all_single(x, None, None, world),
        funcol.permute_tensor(y, [*range(1, size), 0], world),
        *funcol.all_reduce_coalesced([x, y], "sum", world),
        *funcol.all_gather_into_tensor_coalesced([x, y], world),
        *funcol.reduce_scatter_tensor_coalesced([x, y], "sum", [0, 0], world),
    ]
    for function in (
        lambda x: funcol.all_gather_tensor_autograd(x, 1, world),
        lambda x: funcol.reduce_scatter_tensor_autograd(x, "sum", 0, world),
        lambda x: funcol.all_to_all_single_autograd(x, None, None, world),
    ):
        z = x.clone().requires_grad_()
        result = function(z)
        ((rank + 1) * result.square()).sum().backward()
        results += [result.detach(), z.grad]
    return [result.clone() for result in results]


@pytest.mark.parametrize("size", [2, 4])
def test_functional_operations_are_the_same(same: Backends, size: int) -> None:
    same(functional, size)


def saved(rank: int) -> list[torch.Tensor | None]:
    """Communication does not count as a change of what autograd has saved: what ranks have in common stays as it is."""
    weight = torch.ones(3, requires_grad=True)
    first, second = (2 * weight).exp(), (3 * weight).exp()
    dist.broadcast(first.detach(), src=0)
    dist.all_reduce(second.detach(), op=dist.ReduceOp.MAX)
    (first + second).sum().backward()
    return [weight.grad]


def test_what_autograd_has_saved_may_be_communicated(same: Backends) -> None:
    same(saved, 2)


def compiled(rank: int) -> Any:
    def communicate(x: torch.Tensor) -> torch.Tensor:
        y = 2 * x
        dist.all_reduce(y)
        return funcol.all_gather_tensor(y + 1, 0, dist.group.WORLD).sin()

    result = torch.compile(communicate, backend="aot_eager", fullgraph=True)(samples(4, seed=rank))
    model = DistributedDataParallel(mlp())
    losses = train(torch.compile(model, backend="aot_eager"), torch.optim.SGD(model.parameters(), lr=0.1), rank)
    return result, losses, weights(model)


def test_compiled_programs_are_the_same(same: Backends) -> None:
    same(compiled, 2)


def experts(rank: int, functional: bool) -> Any:
    """A mixture of experts, one per rank: words go where the router sends them, and come back."""
    size = dist.get_world_size()
    torch.manual_seed(0)
    router = nn.Linear(12, size)
    dist.broadcast(router.weight.data, src=0)
    torch.manual_seed(rank)
    expert = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12))
    optimizer = torch.optim.SGD([*router.parameters(), *expert.parameters()], lr=0.1)

    def exchange(x: torch.Tensor, there: list[int], here: list[int]) -> torch.Tensor:
        if functional:
            return funcol.all_to_all_single_autograd(x.contiguous(), here, there, dist.group.WORLD)
        return differentiable.all_to_all_single(x.new_empty(sum(here), 12), x, here, there)

    losses, splits = [], []
    for step in range(3):
        x = samples(16, 12, seed=100 * step + rank)
        chances = router(x).softmax(-1)
        best, choice = chances.max(-1)
        order = choice.argsort(stable=True)
        counts = torch.bincount(choice, minlength=size)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts)
        there, here = counts.tolist(), incoming.tolist()
        returned = exchange(expert(exchange(x[order], there, here)), here, there)
        y = torch.zeros_like(x).index_copy(0, order, returned) * best[:, None]
        loss = mse_loss(y, -x)
        optimizer.zero_grad()
        loss.backward()
        for parameter in router.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(loss.item())
        splits.append(there)
    return losses, splits, weights(router), weights(expert)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("functional", [False, True])
def test_a_mixture_of_experts_is_the_same(same: Backends, size: int, functional: bool) -> None:
    results = same(experts, size, functional)
    assert any(len(set(split)) > 1 for _, splits, _, _ in results for split in splits)


def ring(rank: int) -> Any:
    """Attention to a context that is spread over all ranks: keys and values go round."""
    size = dist.get_world_size()
    context = [samples(2, 4, 8 * size, 16, seed=seed) for seed in range(3)]
    expected = scaled_dot_product_attention(*context).chunk(size, 2)[rank]
    q, k, v = (whole.chunk(size, 2)[rank].contiguous() for whole in context)
    total, weight, top = torch.zeros_like(q), torch.zeros(2, 4, 8, 1), torch.full((2, 4, 8, 1), -torch.inf)
    for step in range(size):
        operations, following = [], [torch.empty_like(k), torch.empty_like(v)]
        if step < size - 1:
            for given, taken in zip((k, v), following, strict=True):
                operations.append(dist.P2POp(dist.isend, given, (rank + 1) % size))
                operations.append(dist.P2POp(dist.irecv, taken, (rank - 1) % size))
        works = dist.batch_isend_irecv(operations) if operations else []
        scores = q @ k.mT / 4
        highest = torch.maximum(top, scores.amax(-1, keepdim=True))
        now = (scores - highest).exp()
        total = total * (top - highest).exp() + now @ v
        weight = weight * (top - highest).exp() + now.sum(-1, keepdim=True)
        top = highest
        for work in works:
            work.wait()
        k, v = following
    torch.testing.assert_close(total / weight, expected)
    return total / weight


@pytest.mark.parametrize("size", [2, 4])
def test_attention_around_a_ring_is_the_same(same: Backends, size: int) -> None:
    same(ring, size)


def split_context(rank: int) -> list[torch.Tensor]:
    """The same by torch itself, with gradients."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    q, k, v = (samples(2, 4, 64, 16, seed=seed) for seed in range(3))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        given = [part.detach().clone().requires_grad_() for part in (q, k, v)]
        output = scaled_dot_product_attention(*given, is_causal=True)
        output.square().sum().backward()
        return [output.detach().clone(), *(part.grad for part in given)]


@pytest.mark.parametrize("size", [2, 4])
def test_attention_with_a_split_context_is_the_same(same: Backends, size: int) -> None:
    same(split_context, size)


# -- groups, processes and launchers -----------------------------------------------------------------------------------


def environment_of(rank: int) -> dict[str, Any]:
    """All that a program can ask about its groups."""
    size = dist.get_world_size()
    pair = dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("rows", "columns"))
    column = mesh["rows"].get_group()
    assert dist.get_backend(column) == dist.get_backend() == dist.get_backend(pair if rank < 2 else None)
    assert dist.is_backend_available(dist.get_backend())
    total = torch.tensor(float(rank))
    dist.all_reduce(total, group=column)
    return {
        "rank": dist.get_rank(),
        "size": size,
        "pair": torch.tensor(dist.get_process_group_ranks(pair) if rank < 2 else []),
        "column": torch.tensor(dist.get_process_group_ranks(column)),
        "place": torch.tensor(mesh.get_coordinate()),
        "rows": dist.get_rank(column),
        "flat": mesh._flatten("all").size(),
        "total": total,
        "first": dist.get_global_rank(column, 0),
    }


@pytest.mark.parametrize("size", [2, 4])
def test_programs_learn_the_same_about_their_groups(same: Backends, size: int) -> None:
    same(environment_of, size)
    assert same.run("paceline", name_of_the_backend, size) == ["paceline"] * size


def name_of_the_backend(rank: int) -> str:
    return dist.get_backend()


def again(rank: int, folder: str) -> Any:
    """A group that is ended and begun anew, and each time one besides that ends with it."""
    backend, size, losses, open_files = dist.get_backend(), dist.get_world_size(), [], []
    for number in range(5):
        dist.destroy_process_group()
        assert not dist.is_initialized()
        store, limit = dist.FileStore(f"{folder}/{number}", size), datetime.timedelta(seconds=30)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        model = DistributedDataParallel(mlp(), process_group=dist.new_group(list(range(size))))
        losses.append(train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, steps=2 + number))
        del model, store
        gc.collect()
        open_files.append(len(list(Path("/proc/self/fd").iterdir())))
    return losses, open_files


def test_a_group_can_be_ended_and_begun_anew(same: Backends, tmp_path: Path) -> None:
    for backend in ("gloo", "paceline"):
        (tmp_path / backend).mkdir()
    expected, results = (same.run(backend, again, 2, str(tmp_path / backend)) for backend in ("gloo", "paceline"))
    for (losses, open_files), (losses_on_gloo, _) in zip(results, expected, strict=True):
        assert losses == losses_on_gloo
        assert open_files[1:] == open_files[:1] * 4


SCRIPT = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline

for word in sys.argv[1:]:
    backend, _, checks = word.partition(":")
    dist.set_debug_level_from_env() if checks else dist.set_debug_level(dist.DebugLevel.OFF)
    dist.init_process_group(backend)
    assert (dist.get_debug_level() == dist.DebugLevel.DETAIL) == bool(checks)
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 8)).square().mean()
        loss.backward()
        optimizer.step()
    dist.all_reduce(loss)
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, dist.get_rank())
    dist.barrier()
    if dist.get_rank() == 0:
        print("result:", loss.item().hex(), ranks, [p.sum().item().hex() for p in model.parameters()])
    dist.destroy_process_group()
"""


def test_torchrun_launches_it_with_checks_and_without(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [TORCHRUN, "--standalone", "--nproc-per-node", "2", script]
    # With these checks, torch 2.13 dies of data parallel training on gloo.
    words = ["gloo", "paceline", "paceline:checks"]
    outcome = done([*command, *words], tmp_path, 100, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert outcome.code == 0, outcome.err
    on_gloo, on_paceline, with_checks = [line for line in outcome.out.splitlines() if line.startswith("result:")]
    assert on_paceline == on_gloo
    assert with_checks == on_gloo
