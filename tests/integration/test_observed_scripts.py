"""Scripts of plain torch.distributed that know nothing of Paceline are recorded on its backend; slow ranks are named.

Slowness is put on by sleeping. The truth is by how much later one rank was than the other, by the programs' own clocks,
so that a busy machine, which makes both late, changes nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.forks import played
from helpers.groups import Pool
from helpers.load import above_noise
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from paceline import events
from paceline.events.arrivals import Arrivals
from paceline.events.recorder import Recorder
from paceline.observation.operations import Operations
from paceline.observation.steps import ScriptSteps
from paceline.report.source import open_run

STEPS = 8


_moments: list[float] = []
"""When this rank was ready for what it does together with the other."""


def _ready() -> None:
    _moments.append(time.perf_counter())


class _SlowBackward(torch.autograd.Function):
    """Sleeps in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        _ready()
        return gradients[0], None


class _Model(nn.Module):
    def __init__(self, seconds: float | None = None) -> None:
        super().__init__()
        self.first, self.second, self.seconds = nn.Linear(32, 64), nn.Linear(64, 1), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = torch.relu(self.first(x))
        if self.seconds is not None:
            hidden = _SlowBackward.apply(hidden, self.seconds)  # type: ignore[no-untyped-call]
        result: torch.Tensor = self.second(hidden)
        return result


class _Slowly(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that take a while to load."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self._seconds)
        return torch.ones(32), torch.ones(1)


def _train(model: nn.Module, dataset: Dataset[Any], loaded: Callable[[], None] = lambda: None) -> list[float]:
    _moments.clear()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for x, y in DataLoader(dataset, batch_size=4):
        loaded()
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    return _moments


def data_parallel(rank: int, factor: float) -> list[float]:
    """DDP with 200 ms in the backward pass of rank 1; several buckets."""
    model = DistributedDataParallel(_Model(0.2 * factor if rank == 1 else 0.0), bucket_cap_mb=0.001)
    return _train(model, TensorDataset(torch.ones(4 * STEPS, 32), torch.ones(4 * STEPS, 1)))


def fully_sharded(rank: int, factor: float) -> list[float]:
    """FSDP2 with 4 × 50 ms of loading per batch on rank 1."""
    model = _Model()
    for part in (model.first, model.second, model):
        fully_shard(part)
    return _train(model, _Slowly(0.05 * factor if rank == 1 else 0.0), _ready)


class _Stage(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer, self.seconds, self.took = nn.Linear(32, 32), seconds, [0.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begin = time.perf_counter()
        time.sleep(self.seconds)
        result: torch.Tensor = self.layer(x)
        self.took.append(time.perf_counter() - begin)
        return result


def pipelined(rank: int, factor: float) -> list[float]:
    """A pipeline of two stages, of which the second takes 60 ms per microbatch and the first 20."""
    module = _Stage(factor * (0.06 if rank == 1 else 0.02))
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=3, loss_fn=mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(torch.ones(6, 32))
        else:
            schedule.step(target=torch.ones(6, 32))
        optimizer.step()
    return module.took[-3 * STEPS :]


def tensor_parallel(rank: int, factor: float) -> list[float]:
    """DTensor: rank 0 sleeps 200 ms between its updates and its next step."""
    _moments.clear()
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model[2].register_forward_pre_hook(lambda *_: _ready())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for x, y in DataLoader(TensorDataset(torch.ones(4 * STEPS, 32), torch.ones(4 * STEPS, 1)), batch_size=4):
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.2 * factor if rank == 0 else 0.0)
    return _moments


Program = Callable[[int, float], list[float]]
Observe = Callable[[Program, float], tuple[Path, dict[str, Any], list[list[float]]]]
FACTORS = (1.0, 3.0, 9.0)
"""On sleeps, until they are long against what a busy machine adds."""


@pytest.fixture
def observe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Observe:
    """Runs a program on two ranks; its folder, the facts of its report, and what each rank returned."""

    def run(program: Program, factor: float) -> tuple[Path, dict[str, Any], list[list[float]]]:
        folder = tmp_path / "runs" / f"{program.__name__}-{factor:g}"
        monkeypatch.setenv("PACELINE_RUN", str(folder))
        with Pool(2) as pool:
            returned = pool.run(program, factor)
        return folder, open_run(folder).facts(), returned

    return run


def lateness(late: list[float], early: list[float]) -> float:
    """Seconds by which one rank was later than the other, over all steps."""
    assert len(late) == len(early) == STEPS
    return sum(max(0.0, one - other) for one, other in zip(late, early, strict=True))


def test_ddp_with_a_slow_backward_pass_is_named(observe: Observe) -> None:
    def check(factor: float) -> None:
        folder, facts, (first, second) = observe(data_parallel, factor)
        blamed = facts["workers"][1]
        assert facts["verdict"][0].startswith("Worker 1 is slow") and "its backward pass" in facts["verdict"][0]
        assert blamed["pattern"] == "persistent"
        assert "it slept, or waited for another process, a lock or a socket" in facts["verdict"][0]
        _check_blame(blamed, "backward", lateness(second, first))
        assert blamed["seconds"]["computing"] > STEPS * 0.2 * factor
        assert facts["updates"] == STEPS and facts["workers"][0]["samples"] == 4 * STEPS
        _check_files(folder, lateness(second, first))

    above_noise(check, FACTORS)


def _check_blame(worker: dict[str, Any], cause: str, late: float) -> None:
    """The other rank waited for it as long as it was late, nearly always because of this."""
    assert worker["blame"] == pytest.approx(late, rel=0.1)
    assert worker["causes"][cause] > 0.8 * worker["blame"]


def _check_files(folder: Path, late: float) -> None:
    """The folder of an observed run is complete: merged events, a summary, nothing else."""
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "events.jsonl", "summary.json"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["strategy"] == "torch.distributed" and summary["updates"] == STEPS
    assert summary["workers"]["0"]["waiting"] > 0.9 * late
    parts = [event for event in events.read(folder / "events.jsonl") if isinstance(event, events.Collective)]
    reduced = [part for part in parts if part.operation == "all_reduce"]
    by_rank = [[(part.channel, part.number, part.bytes) for part in reduced if part.rank == rank] for rank in (0, 1)]
    assert by_rank[0] == by_rank[1] != []
    model = sum(parameter.numel() for parameter in _Model().parameters()) * 4
    assert sum(part.bytes for part in reduced if part.rank == 0) >= model * STEPS


def test_fsdp_with_a_slow_loader_is_named(observe: Observe) -> None:
    def check(factor: float) -> None:
        _, facts, (first, second) = observe(fully_sharded, factor)
        assert facts["verdict"][0].startswith("Worker 1 is slow") and "loading its data" in facts["verdict"][0]
        _check_blame(facts["workers"][1], "loading", lateness(second, first))

    above_noise(check, FACTORS)


def test_a_torch_pipeline_with_an_uneven_stage_is_named(observe: Observe) -> None:
    def check(factor: float) -> None:
        folder, facts, took = observe(pipelined, factor)
        assert facts["verdict"][0].startswith("Worker 1 is slow") and "its forward pass" in facts["verdict"][0]
        passes = [event for event in events.read(folder / "events.jsonl") if isinstance(event, events.Pass)]
        for rank, truth in enumerate(took):
            forward = [event.seconds for event in passes if event.rank == rank and event.kind == "F"]
            assert sum(forward) == pytest.approx(sum(truth), rel=0.1) and len(forward) == 3 * STEPS
        # In a step the first stage sleeps 60 ms, and the second 180 ms from 20 ms on: 160 of 400 ms are idle.
        assert 0.2 < facts["bubble"]["measured"] < 0.5
        assert facts["updates"] == STEPS and facts["workers"][0]["samples"] == 6 * STEPS

    above_noise(check, FACTORS)


def test_time_between_steps_of_a_dtensor_script_is_named(observe: Observe) -> None:
    def check(factor: float) -> None:
        _, facts, (first, second) = observe(tensor_parallel, factor)
        assert facts["verdict"][0].startswith("Worker 0 is slow") and "between steps" in facts["verdict"][0]
        _check_blame(facts["workers"][0], "elsewhere", lateness(first, second))

    above_noise(check, FACTORS)


def profiled(rank: int) -> list[str]:
    """Names of the operations that torch's profiler has seen."""
    from torch.profiler import ProfilerActivity, profile

    tensor, parts = torch.ones(4), [torch.empty(4) for _ in range(2)]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        dist.all_gather(parts, tensor)
        dist.barrier()
        if rank:
            dist.send(tensor, 0)
        else:
            dist.recv(tensor, 1)
    return sorted(event.name for event in profiler.events() if event.name.startswith(("c10d::", "paceline:")))


def test_torch_s_profiler_sees_operations_by_the_names_of_c10d() -> None:
    with Pool(2) as pool:
        first, second = pool.run(profiled)
    common = ["c10d::allgather_", "c10d::allreduce_", "c10d::allreduce_", "c10d::barrier"]
    assert first == [*common, "c10d::recv_", *_shown("recv")]
    assert second == [*common, "c10d::send", *_shown("send")]


def _shown(message: str) -> list[str]:
    names = ["all_gather", "all_reduce", "all_reduce", "barrier", message]
    return [f"paceline:{name}" for name in names]


SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("paceline")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(5):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_paceline_run_records_a_script_that_joins_no_team(tmp_path: Path) -> None:
    (tmp_path / "ddp.py").write_text(SCRIPT)
    ended = played(["ddp.py", "--workers", "2", "--name", "plain"], tmp_path)
    assert ended.code == 0, ended.err
    summary = json.loads((tmp_path / "runs" / "plain" / "summary.json").read_text())
    assert summary["strategy"] == "torch.distributed" and summary["updates"] == 5
    assert set(summary["workers"]) == {"0", "1"}


def test_events_are_written_in_the_middle_of_anything_and_in_whole_steps(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 0)
    steps = ScriptSteps(recorder, 0, 1)
    operations = Operations(recorder, steps, 0)

    def record() -> None:
        steps.record()
        operations.settle()

    recorder.before_flush = record
    optimizer = torch.optim.SGD([weight := torch.ones(1, requires_grad=True)], 0.1)
    for number in range(4):
        recorder._next = 0.0  # so that the next event is written at once, with all before it
        operation = operations.begin("all_reduce", f"group {number}", [0], 4)
        weight.sum().backward()
        operation.finish()
        recorder._next = 0.0
        optimizer.step()
    steps.stop()
    recorder.close()
    found = list(events.read(tmp_path / "streams" / "0.jsonl"))
    parts = [event for event in found if isinstance(event, events.Collective)]
    assert [part.channel for part in parts] == [f"group {number}" for number in range(4)]
    assert [event.version for event in found if isinstance(event, events.Update)] == [1, 2, 3, 4]
    computed = [event for event in found if isinstance(event, events.Compute)]
    assert sum(event.minibatches for event in computed) == 4


def test_a_rank_that_never_came_is_the_one_that_was_waited_for() -> None:
    def part(rank: int, start: float, number: int) -> events.Collective:
        return events.Collective(rank, start, 10.0 - start, "all_reduce", "world", number, 8, 10.0 - start)

    arrivals = Arrivals()
    peers = events.Peers(0, 0.0, "world", [0, 1, 2])
    waits = arrivals.add([peers, part(0, 1.0, 0), part(1, 5.0, 0), part(2, 3.0, 0), part(0, 6.0, 1), part(2, 7.0, 1)])
    assert waits == [
        events.Wait(0, 1.0, 4.0, 1),
        events.Reduce(0, 5.0, 5.0, 8),
        events.Reduce(1, 5.0, 5.0, 8),
        events.Wait(2, 3.0, 2.0, 1),
        events.Reduce(2, 5.0, 5.0, 8),
    ]
    assert arrivals.finish() == [events.Wait(0, 6.0, 4.0, 1), events.Wait(2, 7.0, 3.0, 1)]
