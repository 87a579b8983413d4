"""A notebook's cell can be run again; where a team cannot be joined twice, the error names the way out."""

from __future__ import annotations

import json
from pathlib import Path

from helpers.forks import done, played
from helpers.support import PYTHON, write_script

CELL = """
import torch, paceline
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))

def objects():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=8)

def loop(team, model, optimizer, loader):
    for x, y in loader:
        with team.step():
            mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [value.tolist() for value in model.parameters()]
"""


def test_a_cell_that_joins_and_sets_up_can_be_run_again(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        CELL
        + """
def cell(**options):
    team = paceline.join(**options)
    return loop(team, *team.setup(*objects(), scale_lr="linear", global_batch=16, warmup=4))

first = cell(name="one")
assert cell() == first  # also its warmup, which counts updates
assert cell(name="two") == first
assert paceline.join().rank == 0
""",
    )
    outcome = done([PYTHON, script], tmp_path)
    assert outcome.code == 0, outcome.err
    assert outcome.err == ""
    for name in ("one", "two"):
        summary = json.loads((tmp_path / "runs" / name / "summary.json").read_bytes())
        assert (summary["updates"], summary["minibatches"]) == (4, 4)  # of the last time alone


def test_a_cell_that_sets_up_what_it_got_from_setup_goes_on_training(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        CELL
        + """
model, optimizer, loader = objects()
expected = objects()
for _ in range(2):
    team = paceline.join()
    model, optimizer, loader = team.setup(model, optimizer, loader)
    got = loop(team, model, optimizer, loader)
for _ in range(2):
    for x, y in expected[2]:
        mse_loss(expected[0](x), y).backward()
        expected[1].step()
        expected[1].zero_grad()
assert got == [value.tolist() for value in expected[0].parameters()]
team.close()
assert "step" not in vars(optimizer)  # plain torch again
""",
    )
    outcome = done([PYTHON, script], tmp_path)
    assert outcome.code == 0, outcome.err


def test_a_cell_with_several_models_can_be_run_again(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        CELL
        + """
def cell():
    team = paceline.join()
    (a, optimizer_a, loader), (b, optimizer_b, _) = objects(), objects()
    (a, b), (optimizer_a, optimizer_b), loader = team.setup([a, b], [optimizer_a, optimizer_b], loader)
    for x, y in loader:
        with team.step():
            mse_loss(a(x), y).backward()
            optimizer_a.step()
            optimizer_a.zero_grad()
            mse_loss(b(x), a(x).detach()).backward()
            optimizer_b.step()
            optimizer_b.zero_grad()
    return [value.tolist() for model in (a, b) for value in model.parameters()]

assert cell() == cell()
""",
    )
    outcome = done([PYTHON, script], tmp_path)
    assert outcome.code == 0, outcome.err


def test_a_second_setup_without_joining_again_is_told_to(tmp_path: Path) -> None:
    script = write_script(tmp_path, CELL + "team = paceline.join()\nteam.setup(*objects())\nteam.setup(*objects())\n")
    outcome = done([PYTHON, script], tmp_path)
    assert outcome.code != 0
    assert "Call paceline.join() again to begin anew" in outcome.err


def test_a_worker_of_several_is_told_to_start_another_run(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        CELL
        + """
team = paceline.join()
loop(team, *team.setup(*objects()))
try:
    paceline.join().setup(*objects())
except paceline.UsageError as error:
    print(error)
team.close()
paceline.join()
""",
    )
    outcome = played([script, "--workers", "2", "--quiet"], tmp_path)
    assert outcome.code == 2
    assert "setup was called before" in outcome.out and "Start a run for each" in outcome.out
    assert "has left its team" in outcome.err and "start a run for each" in outcome.err
    assert outcome.tracebacks == 0
