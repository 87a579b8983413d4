"""What can be asked for is what there is."""

import pytest
import torch

from paceline.bench import contestants, tasks, workloads
from paceline.cli import bench
from paceline.collectives.communicator import TOPOLOGIES
from paceline.errors import UsageError


def test_every_name_that_can_be_asked_for_exists() -> None:
    assert set(workloads.WORKLOADS) == set(tasks.MODELS)
    assert set(contestants.OPTIMIZERS) == set(tasks.OPTIMIZERS)
    assert set(contestants.PRECISIONS) == set(tasks.PRECISIONS)
    assert set(contestants.CONTESTANTS) == {"paceline", *tasks.PEERS}


def test_every_workload_has_a_loss_with_a_gradient_everywhere() -> None:
    for work in workloads.WORKLOADS.values():
        model = work.build()
        x, y = work.batch_of(2, seed=0)
        work.loss(model(x), y).backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
        assert all(p.grad is not None for p in model.parameters())


def test_every_topology_that_there_is_can_be_measured() -> None:
    assert tasks.TOPOLOGIES == TOPOLOGIES


@pytest.mark.parametrize(("text", "sizes"), [("1K", [1024]), ("7,100k,25M,1G", [7, 102400, 26214400, 1 << 30])])
def test_sizes_are_bytes_with_units(text: str, sizes: list[int]) -> None:
    assert bench._sizes(text) == sizes
    assert bench._sizes(",".join(bench._spoken_size(size) for size in sizes)) == sizes


@pytest.mark.parametrize("text", ["", "1T", "0", "-1K", "K", "1K,", "1.5M", "1KK"])
def test_other_sizes_are_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(UsageError, match="must be numbers of bytes"):
        bench._sizes(text)


@pytest.mark.parametrize(("operation", "crossing"), [("all_reduce", 1.5), ("all_gather", 0.75), ("broadcast", 1.0)])
def test_bandwidth_on_the_bus_counts_what_must_cross(operation: str, crossing: float) -> None:
    task = tasks.CollectiveTask(operation=operation, sizes=[1000], contestants=["torch", "copy", "gloo"])
    times = tasks.CollectiveTimes(
        {"torch": {"1000": [2.0, 1.0]}, "copy": {"1000": [0.25]}, "gloo": {"1000": [8.0, 4.0]}}
    )
    (point,) = bench._collective_facts(task, 4, "gloo", times)["points"]
    ours = point["contestants"]["torch"]
    assert ours == {"seconds": 1.0, "algorithm": 1000.0, "bus": 1000 * crossing, "memory": 0.25, "ratio": 4.0}
    assert "ratio" not in point["contestants"]["gloo"]
