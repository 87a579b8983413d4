"""`paceline.launch` in the cells of a real Jupyter kernel."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.kernels import Kernel
from helpers.support import left_behind, shared_files, wait_until

IMPORTS = """
import os, pathlib, time
import torch, paceline
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
"""
MODEL = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)

inputs = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
"""
TRAIN = """
def train(each=lambda team: None):
    team = paceline.join()
    if team.is_lead:
        print(f"{team.world_size} workers")
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = team.setup(model, optimizer, DataLoader(data, batch_size=16, shuffle=True))
    for x, y in loader:
        with team.step():
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            each(team)
    return model
"""
NOTES = """
def stay(team):
    pathlib.Path(f"here-{team.rank}").touch()
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with Kernel(tmp_path_factory.mktemp("notebook")) as kernel:
        for source in (IMPORTS, MODEL, TRAIN, NOTES):
            cell = kernel.run(source)
            assert not cell.error, cell.error
        yield kernel


def assert_nothing_is_left(kernel: Kernel, shared: set[str]) -> None:
    wait_until(lambda: kernel.processes() == [], 10.0, "the end of all workers")
    assert left_behind(shared) == set()


@pytest.mark.parametrize("strategy", ["all-reduce", "async"])
def test_a_cell_launches_what_other_cells_define_and_can_be_run_again(kernel: Kernel, strategy: str) -> None:
    launch = f'model = paceline.launch(train, workers=2, strategy="{strategy}", name="{strategy}")'
    shared = shared_files()
    for _ in range(2):
        cell = kernel.run(f"{launch}\nprint(type(model) is Net)")
        assert not cell.error, cell.error
        assert cell.text() == "[0] 2 workers\nTrue\n"
        (page,) = cell.shown("text/html")
        (plain,) = cell.shown("text/plain")
        assert plain.startswith(f"<Run runs/{strategy}: {strategy}, 2 workers, ")
        report = ET.fromstring(page)  # HTML that is XML, too, with an SVG in it
        words = "".join(report.itertext())
        assert "samples/s" in words and "per update" in words and "slow" in words.lower()
        lanes = [one.text for one in report.iter("{http://www.w3.org/2000/svg}text")]
        assert {"worker 0", "worker 1"} <= set(lanes)
        assert len(list(report.iter("{http://www.w3.org/2000/svg}rect"))) > 10
    assert_nothing_is_left(kernel, shared)


def test_the_cell_that_joins_and_sets_up_in_the_kernel_itself_can_be_run_again(kernel: Kernel) -> None:
    for _ in range(2):
        cell = kernel.run("alone = train()\npaceline.join().strategy")
        assert cell.text() == "1 workers\n", cell.error


def test_progress_is_one_display_that_the_report_replaces(kernel: Kernel) -> None:
    cell = kernel.run("paceline.launch(train, lambda team: time.sleep(0.05), workers=2)")
    displays = [one for one in cell.outputs if one["output_type"] == "display_data"]
    assert len(displays) == 1, cell.outputs
    assert "text/html" in displays[0]["data"]
    assert kernel.run("paceline.launch(train, workers=2, quiet=True)").shown("text/html") == [], "quiet shows none"


def test_a_run_and_its_timeline_show_themselves(kernel: Kernel) -> None:
    kernel.run("paceline.launch(train, workers=2, quiet=True, slow='1:2')")
    (page,) = kernel.run("paceline.last_run()").shown("text/html")
    assert ET.fromstring(page).tag == "div"
    cell = kernel.run("paceline.last_run().timeline('two workers')")
    (figure,) = cell.shown("image/svg+xml")
    assert ET.fromstring(figure).tag == "{http://www.w3.org/2000/svg}svg"
    assert "two workers" in figure
    assert len(cell.shown("text/plain")[0]) < 100  # a notebook's file holds the picture once
    cell = kernel.run("print(paceline.last_run().report())")
    assert Path(cell.text().strip()).read_text().startswith("<!doctype html>")


def test_a_workers_exception_is_shown_once_with_the_line_of_the_cell(kernel: Kernel) -> None:
    cell = kernel.run(
        "def fail(team):\n"
        "    if team.rank == 1:\n"
        "        return {}['no such key']  # the culprit\n"
        "\n"
        "paceline.launch(train, fail, workers=2)"
    )
    assert [one["output_type"] for one in cell.outputs] == ["stream", "error"], cell.outputs
    assert cell.text("stderr") == ""
    assert cell.error.count("KeyError: 'no such key'") == 2  # on the worker and here
    assert cell.error.count("return {}['no such key']  # the culprit") >= 1
    assert "on rank 1 of 2" in cell.error
    assert "bootstrap" not in cell.error and "call.py" not in cell.error


def test_an_interrupted_cell_ends_all_workers_and_the_next_one_runs(kernel: Kernel) -> None:
    shared = shared_files()
    folder = Path(kernel.run("print(pathlib.Path.cwd())").text().strip())

    def interrupt() -> None:
        wait_until(lambda: all((folder / f"here-{rank}").exists() for rank in (0, 1)), 60.0, "the workers")
        kernel.interrupt()

    cell = kernel.run('paceline.launch(train, stay, workers=2, strategy="sync")', meanwhile=interrupt)
    assert "KeyboardInterrupt" in cell.error
    assert "paceline: stopped by SIGINT; all workers have ended" in cell.text("stderr")
    assert_nothing_is_left(kernel, shared)
    assert "True" in kernel.run("print(type(paceline.launch(train, workers=2, quiet=True)) is Net)").text()
