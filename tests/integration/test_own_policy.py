"""A policy that a user brings: it runs, is simulated and is planned, from a module beside the script."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.forks import done
from helpers.support import PACELINE, Outcome, write_script

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = """
import sys

import paceline
import torch
from torch.utils.data import DataLoader, TensorDataset

if len(sys.argv) > 1:
    from own_policy import Quorum

    team = paceline.join(strategy=Quorum(share=float(sys.argv[1])))
else:
    team = paceline.join()
torch.manual_seed(0)
x = torch.randn(96, 8)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4 * team.world_size)
model, optimizer, loader = team.setup(model, optimizer, loader)
for inputs, targets in loader:
    with team.step():
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        team.report(loss=loss.item())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_script(tmp_path, SCRIPT)
    shutil.copy(EXAMPLES / "own_policy.py", tmp_path)
    return tmp_path


def paceline(folder: Path, *words: str) -> Outcome:
    return done([PACELINE, *words], folder, 110)


def test_it_runs_and_a_plan_from_that_run_ranks_it(folder: Path) -> None:
    spec = "own_policy:Quorum:share=0.7"
    ran = paceline(folder, "run", "train.py", "--workers", "3", "--strategy", spec, "--name", "own", "--json")
    assert ran.code == 0, ran.err
    summary = json.loads(ran.out)
    assert summary["strategy"] == spec
    assert summary["minibatches"] == 24
    assert summary["updates"] < 24  # three of three workers make one: ceil(0.7 * 3)
    planned = paceline(
        folder, "plan", "--from", "runs/own", "--goal", "throughput", "-s", "own_policy:Quorum", "--json"
    )
    assert planned.code == 0, planned.err
    assert any(one["strategy"] == "own_policy:Quorum" for one in json.loads(planned.out)["choices"])


def test_a_script_may_join_with_it_as_a_value(folder: Path) -> None:
    ran = paceline(folder, "run", "train.py", "--workers", "2", "--json", "--", "1.0")
    assert ran.code == 0, ran.err
    summary = json.loads(ran.out)
    assert summary["strategy"] == "own_policy:Quorum:share=1.0"
    assert summary["updates"] == 12


def test_it_is_simulated_beside_others(folder: Path) -> None:
    words = ["simulate", "-w", "4", "-s", "own_policy:Quorum:share=1.0,late=0", "-s", "sync", "--compute", "1"]
    told = paceline(folder, *words, "--updates", "200", "--json")
    assert told.code == 0, told.err
    own, sync = json.loads(told.out)
    assert own["strategy"] == "own_policy:Quorum:share=1.0,late=0"
    assert own["seconds_per_update"] == pytest.approx(sync["seconds_per_update"])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nowhere:Nothing", "there is no module 'nowhere' beside the script or in the current folder"),
        ("own_policy:Nothing", "module 'own_policy' has no class 'Nothing'"),
        ("own_policy:math", "'math' is not a subclass of paceline.policies.Policy"),
        ("own_policy:Policy", "class 'Policy' does not define 'arrive'"),
        ("own_policy:Quorum:k=2", "'own_policy:Quorum' has no option 'k'; it takes 'share', 'late', 'servers'"),
        ("broken:Policy", "importing 'broken' fails: ZeroDivisionError: division by zero"),
    ],
)
def test_one_that_cannot_be_found_is_one_sentence(spec: str, words: str, folder: Path) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    for command in (["run", "train.py"], ["simulate"], ["plan", "train.py"]):
        said = paceline(folder, *command, "--strategy", spec)
        assert said.code == 2
        assert words in said.err
        assert "Traceback" not in said.err


def test_one_of_the_script_itself_is_refused_where_a_server_process_would_need_it(folder: Path) -> None:
    text = (folder / "own_policy.py").read_text() + SCRIPT.replace("    from own_policy import Quorum\n", "")
    script = write_script(folder, text, "whole.py")
    said = paceline(folder, "run", str(script), "--workers", "2", "--", "1.0")
    assert said.code == 2
    assert "the policy Quorum is defined in the script itself, where a server process cannot find it" in said.err
    ran = paceline(folder, "run", str(script), "--workers", "2", "--servers", "lead", "--", "1.0")
    assert ran.code == 0, ran.err
