"""The wheel and the source distribution install elsewhere, and run there."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from helpers.support import environment

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BUILD = (sys.executable, "-m", "build", "--no-isolation", "--outdir")
DATA = """
class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(10, 2)

x = torch.randn(320, 10)
dataset = test_set = TensorDataset(x, (x.sum(1) > 0).long())
"""
"""What the README's script leaves to its reader."""


def ran(command: list[str | Path], folder: Path) -> str:
    """Output of a program, without what this process has set for its own."""
    variables = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def contents(wheel: Path) -> dict[str, int]:
    """Checksums of a wheel's files."""
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    ran([*BUILD, folder / "dist", source], folder)
    ran([*BUILD, folder / "direct", "--wheel", source], folder)
    return folder


@pytest.fixture(scope="module")
def installed(built: Path) -> Path:
    """The `bin` of a new environment with the wheel, and with this one's packages instead of its requirements."""
    place = built / "venv"
    ran([sys.executable, "-m", "venv", "--without-pip", place], built)
    (wheel,) = (built / "dist").glob("*.whl")
    python = place / "bin" / "python"
    ran(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-compile", wheel],
        built,
    )
    (packages,) = place.glob("lib/python*/site-packages")
    # Only on the path: the links in there, as that of this repository's own installation, are not followed.
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return place / "bin"


def test_the_source_distribution_builds_the_same_wheel(built: Path) -> None:
    (from_source,), (direct,) = (built / "dist").glob("*.whl"), (built / "direct").glob("*.whl")
    assert from_source.name == direct.name == f"paceline-{PROJECT['version']}-py3-none-any.whl"
    assert contents(from_source) == contents(direct)


def test_the_packages_have_what_they_need(built: Path) -> None:
    (wheel,), (source,) = (built / "dist").glob("*.whl"), (built / "dist").glob("*.tar.gz")
    files = set(contents(wheel))
    package = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "paceline").rglob("*.py")}
    assert package <= files
    assert "paceline/py.typed" in files
    static = {f"paceline/report/static/{path.name}" for path in (ROOT / "src/paceline/report/static").iterdir()}
    assert static <= files
    assert not any("test" in name.split("/")[0] for name in files)
    assert any(name.endswith("licenses/LICENSE") for name in files)
    with tarfile.open(source) as archive:
        assert {"pyproject.toml", "README.md", "LICENSE"} <= {name.partition("/")[2] for name in archive.getnames()}


def test_the_installed_command_tells_its_version_and_checks_the_machine(installed: Path, tmp_path: Path) -> None:
    assert ran([installed / "paceline", "--version"], tmp_path) == f"paceline {PROJECT['version']}\n"
    where = ran([installed / "python", "-c", "import paceline; print(paceline.__file__)"], tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    assert "torch" in ran([installed / "paceline", "doctor"], tmp_path)


def test_the_readme_s_script_runs_where_it_is_installed(installed: Path, tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = text.partition("```diff\n")[2].partition("```")[0].splitlines()
    script = "\n".join(line[2:] for line in lines if not line.startswith("-"))
    head, found, rest = script.partition("team = paceline.join()\n")
    assert found, "the README's script does not join"
    imports = "from torch.utils.data import DataLoader, TensorDataset\n"
    (tmp_path / "train.py").write_text(f"{head}{imports}{found}{DATA}{rest}")
    printed = ran([installed / "paceline", "run", "train.py", "--workers", "2", "--name", "first"], tmp_path)
    assert "[0] epoch 7: " in printed
    report = ran([installed / "paceline", "report", "runs/first"], tmp_path)
    assert report == "report: runs/first/report.html\n"
