"""The tutorial's files and commands, page after page, and the README's loop: all run as they are written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.documents import blocks, commands, with_added_lines
from helpers.forks import done
from helpers.preloaded import Preloaded
from helpers.support import PACELINE, PYTHON, write_script

PAGES = [f"docs/tutorial/{name}.md" for name in ("first-run", "report", "straggler", "choosing")]
PROGRAMS = {"paceline": PACELINE, "python": PYTHON}
README_DATA = """
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import torch

torch.manual_seed(0)
points = torch.randn(1024, 8)
dataset, test_set = (TensorDataset(part, (part.sum(1) > 0).long()) for part in points.split([768, 256]))
Net = lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
"""


def ended(command: list[str], folder: Path) -> tuple[int, str, str]:
    outcome = done(command, folder, 120)
    return outcome.code, outcome.out, outcome.err


@pytest.fixture
def process() -> Iterator[Preloaded]:
    """Its forks train on the digits of scikit-learn, which takes a second to import."""
    with Preloaded("sklearn.datasets") as process:
        yield process


def test_the_tutorial_runs_as_it_is_written(process: Preloaded, tmp_path: Path) -> None:
    printed, ran = {}, 0
    for page in PAGES:
        for block in blocks(page):
            if block.mark.startswith("file: "):
                text = with_added_lines(block.text) if block.language == "diff" else block.text
                write_script(tmp_path, text, block.mark.removeprefix("file: "))
            elif block.mark == "run":
                for words in commands(block):
                    code, out, err = process.call(ended, [PROGRAMS[words[0]], *words[1:]], tmp_path)
                    assert code == 0, f"{block}: {err}"
                    printed[" ".join(words)] = out
                    ran += 1
    assert ran > 10
    # As the first page says: two workers train what one process does.
    alone = printed["python train.py"].splitlines()
    assert printed["paceline run train.py --workers 2 --name first"].splitlines() == [f"[0] {line}" for line in alone]
    assert (tmp_path / "runs" / "first" / "report.html").is_file() and (tmp_path / "compared.html").is_file()


def test_the_loop_of_the_readme_trains_the_same_in_a_team(tmp_path: Path) -> None:
    block = blocks("README.md")[0]
    assert block.language == "diff"
    write_script(tmp_path, README_DATA + with_added_lines(block.text))
    alone = done([PYTHON, "train.py"], tmp_path, 60)
    team = done([PACELINE, "run", "train.py", "--workers", "2", "--no-record", "--quiet"], tmp_path, 60)
    assert (alone.code, team.code) == (0, 0), alone.err + team.err
    assert alone.out and team.out.splitlines() == [f"[0] {line}" for line in alone.out.splitlines()]


def test_the_simulations_of_the_lecture_give_the_numbers_of_its_page(tmp_path: Path) -> None:
    said = {}
    for block in blocks("docs/mechanisms.md"):
        for words in commands(block) if block.mark == "run" else ():
            outcome = done([PROGRAMS[words[0]], *words[1:]], tmp_path, 60)
            assert outcome.code == 0, f"{block}: {outcome.err}"
            servers = words[words.index("--servers") + 1] if "--servers" in words else ""
            rows = [line.split() for line in outcome.out.splitlines()]
            if "--theory" in words:
                said |= {(row[0], servers): row for row in rows if len(row) > 6}
    assert float(said["sync", "1"][1]) == 2.66
    assert float(said["sync", "4"][1]) == 0.74
    assert float(said["sync", "all"][1]) == 0.25
    formulas = {"sync": 2.718, "backup:b=1": 1.718, "k-sync:k=4": 0.6345, "k-batch-sync:k=4": 0.5, "async": 0.125}
    formulas |= {"k-async:k=4": 0.6345, "k-batch-async:k=4": 0.5, "groups:size=4": 1.042}
    for strategy, seconds in formulas.items():
        assert float(said[strategy, ""][3]) == seconds
    assert float(said["ssp:s=4", ""][1]) == pytest.approx(0.162, rel=0.02)
    assert said["pipeline:stages=8,microbatches=32,schedule=gpipe", ""][7] == "17.9%"
    assert said["pipeline:stages=8,microbatches=32,schedule=interleaved", ""][7] == "9.9%"
    assert said["pipeline:stages=8,microbatches=32,schedule=zero-bubble", ""][7] == "6.8%"
    milliseconds = {"ring": 17.0, "tree": 88.1, "halving-doubling": 15.9, "hub": 1008, "direct": 15.8}
    for topology, expected in milliseconds.items():
        taken = 1e3 * (float(said[f"all-reduce:topology={topology}", ""][1]) - 0.1)
        assert taken == pytest.approx(expected, abs=0.1 if expected < 1000 else 1)
