"""An older torch or Python, or another system, is one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import paceline
from paceline.requirements import PYTHON, TORCH, check_requirements, unmet, unmet_by

SOURCE = Path(paceline.__file__).parents[1]
PROJECT = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDED = "Paceline needs torch 2.13 or newer; this is 2.6.0+cpu: pip install 'torch>=2.13'"
LOADS_BACKENDS = "\nfrom paceline.collectives.registration import register\nregister()\n"
"""At its end, torch imports the packages that have a backend for it."""


def test_the_requirements_are_those_of_the_package() -> None:
    assert f"torch>={TORCH[0]}.{TORCH[1]}" in PROJECT["dependencies"]
    assert PROJECT["requires-python"] == f">={PYTHON[0]}.{PYTHON[1]}"


@pytest.mark.parametrize("version", ["2.13.0", "2.13.1+cu130", "2.14.0a0+git1234", "3.0.0", "2.100.0"])
def test_newer_versions_of_torch_will_do(version: str) -> None:
    assert unmet_by(version) is None


@pytest.mark.parametrize("version", ["2.12.1", "2.6.0+cpu", "1.13.1", "2", "", "unknown"])
def test_older_versions_of_torch_and_odd_ones_are_refused(version: str) -> None:
    assert "needs torch 2.13 or newer" in str(unmet_by(version))


def test_another_system_and_an_older_python_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unmet() is None
    monkeypatch.setattr(sys, "version_info", (3, 10, 4, "final", 0))
    assert unmet() == "Paceline needs Python 3.11 or newer; this is 3.10.4"
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ImportError, match=r"^Paceline runs on Linux only, .*; this is darwin$"):
        check_requirements()


def ran(tmp_path: Path, *words: str, more: str = "") -> subprocess.CompletedProcess[str]:
    """Runs Python with a pretended torch 2.6."""
    (tmp_path / "torch").mkdir(exist_ok=True)
    (tmp_path / "torch" / "__init__.py").write_text(f"__version__ = '2.6.0+cpu'\n{more}")
    (tmp_path / "torch-2.6.0.dist-info").mkdir(exist_ok=True)
    (tmp_path / "torch-2.6.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.6.0+cpu\n")
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{SOURCE}"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("script", "more"),
    [
        ("import torch, paceline", ""),
        ("import torch, paceline", LOADS_BACKENDS),
        ("from torch import __version__; from paceline import join", LOADS_BACKENDS),
        ("import paceline; paceline.join()", ""),
        ("import paceline; paceline.join()", LOADS_BACKENDS),
    ],
)
def test_a_script_with_an_older_torch_ends_with_one_sentence(script: str, more: str, tmp_path: Path) -> None:
    done = ran(tmp_path, "-c", script, more=more)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"ImportError: {NEEDED}"


def test_an_older_torch_can_be_imported_beside_paceline(tmp_path: Path) -> None:
    done = ran(tmp_path, "-c", "import torch; print(torch.__version__)", more=LOADS_BACKENDS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2.6.0+cpu\n", "")


def test_the_command_says_that_torch_is_too_old_and_nothing_else(tmp_path: Path) -> None:
    done = ran(tmp_path, "-m", "paceline", "doctor")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"paceline: {NEEDED}\n")
