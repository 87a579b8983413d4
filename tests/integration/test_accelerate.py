"""Accelerate under Paceline's strategies, and its own DistributedDataParallel on Paceline's backend."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.forks import done
from helpers.preloaded import Preloaded
from helpers.support import PACELINE, PYTHON, TORCHRUN
from helpers.teams import run_team
from helpers.training import under
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import UsageError

SCRIPT = Path(__file__).parents[2] / "examples" / "accelerate_text.py"
IMPORT = "from paceline.integrations.accelerate import Accelerator"


@pytest.fixture(scope="module")
def accelerate() -> Iterator[Preloaded]:
    with Preloaded("torch._dynamo", "accelerate", "paceline.integrations.accelerate", "helpers.teams") as process:
        yield process


def said(command: list[Any], folder: Path) -> list[str]:
    """What the lead of a program prints about its training."""
    ended = done(command, folder)
    assert ended.code == 0, ended.err
    lines = [line.removeprefix("[0] ") for line in ended.out.splitlines()]
    return [line for line in lines if line.startswith(("epoch", "squared"))]


def by_team(strategy: str, folder: Path, *arguments: str, script: Path = SCRIPT, name: str = "text") -> list[Any]:
    options = ["--workers", "2", "--strategy", strategy, "--name", name, "--quiet"]
    return [PACELINE, "run", script, *options, "--", *arguments]


@pytest.mark.parametrize("strategy", ["all-reduce", "sync"])
def test_an_example_of_accelerate_trains_the_model_of_one_process(
    accelerate: Preloaded, strategy: str, tmp_path: Path
) -> None:
    plain = tmp_path / "plain.py"
    plain.write_text(SCRIPT.read_text().replace(IMPORT, "from accelerate import Accelerator"))
    one = accelerate.call(said, [PYTHON, plain, "--batch", "32", "--accumulate", "2", "--epochs", "2"], tmp_path)
    two = accelerate.call(said, by_team(strategy, tmp_path, "--accumulate", "2", "--epochs", "2"), tmp_path)
    assert two[:2] == one[:2]  # accuracies of all 130 texts
    norms = [float(re.findall(r"parameters ([\d.]+)", lines[2])[0]) for lines in (one, two)]
    assert norms[0] == pytest.approx(norms[1], abs=1e-3)
    assert one[2].split("learning rate")[1] == two[2].split("learning rate")[1]
    unmodified = by_team(strategy, tmp_path, "--accumulate", "2", "--epochs", "2", script=plain, name="unmodified")
    assert accelerate.call(said, unmodified, tmp_path) == two


@pytest.mark.parametrize("strategy", ["async", "k-sync:k=1"])
def test_it_trains_under_an_asynchronous_policy(accelerate: Preloaded, strategy: str, tmp_path: Path) -> None:
    lines = accelerate.call(said, by_team(strategy, tmp_path, "--epochs", "2"), tmp_path)
    assert [line.split()[-1] for line in lines[:2]] == ["130", "130"]
    assert float(lines[1].split()[3]) > 0.6


def test_distributed_data_parallel_runs_on_the_backend(accelerate: Preloaded, tmp_path: Path) -> None:
    script = tmp_path / "ddp.py"
    text = SCRIPT.read_text().replace(
        IMPORT, "import paceline.integrations.accelerate\nfrom accelerate import Accelerator"
    )
    group = "kwargs_handlers=[InitProcessGroupKwargs(backend='paceline')], "
    text = text.replace("Accelerator(cpu=True, ", f"Accelerator(cpu=True, {group}")
    text = text.replace("import set_seed", "import InitProcessGroupKwargs, set_seed")
    script.write_text(
        text.replace("    set_seed(", "    print('epoch', torch.distributed.get_backend())\n    set_seed(")
    )
    lines = accelerate.call(said, [TORCHRUN, "--nproc-per-node", "2", script, "--epochs", "1"], tmp_path)
    assert lines.count("epoch paceline") == 2
    assert any("of 130" in line for line in lines)


# -- state -----------------------------------------------------------------------------------------------------------


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(38, 4, generator=generator)
    return TensorDataset(x, x[:, :1])


def trained(accelerator: Any, epochs: int, load: str | None = None, save: str | None = None, batch: int = 3) -> Any:
    from accelerate.utils import set_seed

    set_seed(3)
    model: Any = nn.Linear(4, 1)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.05)
    loader: Any = DataLoader(data(), batch_size=batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if load is not None:
        accelerator.load_state(load)
    counts = []
    for _ in range(epochs):
        for x, y in loader:
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            counts.append(len(x))
    if save is not None:
        accelerator.wait_for_everyone()
        accelerator.save_state(save)
    state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    return state, sum(counts), optimizer.optimizer.state_dict()["state"][0]["step"].clone()


def resumed_alone(folder: Path) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    trained(Accelerator(cpu=True), 1, save=str(folder / "one"), batch=6)
    AcceleratorState._reset_state(True)
    return trained(Accelerator(cpu=True), 1, load=str(folder / "one"), batch=6)


def resumed(strategy: str, folder: Path) -> list[Any]:
    def work(_team: None, load: str | None, save: str | None) -> Any:
        from paceline.integrations.accelerate import Accelerator

        return trained(Accelerator(), 1, load, save)

    path = str(folder / "two")
    with_port = {"MASTER_ADDR": "127.0.0.1"}
    runs = [(None, path), (path, None)]
    return [
        run_team(
            work, 2, *run, launch=under(strategy, "lead"), joined=False, more={**with_port, "MASTER_PORT": str(port())}
        )
        for run in runs
    ][1]


def port() -> int:
    from helpers.support import free_port

    return free_port()


@pytest.mark.parametrize("strategy", ["all-reduce", "async"])
def test_a_saved_state_is_gone_on_from(accelerate: Preloaded, strategy: str, tmp_path: Path) -> None:
    state, samples, steps = accelerate.call(resumed_alone, tmp_path)
    workers = accelerate.call(resumed, strategy, tmp_path)
    assert sum(count for _, count, _ in workers) == samples == 38
    if strategy == "all-reduce":
        assert workers[0][2] == steps
        for name, value in state.items():
            assert torch.allclose(workers[1][0][name], value, rtol=0, atol=1e-6)
    else:
        assert workers[0][2] == 2 * 13


# -- refusals --------------------------------------------------------------------------------------------------------


def refusal(strategy: str, what: str) -> list[str]:
    def work(_team: None) -> str:
        import accelerate as plain

        import paceline
        from paceline.integrations.accelerate import Accelerator

        with pytest.raises(UsageError) as refused:
            if what == "plugin":
                Accelerator(fsdp_plugin=object())
            elif what == "twice":
                team = paceline.join()
                model = nn.Linear(4, 1)
                team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
                plain.Accelerator(cpu=True).prepare(model)
            else:
                accelerator = Accelerator()
                model, optimizer, loader = accelerator.prepare(
                    model := nn.Linear(4, 1),
                    torch.optim.SGD(model.parameters(), lr=0.1),
                    DataLoader(data(), batch_size=3),
                )
                for x, y in loader:
                    loss = nn.functional.mse_loss(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    accelerator.gather(loss)
        return str(refused.value)

    more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port())}
    servers = "lead" if strategy == "async" else None
    return run_team(work, 2, launch=under(strategy, servers), joined=False, more=more)


@pytest.mark.parametrize(
    ("strategy", "what", "sentence"),
    [
        ("tensor:degree=2", "strategy", "splits the model over workers, which Accelerate cannot do"),
        ("all-reduce", "plugin", "fsdp_plugin divides the model by itself"),
        ("all-reduce", "twice", "DistributedDataParallel would average its gradients once more"),
        ("async", "gather", "a gather inside an epoch would wait for ever"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence_on_all_workers(
    accelerate: Preloaded, strategy: str, what: str, sentence: str
) -> None:
    found = accelerate.call(refusal, strategy, what)
    assert [sentence in one for one in found] == [True, True], found
