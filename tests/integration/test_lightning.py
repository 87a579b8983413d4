"""Lightning's Trainer under Paceline's strategies: the parameters and metrics of one process, and its loop survives.

Lightning is imported by one process, from which all others are forked.
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.forks import done, fork_programs
from helpers.preloaded import Preloaded
from helpers.support import PACELINE, PYTHON
from helpers.teams import run_team
from helpers.training import under
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from paceline import UsageError
from paceline.config import parse_slowness
from paceline.events.summary import merge

SAMPLES, BATCH = 46, 3


@pytest.fixture(scope="module")
def lightning() -> Iterator[Preloaded]:
    with Preloaded("torch._dynamo", "lightning", "paceline.integrations.lightning", "helpers.teams") as process:
        yield process


def numbers(count: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 6, generator=generator)
    return TensorDataset(x, x[:, :1] * x[:, 1:2], torch.arange(count))


def module(**options: Any) -> Any:
    """A module with everything that Lightning's users do: metrics, schedulers, hooks."""
    import lightning
    from torchmetrics import MeanSquaredError

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
            self.train_error, self.val_error = MeanSquaredError(), MeanSquaredError()
            self.seen: list[int] = []

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            x, y, numbers = batch
            output = self.net(x)
            loss = mse_loss(output, y)
            self.train_error(output, y)
            self.log("train_loss", loss, sync_dist=True, on_step=True, on_epoch=True)
            self.log("train_count", float(len(x)), sync_dist=True, on_step=False, on_epoch=True, reduce_fx="sum")
            self.log("train_error", self.train_error, on_step=False, on_epoch=True)
            self.seen += numbers.tolist()
            return loss

        def validation_step(self, batch: list[Tensor], _: int) -> None:
            x, y, _numbers = batch
            self.val_error(self.net(x), y)
            self.log("val_loss", mse_loss(self.net(x), y))
            self.log("val_synced", mse_loss(self.net(x), y), sync_dist=True)
            self.log("val_count", float(len(x)), sync_dist=True, reduce_fx="sum")
            self.log("val_error", self.val_error)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)
            return [optimizer], [{"scheduler": schedule, "interval": options.get("interval", "step")}]

    return Net()


def fitted(strategy: Any, batch: int, ckpt_path: str | None = None, **options: Any) -> dict[str, Any]:
    """What a Trainer has made of the module."""
    import lightning

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel("ERROR")
    lightning.seed_everything(1, verbose=False)
    net = module(**options.pop("module", {}))
    loaders = [
        DataLoader(numbers(), batch_size=batch, shuffle=True),
        DataLoader(numbers(17), batch_size=4),
    ]
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        **{
            "max_epochs": 2,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            **options,
        },
    )
    trainer.fit(net, *loaders, ckpt_path=ckpt_path)
    return {
        "parameters": [parameter.detach().clone() for parameter in net.parameters()],
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "seen": net.seen,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
    }


def alone(options: dict[str, Any]) -> dict[str, Any]:
    """One process with plain Lightning, on the batch of two workers."""
    return fitted("auto", 2 * BATCH, devices=1, **options)


def together(strategy: str, options: dict[str, Any], launch: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Two workers, as `paceline run` starts them."""

    def work(_team: None) -> dict[str, Any]:
        from paceline.integrations.lightning import PacelineStrategy

        return fitted(PacelineStrategy(), BATCH, **options)

    servers = None if strategy.startswith("all-reduce") else "lead"
    return run_team(work, 2, launch=under(strategy, servers, **(launch or {})), joined=False, timeout=90.0)


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.1},
    "clipped by value": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    "accumulated": {"accumulate_grad_batches": 3, "module": {"interval": "epoch"}},
    "few steps": {"max_steps": 5, "max_epochs": None},
    "few batches": {"limit_train_batches": 3},
}


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("strategy", ["all-reduce", "sync"])
def test_two_workers_train_the_model_of_one_process(lightning: Preloaded, strategy: str, features: str) -> None:
    one = lightning.call(alone, FEATURES[features])
    workers = lightning.call(together, strategy, FEATURES[features])
    for worker in workers:
        for ours, theirs in zip(worker["parameters"], one["parameters"], strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)
        assert (worker["steps"], worker["epochs"], worker["rate"]) == (one["steps"], one["epochs"], one["rate"])
        assert worker["metrics"] == pytest.approx(one["metrics"], abs=1e-5)
    assert sorted(workers[0]["seen"] + workers[1]["seen"]) == sorted(one["seen"])


@pytest.mark.parametrize("strategy", ["async", "k-batch-async:k=2", "ssp:s=1"])
def test_an_asynchronous_epoch_trains_on_every_sample_once_and_validates_one_model(
    lightning: Preloaded, strategy: str
) -> None:
    accumulated = 2 if strategy == "async" else 1
    workers = lightning.call(together, strategy, {"gradient_clip_val": 1.0, "accumulate_grad_batches": accumulated})
    assert sorted(workers[0]["seen"] + workers[1]["seen"]) == sorted([*range(SAMPLES)] * 2)
    first, second = workers
    for ours, theirs in zip(first["parameters"], second["parameters"], strict=True):
        assert torch.equal(ours, theirs)
    assert first["epochs"] == second["epochs"] == 2
    assert first["metrics"]["train_count"] == second["metrics"]["train_count"] == SAMPLES
    own = [f"train_loss{end}" for end in ("", "_step")]  # of this worker's last step
    shared = {name: value for name, value in first["metrics"].items() if name not in own}
    assert shared == pytest.approx({name: second["metrics"][name] for name in shared})
    assert first["metrics"]["val_count"] == 17
    net = module()
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), first["parameters"], strict=True):
            parameter.copy_(value)
        x, y, _ = numbers(17).tensors
        assert first["metrics"]["val_loss"] == pytest.approx(float(mse_loss(net.net(x), y)), abs=1e-5)


def test_cancelled_steps_leave_no_trace_in_the_trainer(lightning: Preloaded, tmp_path: Path) -> None:
    slow = {1: parse_slowness(["1:0.05+exp(0.01)"], 2)[1]}
    workers = lightning.call(together, "k-sync:k=1", {}, {"slow": slow, "folder": str(tmp_path)})
    first, second = workers
    assert first["metrics"]["train_count"] == second["metrics"]["train_count"] == SAMPLES
    assert first["metrics"]["train_error"] == second["metrics"]["train_error"]
    summary = merge(tmp_path, 2)
    assert summary.cancelled > 0
    assert summary.updates == 2 * -(-SAMPLES // BATCH)
    assert first["steps"] == second["steps"] <= summary.updates
    # Only a gradient that comes in the moment of its cancellation is computed and not used.
    unused = sum(one.samples for one in summary.workers.values()) - 2 * SAMPLES
    assert (summary.dropped > 0) == (unused > 0) and unused <= BATCH * summary.dropped


# -- checkpoints -----------------------------------------------------------------------------------------------------


def kept(folder: Path, **options: Any) -> dict[str, Any]:
    """Options of a Trainer that keeps the checkpoint of every epoch."""
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    checkpoint = ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=-1)
    return {"enable_checkpointing": True, "callbacks": [checkpoint, EarlyStopping("val_loss", patience=5)], **options}


def resumed(strategy: str, folder: Path) -> list[dict[str, Any]]:
    """Two epochs by workers that begin with the checkpoint of the first."""

    def work(_team: None, epochs: int, path: str | None) -> dict[str, Any]:
        from paceline.integrations.lightning import PacelineStrategy

        return fitted(PacelineStrategy(), BATCH, path, **kept(folder, max_epochs=epochs))

    launch = under(strategy, "lead")
    run_team(work, 2, 1, None, launch=launch, joined=False)
    return run_team(work, 2, 2, str(folder / "epoch=0.ckpt"), launch=launch, joined=False)


@pytest.mark.parametrize("strategy", ["all-reduce", "sync"])
def test_a_run_goes_on_from_a_checkpoint_as_one_process_does(
    lightning: Preloaded, strategy: str, tmp_path: Path
) -> None:
    one = lightning.call(alone_resumed, tmp_path / "one")
    workers = lightning.call(resumed, strategy, tmp_path / "two")
    for worker in workers:
        for ours, theirs in zip(worker["parameters"], one["parameters"], strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)
        assert (worker["steps"], worker["epochs"], worker["rate"]) == (one["steps"], one["epochs"], one["rate"])
    for name in ("epoch=0.ckpt", "epoch=1.ckpt"):
        ours, theirs = (torch.load(tmp_path / folder / name, weights_only=True) for folder in ("two", "one"))
        assert ours.keys() == theirs.keys()
        assert ours["global_step"] == theirs["global_step"]
        for key, value in theirs["state_dict"].items():
            assert torch.allclose(ours["state_dict"][key], value, rtol=0, atol=1e-6)
            assert ours["state_dict"][key].untyped_storage().nbytes() == value.nbytes
        state, expected = (one["optimizer_states"][0]["state"] for one in (ours, theirs))
        for number, values in expected.items():
            assert torch.allclose(state[number]["exp_avg"], values["exp_avg"], rtol=0, atol=1e-6)


def alone_resumed(folder: Path) -> dict[str, Any]:
    fitted("auto", 2 * BATCH, devices=1, **kept(folder, max_epochs=1))
    return fitted("auto", 2 * BATCH, str(folder / "epoch=0.ckpt"), devices=1, **kept(folder, max_epochs=2))


@pytest.mark.parametrize("strategy", ["async", "k-sync:k=1"])
def test_an_asynchronous_run_goes_on_from_a_checkpoint(lightning: Preloaded, strategy: str, tmp_path: Path) -> None:
    first, second = lightning.call(resumed, strategy, tmp_path)
    saved = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)
    assert first["epochs"] == second["epochs"] == saved["epoch"] + 1 == 2
    assert sorted(first["seen"] + second["seen"]) == [*range(SAMPLES)] or strategy != "async"
    assert first["metrics"]["train_count"] == SAMPLES
    for value, parameter in zip(saved["state_dict"].values(), first["parameters"], strict=True):
        assert torch.equal(value, parameter)
    updates = saved["optimizer_states"][0]["state"][0]["step"]
    assert updates == 2 * -(-SAMPLES // BATCH) or strategy != "async"


# -- processes -------------------------------------------------------------------------------------------------------

EXAMPLES = Path(__file__).parents[2] / "examples"


def lines(command: list[Any], folder: Path) -> list[str]:
    """What the lead of a program prints."""
    fork_programs()
    ended = done(command, folder)
    assert ended.code == 0, ended.err
    return [line.removeprefix("[0] ") for line in ended.out.splitlines()]


@pytest.mark.parametrize("strategy", ["all-reduce", "async"])
def test_devices_start_the_workers_and_so_does_the_launcher(
    lightning: Preloaded, strategy: str, tmp_path: Path
) -> None:
    script = EXAMPLES / "lightning_boring.py"
    by_itself = lightning.call(lines, [PYTHON, script, "--devices", "2", "--strategy", strategy], tmp_path)
    command = [PACELINE, "run", script, "--workers", "2", "--strategy", strategy, "--name", "boring", "--quiet"]
    by_launcher = lightning.call(lines, [*command, "--", "--strategy", "sync"], tmp_path)
    told = json.loads((tmp_path / "runs" / "boring" / "summary.json").read_bytes())
    assert told["strategy"] == strategy
    assert told["updates"] == (64 if strategy == "all-reduce" else 128)
    found = [line for said in (by_itself, by_launcher) for line in said if "sum of the weights" in line]
    assert len(found) == 2
    assert found[0] == found[1] or strategy == "async"


def test_the_digits_are_learnt_and_gone_on_with(lightning: Preloaded, tmp_path: Path) -> None:
    command = [
        PACELINE,
        "run",
        EXAMPLES / "lightning_digits.py",
        "--workers",
        "2",
        "--strategy",
        "k-sync:k=1",
        "--quiet",
        "--",
    ]
    first = lightning.call(lines, [*command, "--epochs", "2"], tmp_path)
    accuracy = [float(one) for one in re.findall(r"accuracy ([\d.]+)%", first[-1])]
    assert accuracy[0] > 70
    more = ["--epochs", "3", "--resume", "checkpoints/last.ckpt"]
    again = lightning.call(lines, [*command, *more], tmp_path)
    assert float(re.findall(r"accuracy ([\d.]+)%", again[-1])[0]) > 70
    assert (tmp_path / "checkpoints" / "last.ckpt").is_file()


# -- other loops and stages ------------------------------------------------------------------------------------------


def manual(strategy: Any, batch: int, **options: Any) -> dict[str, Any]:
    """Manual optimization, a scheduler on a plateau, and evaluation after training."""
    import lightning

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel("ERROR")
    lightning.seed_everything(1, verbose=False)

    class Manual(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net, self.rival = nn.Linear(6, 1), nn.Linear(6, 1)
            self.found: list[float] = []

        def training_step(self, batch: list[Tensor], _: int) -> None:
            x, y, _numbers = batch
            optimizer: Any
            for net, optimizer in zip((self.net, self.rival), self.optimizers(), strict=True):  # type: ignore[arg-type]
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward(mse_loss(net(x), y) + mse_loss(self.net(x), self.rival(x)))
                self.clip_gradients(optimizer, 5.0)
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def on_train_epoch_end(self) -> None:
            schedule: Any = self.lr_schedulers()
            schedule.step(self.trainer.callback_metrics["val"])

        def validation_step(self, batch: list[Tensor], _: int) -> None:
            x, y, _numbers = batch
            self.log("val", mse_loss(self.net(x), y), sync_dist=True)
            self.found += self.all_gather(self.net(x)).flatten().tolist()

        test_step = validation_step

        def predict_step(self, batch: list[Tensor], _: int) -> Tensor:
            return self.net(batch[0])  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (self.net, self.rival)]
            return optimizers, [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[0], patience=0)]

    net = Manual()
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = lightning.Trainer(strategy=strategy, accelerator="cpu", max_epochs=3, **quiet, **options)
    test = DataLoader(numbers(11), batch_size=4)
    before = trainer.validate(net, test, verbose=False)
    trainer.fit(net, DataLoader(numbers(), batch_size=batch), test)
    after = trainer.test(net, test, verbose=False)
    predicted = trainer.predict(net, test)
    return {
        "weight": net.net.weight.detach().clone(),
        "metrics": [before[0]["val"], after[0]["val"], trainer.global_step],
        "found": net.found,
        "predicted": torch.cat(predicted),  # type: ignore[arg-type]
    }


def manual_together(strategy: str) -> list[dict[str, Any]]:
    def work(_team: None) -> dict[str, Any]:
        from paceline.integrations.lightning import PacelineStrategy

        return manual(PacelineStrategy(), BATCH)

    return run_team(work, 2, launch=under(strategy, "lead"), joined=False)


@pytest.mark.parametrize("strategy", ["all-reduce", "sync", "async"])
def test_manual_optimization_and_all_stages_are_those_of_one_process(lightning: Preloaded, strategy: str) -> None:
    one = lightning.call(manual, "auto", 2 * BATCH)
    first, second = lightning.call(manual_together, strategy)
    assert torch.equal(first["weight"], second["weight"])
    assert torch.equal(first["predicted"], second["predicted"])
    assert first["predicted"].shape == one["predicted"].shape
    assert first["metrics"][0] == second["metrics"][0] == pytest.approx(one["metrics"][0], abs=1e-6)
    assert len(first["found"]) == len(one["found"])
    if strategy != "async":
        assert torch.allclose(first["weight"], one["weight"], rtol=0, atol=1e-6)
        assert first["metrics"] == second["metrics"] == pytest.approx(one["metrics"], abs=1e-6)
        assert first["found"] == pytest.approx(one["found"], abs=1e-5)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "pipeline": ("pipeline:stages=2", {}, "splits the model over workers, which Lightning cannot do"),
    "tensor": ("tensor:degree=2", {}, "splits the model over workers"),
    "validation inside an epoch": ("async", {"val_check_interval": 2}, "at the end of an epoch only"),
    "accumulation": ("k-batch-async:k=2", {"accumulate_grad_batches": 2}, "give the loader a larger batch_size"),
    "a barrier inside an epoch": ("async", {"barrier": True}, "would wait for ever; do it at the end of an epoch"),
    "data that cannot be divided": ("all-reduce", {"data": "batches"}, "is a Batches, which cannot be divided"),
    "data without a length": ("all-reduce", {"data": "stream"}, "has no length"),
    "a distributed sampler": ("all-reduce", {"data": "sampler"}, "has a DistributedSampler"),
}


def refusal(strategy: str, options: dict[str, Any]) -> list[str]:
    def work(_team: None) -> str:
        import lightning

        from paceline.integrations.lightning import PacelineStrategy

        class Waiting(lightning.Callback):
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                trainer.strategy.barrier("mine")

        warnings.simplefilter("ignore")
        given = dict(options)
        callbacks = [Waiting()] if given.pop("barrier", False) else []
        data: Any = DataLoader(numbers(), batch_size=BATCH)
        kind = given.pop("data", None)
        if kind == "batches":
            data = type("Batches", (), {"__iter__": data.__iter__})()
        elif kind == "stream":
            data = DataLoader(type("Stream", (IterableDataset,), {"__iter__": data.__iter__})())
        elif kind == "sampler":
            data = DataLoader(numbers(), sampler=DistributedSampler(numbers(), num_replicas=2, rank=0))
        quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        with pytest.raises(UsageError) as refused:
            trainer = lightning.Trainer(
                strategy=PacelineStrategy(), accelerator="cpu", callbacks=callbacks, max_epochs=1, **quiet, **given
            )
            trainer.fit(module(), data, DataLoader(numbers(4)))
        return str(refused.value)

    servers = "lead" if "sync" in strategy or "async" in strategy else None
    return run_team(work, 2, launch=under(strategy, servers), joined=False)


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_in_one_sentence_on_all_workers(lightning: Preloaded, what: str) -> None:
    strategy, options, sentence = REFUSED[what]
    said = lightning.call(refusal, strategy, options)
    assert [sentence in one for one in said] == [True, True], said
