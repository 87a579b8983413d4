"""Scripts of the Hugging Face Trainer, unmodified, under `paceline run`: model, losses and files of one process."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.forks import done
from helpers.preloaded import Preloaded
from helpers.support import PACELINE, PYTHON, TORCHRUN

SCRIPT = Path(__file__).parents[2] / "examples" / "huggingface_trainer.py"
MODULES = ("torch._dynamo", "accelerate", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2")


@pytest.fixture(scope="module")
def huggingface() -> Iterator[Preloaded]:
    with Preloaded(*MODULES, "paceline.integrations.transformers", "helpers.forks") as process:
        yield process


def ended(command: list[Any], folder: Path) -> tuple[int, str, str]:
    outcome = done(command, folder, 120.0)
    return outcome.code, outcome.out, outcome.err


def numbers(text: str) -> list[float]:
    """The squared norm of the parameters and the training losses that the script prints."""
    (line,) = (one for one in text.splitlines() if "RESULT" in one)
    found = [float(one) for one in re.findall(r"\d+\.\d+", line)]
    return [found[0], *found[2:]]


def result(process: Preloaded, command: list[Any], folder: Path) -> list[float]:
    code, out, err = process.call(ended, command, folder)
    assert code == 0, err
    return numbers(out)


def team(strategy: str, *arguments: str, script: Path = SCRIPT) -> list[Any]:
    return [PACELINE, "run", script, "--workers", "2", "--strategy", strategy, "--quiet", "--", *arguments]


CLASSIFIER = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

set_seed(3)
shape = dict(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
model = BertForSequenceClassification(BertConfig(**shape, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
tokens = torch.randint(0, 20, (22, 5), generator=torch.Generator().manual_seed(1))
rows = [{"input_ids": row, "labels": row[0] % 2} for row in tokens]
options = dict(output_dir="out", num_train_epochs=2, learning_rate=0.5, optim="sgd", logging_steps=1, max_grad_norm=0)
options |= dict(per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH, use_cpu=True, report_to=[])
trainer = Trainer(model, TrainingArguments(**options, save_strategy="no", disable_tqdm=True), train_dataset=rows)
before = trainer.evaluate(rows[:16])["eval_loss"]
trainer.train()
losses = [round(one["loss"], 6) for one in trainer.state.log_history if "loss" in one]
if trainer.is_world_process_zero():
    print("RESULT", f"{sum(float(p.double().pow(2).sum()) for p in model.parameters()):.6f}", before, before, *losses)
"""


def states(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors"), json.loads((folder / "trainer_state.json").read_text())


@pytest.mark.parametrize("accumulate", ["1", "2"])
@pytest.mark.parametrize("strategy", ["all-reduce", "sync"])
def test_a_script_without_a_line_of_paceline_trains_the_model_of_one_process(
    huggingface: Preloaded, strategy: str, accumulate: str, tmp_path: Path
) -> None:
    # Adam makes steps of rounding errors where a gradient is zero, as that of the keys' bias is.
    script, options = tmp_path / "sgd.py", ["--accumulate", accumulate]
    script.write_text(SCRIPT.read_text().replace("learning_rate=0.01", 'learning_rate=0.5, optim="sgd"'))
    one = result(huggingface, [PYTHON, script, "--batch", "16", "--output", "one", *options], tmp_path)
    two = result(huggingface, team(strategy, "--output", "two", *options, script=script), tmp_path)
    assert two == pytest.approx(one, abs=1e-4)  # also the losses, which are means over all workers' tokens
    steps = 12 * 2 // int(accumulate)
    ours, theirs = (states(tmp_path / name / f"checkpoint-{steps}") for name in ("two", "one"))
    assert ours[0].keys() == theirs[0].keys()
    for name, value in theirs[0].items():
        assert torch.allclose(ours[0][name], value, rtol=0, atol=2e-6)
    assert ours[1]["global_step"] == theirs[1]["global_step"] == steps
    again = ["--output", "two", *options, "--resume", f"two/checkpoint-{steps // 2}"]
    resumed = result(huggingface, team(strategy, *again, script=script), tmp_path)
    assert resumed[0] == pytest.approx(one[0], abs=1e-3)


def test_it_trains_under_an_asynchronous_policy_and_logs_and_saves_once(huggingface: Preloaded, tmp_path: Path) -> None:
    code, out, err = huggingface.call(ended, team("async", "--output", "two"), tmp_path)
    assert code == 0, err
    losses = numbers(out)[1:]
    assert losses[-1] < losses[0]
    assert out.count("eval_loss") == 3  # of each epoch, and of the script's own
    assert "the loss that is logged is the lead's own" in err
    weights, state = states(tmp_path / "two" / "checkpoint-24")
    assert state["global_step"] == 24
    norm = sum(float(value.double().square().sum()) for value in weights.values())
    assert norm == pytest.approx(numbers(out)[0], rel=1e-5)


def test_torchrun_starts_the_same(huggingface: Preloaded, tmp_path: Path) -> None:
    command = [
        TORCHRUN,
        "--nproc-per-node",
        "2",
        "-m",
        "paceline",
        "run",
        SCRIPT,
        "--strategy",
        "async",
        "--",
        "--epochs",
        "1",
    ]
    code, out, err = huggingface.call(ended, command, tmp_path)
    assert code == 0, err
    assert out.count("RESULT") == 1
    assert "under 'async' workers are at different steps" in err


def test_one_line_is_enough_elsewhere_and_what_cannot_be_is_refused(huggingface: Preloaded, tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    text = SCRIPT.read_text().replace("Trainer, TrainingArguments", "TrainingArguments")
    script.write_text(
        text.replace("import argparse\n", "import argparse\nfrom paceline.integrations.transformers import Trainer\n")
    )
    arguments = ["--batch", "8", "--epochs", "1"]
    one = result(huggingface, [PYTHON, SCRIPT, "--batch", "16", "--epochs", "1"], tmp_path)
    assert result(huggingface, [TORCHRUN, "--nproc-per-node", "2", script, *arguments], tmp_path) == pytest.approx(
        one, abs=1e-4
    )
    for strategy, sentence in (
        ("k-sync:k=1", "cancels steps, which the loop of the Hugging Face Trainer cannot leave"),
        ("tensor:degree=2", "splits the model over workers, which the Hugging Face Trainer cannot do"),
    ):
        code, _, err = huggingface.call(ended, team(strategy), tmp_path)
        assert code == 2
        assert sentence in err


@pytest.mark.parametrize("strategy", ["all-reduce", "sync"])
def test_a_loss_that_does_not_use_the_number_of_items_is_that_of_one_process(
    huggingface: Preloaded, strategy: str, tmp_path: Path
) -> None:
    """Hugging Face multiplies it by the number of processes, also under its own DistributedDataParallel."""
    for name, batch in (("one", "8"), ("two", "4")):
        (tmp_path / f"{name}.py").write_text(CLASSIFIER.replace("BATCH", batch))
    one = result(huggingface, [PYTHON, tmp_path / "one.py"], tmp_path)
    two = result(huggingface, team(strategy, script=tmp_path / "two.py"), tmp_path)
    assert len(one) > 6
    assert two == pytest.approx(one, abs=2e-5)
