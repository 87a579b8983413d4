"""`paceline plan --partition` looks into a script's model, and says where to cut it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.forks import Fork, done
from helpers.support import PACELINE, write_script
from helpers.teams import run_command

from paceline.cli import partition
from paceline.pipeline.script_profile import profile_script

SCRIPT = """
import torch, paceline
torch.set_num_threads(1)
team = paceline.join()
model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range({layers})))
model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
with torch.no_grad():
    model(torch.ones(2, 128))
loss = model(torch.ones(32, 128)).mean()
raise SystemExit("it went on")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return write_script(tmp_path, SCRIPT.replace("{layers}", "8"))


def test_a_scripts_model_is_cut_and_drawn(script: Path, tmp_path: Path) -> None:
    command = [PACELINE, "plan", "--partition", str(script), "--stages", "2", "--microbatches", "4"]
    told = json.loads(done([*command, "--figure", "cut.svg", "--pace", "1:0.25", "--json"], tmp_path).out)
    assert len(told["operations"]) == 8
    assert [stage["last"] for stage in told["stages"]][-1] == 8
    assert told["stages"][0]["last"] > 4
    assert 0 < told["bubble"] < 1 and abs(told["formula"] - 1 / 5) < 1e-9
    assert (tmp_path / "cut.svg").read_text().startswith("<svg")


def test_devices_and_links_may_all_be_different(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", Fork)
        sheet = profile_script(script, [], 8)
    monkeypatch.setattr(partition, "profile_script", lambda *_: sheet)  # which is the same for all of them

    def plan(*words: str) -> Any:
        return run_command(["plan", "--partition", script, "--stages", "3", *words], tmp_path)

    told = json.loads(plan("--memory", "1GB,0:350kB", "--json").stdout)
    # A layer is 66 kB, four times that with its gradient and the optimizer's state.
    assert told["stages"][0]["last"] == 1
    slow = json.loads(plan("--bandwidth", "unlimited,2:1kB/s", "--json").stdout)
    assert slow["slowest"] > 1 > told["slowest"]
    links: Any = {"hosts": ["a", "a", "b"], "findings": []}
    links["latency"] = [[None, 1e-6, 1e-3], [1e-6, None, 2e-3], [1e-3, 1e-3, None]]
    links["bandwidth"] = [[None, 1e9, 1e5], [1e9, None, 1e5], [1e9, 1e9, None]]
    (tmp_path / "links.json").write_text(json.dumps({"machines": [], "links": links}))
    measured = json.loads(plan("--links", "links.json", "--json").stdout)
    inside, between = measured["links"]
    crossing = 32 * 128 * 4  # of the whole batch
    assert (inside["bytes"], inside["seconds"]) == (crossing, 0.0)  # through memory
    assert between["seconds"] == pytest.approx(crossing / 1e5)  # the slower direction's; latency occupies no link
    assert measured["seconds_per_step"] > crossing / 1e5 + 2e-3 > told["seconds_per_step"]
    text = plan("--links", "links.json").stdout
    assert "stage 1 to 2: 16.4 kB per step each way" in text, text
    assert "leave out --bandwidth" in plan("--links", "links.json", "--latency", "1ms").stderr
    assert "is no output of paceline doctor" in plan("--links", str(script)).stderr
    outcome = plan("--replicate", "--memory", "1GB,0:2GB")
    assert outcome.returncode == 2 and "--replicate is for devices and links that are all equal" in outcome.stderr


def test_more_stages_than_layers_are_refused_in_one_sentence(tmp_path: Path) -> None:
    script = write_script(tmp_path, SCRIPT.replace("{layers}", "4"))
    refused = run_command(["plan", "--partition", script, "--stages", "9"], tmp_path)
    assert refused.returncode == 2
    assert "the model can be cut into 4 parts at most" in refused.stderr
    assert "Traceback" not in refused.stderr
    outcome = done([PACELINE, "run", str(script), "--workers", "3", "--strategy", "pipeline:stages=2"], tmp_path)
    assert outcome.code == 2
    assert "'pipeline:stages=2' needs 2 workers" in outcome.err and "pipeline:stages=3" in outcome.err
