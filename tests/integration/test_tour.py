"""`examples/tour.ipynb` runs from top to bottom, and every section measures what its text says."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from helpers.kernels import Cell, Kernel

TOUR = Path(__file__).parents[2] / "examples" / "tour.ipynb"
SVG = "image/svg+xml"
PICTURES = 6


@pytest.fixture(scope="module")
def notebook() -> Any:
    return nbformat.read(TOUR, as_version=4)


@pytest.fixture(scope="module")
def cells(notebook: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Cell]]:
    """All cells of code, run in a kernel of their own."""
    with Kernel(tmp_path_factory.mktemp("tour")) as kernel:
        found = []
        for cell in notebook.cells:
            if cell.cell_type == "code":
                found.append(kernel.run(cell.source))
                assert not found[-1].error, found[-1].error
        yield found


def test_its_pictures_are_those_of_the_runs(cells: list[Cell]) -> None:
    figures = [ET.fromstring(one) for cell in cells for one in cell.shown(SVG)]
    assert len(figures) == PICTURES
    reports = [ET.fromstring(one) for cell in cells for one in cell.shown("text/html")]
    assert len(reports) == 1
    assert any(one.tag == "{http://www.w3.org/2000/svg}svg" for one in reports[0])


def test_every_section_ends_with_a_number_that_is_what_the_text_says(cells: list[Cell]) -> None:
    told = "".join(cell.text() for cell in cells)

    def number(pattern: str) -> float:
        found = re.search(pattern, told)
        assert found is not None, told
        return float(found[1])

    assert number(r"difference between the two models: (\S+)") < 1e-5
    assert number(r"spent waiting: (\d+)%") > 20
    assert number(r"updates per second: (\S+) times as many") > 1
    assert 2 < number(r"mean staleness: (\S+) updates") <= 3
    stale, corrected = (number(rf"loss after one epoch of {name}: (\S+)") for name in ("async", "async, corrected"))
    assert corrected < 1e-3 * stale
    assert number(r"ring: 24 messages; the busiest worker sends (\S+) times") == 1.5
    assert number(r"hub:  6 messages; the busiest worker sends (\S+) times") == 3.0
    assert number(r"bubble: (\S+)% of a step") > 20
    assert number(r"predicted from the async run: (\S+) ms") > 10


def test_the_file_has_its_outputs_and_little_else(notebook: Any) -> None:
    assert TOUR.stat().st_size < 300_000
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert sum(SVG in one.get("data", {}) for cell in code for one in cell.outputs) == PICTURES
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))  # run from top to bottom
    for cell in code:
        assert all(one.output_type != "error" and one.get("name") != "stderr" for one in cell.outputs)
