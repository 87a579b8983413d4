"""The report names the slow worker, says how slow it is, and in what."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from helpers.forks import played
from helpers.load import above_noise
from helpers.support import write_script

from paceline.report.source import open_run

WORKERS, VICTIM, STEPS = 4, 2, 16

SCRIPT = """
import json, sys, time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import paceline

where, nap, usual = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
team = paceline.join()
mine = team.rank == 2


def rest(part):
    time.sleep(usual)
    if mine and part == where:
        time.sleep(nap)


class Samples(Dataset):
    def __len__(self):
        return 8 * 4 * 16

    def __getitem__(self, index):
        if mine and where == "loading":
            time.sleep(nap / 8)
        return torch.ones(4), torch.ones(1)


class Nap(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        rest("forward")
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        rest("backward")
        return gradient


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = team.setup(model, optimizer, DataLoader(Samples(), batch_size=32))
own = []
for x, y in loader:
    start = time.perf_counter()
    loss = ((Nap.apply(model(x)) - y) ** 2).mean()
    loss.backward()
    own.append(time.perf_counter() - start)
    optimizer.step()
    optimizer.zero_grad()
    if mine and where == "elsewhere":
        time.sleep(nap)
Path(f"{team.rank}.json").write_text(json.dumps(own))
"""


def train(
    folder: Path, factor: float, *slow: str, strategy: str | None = None, where: str = "-", nap: float = 0.0
) -> tuple[dict[str, Any], list[float]]:
    """The facts of a run, and what each worker's own steps took as its script has measured it.

    factor: by which all sleeps are longer.
    """
    folder = folder / f"{factor:g}"
    folder.mkdir()
    words: list[str | Path] = [write_script(folder, SCRIPT), "--workers", str(WORKERS), "--name", "run", "--quiet"]
    words += [word for one in slow for word in ("--slow", one)]
    words += ["--strategy", strategy] if strategy else []
    outcome = played([*words, "--", where, str(factor * nap), str(factor * 0.025)], folder, 90 * factor)
    assert outcome.code == 0, outcome.err
    return facts_of(folder)


def facts_of(folder: Path) -> tuple[dict[str, Any], list[float]]:
    own = [statistics.mean(json.loads((folder / f"{rank}.json").read_text())) for rank in range(WORKERS)]
    return open_run(folder / "runs" / "run").facts(pictures=False), own


def test_of_four_workers_the_slow_one_is_named_with_its_pace_and_what_the_others_waited(tmp_path: Path) -> None:
    def check(factor: float) -> None:
        facts, own = train(tmp_path, factor, f"{VICTIM}:3")
        assert facts["slow"] == [VICTIM]
        assert f"Worker {VICTIM} is slow" in facts["verdict"][0]
        slow = facts["workers"][VICTIM]
        truth = 3 * own[VICTIM]
        assert slow["pace"] == pytest.approx(truth, rel=0.1)
        assert slow["why"] == "slowed"
        for worker in facts["workers"]:
            if worker["rank"] != VICTIM:
                waited = (truth - own[worker["rank"]]) * STEPS
                assert worker["seconds"]["waiting"] == pytest.approx(waited, rel=0.1)
                assert worker["blame"] < 0.1 * slow["blame"]
        assert slow["blame"] == pytest.approx(sum(worker["seconds"]["waiting"] for worker in facts["workers"]), rel=0.1)

    above_noise(check)


@pytest.mark.parametrize("where", ["loading", "forward", "backward", "elsewhere"])
def test_slowness_of_a_script_s_own_is_named_after_where_it_lies(where: str, tmp_path: Path) -> None:
    def check(factor: float) -> None:
        facts, _ = train(tmp_path, factor, where=where, nap=0.03)
        worker = facts["workers"][VICTIM]
        assert max(worker["causes"], key=worker["causes"].__getitem__) == where
        assert worker["blame"] > 0.8 * sum(other["blame"] for other in facts["workers"])
        assert (facts["slow"], worker["why"]) == ([VICTIM], where)

    above_noise(check)


@pytest.mark.parametrize(
    ("where", "strategy"),
    [
        ("loading", "all-reduce"),
        ("forward", "all-reduce"),
        ("backward", "all-reduce"),
        ("link", "all-reduce"),
        ("backward", "sync"),
        ("link", "k-async:k=4"),
    ],
)
def test_slowness_put_on_a_part_of_a_step_is_named_after_it(where: str, strategy: str, tmp_path: Path) -> None:
    def check(factor: float) -> None:
        facts, _ = train(tmp_path, factor, f"{VICTIM}:{0.07 * factor}+exp({0.002 * factor})@{where}", strategy=strategy)
        worker = facts["workers"][VICTIM]
        assert (facts["slow"], worker["why"]) == ([VICTIM], where)
        assert max(worker["causes"], key=worker["causes"].__getitem__) == where

    above_noise(check)
