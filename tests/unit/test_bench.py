"""What can be asked for is what there is."""

import torch

from paceline.bench import contestants, tasks, workloads


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
