"""Lightning Fabric under Paceline's strategies: the loop is the script's own, in Fabric's words."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.preloaded import Preloaded
from helpers.teams import run_team
from helpers.training import under
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH = 47, 3


@pytest.fixture(scope="module")
def fabric() -> Iterator[Preloaded]:
    with Preloaded("torch._dynamo", "lightning", "paceline.integrations.fabric", "helpers.teams") as process:
        yield process


def numbers(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 4, generator=generator)
    return TensorDataset(x, x[:, :1] * x[:, 1:2])


def trained(strategy: Any, batch: int, path: str, apart: bool = False, **options: Any) -> dict[str, Any]:
    import lightning

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.fabric").setLevel("ERROR")
    fabric = lightning.Fabric(strategy=strategy, accelerator="cpu", **options)
    fabric.launch()
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.05)
    if apart:
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(optimizer)
    else:
        model, optimizer = fabric.setup(model, optimizer)
    train, test = fabric.setup_dataloaders(
        DataLoader(numbers(SAMPLES), batch_size=batch, shuffle=True), DataLoader(numbers(13), batch_size=2)
    )
    found = []
    for epoch in range(2):
        if epoch == 1:
            fabric.save(path, {"model": model, "optimizer": optimizer})
            fabric.barrier()
            fabric.load(path, {"model": model, "optimizer": optimizer})
        model.train()
        samples = 0
        for number, (x, y) in enumerate(train):
            with fabric.no_backward_sync(model, enabled=number % 2 == 0):
                fabric.backward(mse_loss(model(x), y))
            samples += len(x)
            if number % 2 or number == len(train) - 1:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        error = torch.zeros(())
        with torch.no_grad():
            for x, y in test:
                error += mse_loss(model(x), y, reduction="sum")
        found.append(float(fabric.all_reduce(error, reduce_op="sum")))
        found.append(float(fabric.all_reduce(torch.tensor(samples), reduce_op="sum")))
    return {
        "state": {name: value.detach().clone() for name, value in model.state_dict().items()},
        "found": found,
        "decided": fabric.broadcast(fabric.global_rank, src=fabric.world_size - 1),
    }


def two_players(strategy: Any, batch: int, path: str, **options: Any) -> dict[str, Any]:
    """Two models that are set up one after the other, each with its optimizer, and loaded in the middle."""
    import lightning

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.fabric").setLevel("ERROR")
    fabric = lightning.Fabric(strategy=strategy, accelerator="cpu", **options)
    fabric.launch()
    torch.manual_seed(1)
    first, second = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(2))
    one: Any
    other: Any
    one, of_one = fabric.setup(first, torch.optim.Adam(first.parameters(), lr=0.05))
    other, of_other = fabric.setup(second, torch.optim.SGD(second.parameters(), lr=0.05, momentum=0.9))
    train: Any = fabric.setup_dataloaders(DataLoader(numbers(SAMPLES), batch_size=batch))
    state = {"one": one, "of one": of_one, "other": other, "of other": of_other}
    for epoch in range(3):
        if epoch == 1:
            fabric.save(path, state)
        if epoch == 2:
            fabric.load(path, state)
        for x, y in train:
            of_one.zero_grad()
            fabric.backward(mse_loss(one(x), y))
            of_one.step()
            of_other.zero_grad()
            fabric.backward(mse_loss(other(x), one(x).detach()))
            of_other.step()
    return {
        "state": {
            f"{number}.{name}": value.detach().clone()
            for number, model in enumerate((one, other))
            for name, value in model.state_dict().items()
        },
    }


def together(train: Callable[..., Any], strategy: str, *arguments: Any) -> list[dict[str, Any]]:
    def work(_team: None) -> Any:
        from paceline.integrations.fabric import FabricStrategy

        return train(FabricStrategy(), BATCH, *arguments)

    return run_team(work, 2, launch=under(strategy, "lead"), joined=False)


def alone(train: Callable[..., Any], path: str) -> Any:
    return train("auto", 2 * BATCH, path, devices=1)


@pytest.mark.parametrize("strategy", ["all-reduce", "sync", "async"])
def test_a_loop_of_fabric_trains_and_evaluates_as_one_process_does(
    fabric: Preloaded, strategy: str, tmp_path: Path
) -> None:
    one = fabric.call(alone, trained, str(tmp_path / "one.ckpt"))
    first, second = fabric.call(together, trained, strategy, str(tmp_path / "two.ckpt"), strategy == "sync")
    assert first["decided"] == second["decided"] == 1
    assert first["found"] == second["found"]
    assert first["found"][1] == first["found"][3] == SAMPLES
    saved = torch.load(tmp_path / "two.ckpt", weights_only=True)
    assert saved["model"]["0.weight"].untyped_storage().nbytes() == saved["model"]["0.weight"].nbytes
    if strategy != "async":
        assert first["found"] == pytest.approx(one["found"], abs=1e-4)
        for name, value in one["state"].items():
            assert torch.allclose(first["state"][name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("strategy", ["all-reduce", "sync"])
def test_models_that_are_set_up_one_after_the_other_train_and_are_loaded_as_in_one_process(
    fabric: Preloaded, strategy: str, tmp_path: Path
) -> None:
    one = fabric.call(alone, two_players, str(tmp_path / "one.ckpt"))["state"]
    for found in fabric.call(together, two_players, strategy, str(tmp_path / "two.ckpt")):
        assert {
            name: float((found["state"][name] - value).abs().max()) < 1e-5 for name, value in one.items()
        } == dict.fromkeys(one, True)
