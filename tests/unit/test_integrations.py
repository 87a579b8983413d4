"""Adapters and frameworks are imported by programs that use them, and by no others."""

import ast
import subprocess
import sys
from pathlib import Path

import paceline

FRAMEWORKS = ("lightning", "accelerate", "transformers", "torchmetrics")
HOUSE = Path(paceline.__file__).parent


def test_nothing_else_of_the_package_imports_a_framework_or_an_adapter() -> None:
    found = []
    for path in HOUSE.rglob("*.py"):
        if path.parent.name == "integrations":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [
                f"{path.relative_to(HOUSE)}: {name}"
                for name in names
                if name.split(".")[0] in FRAMEWORKS or name.startswith("paceline.integrations")
            ]
    assert found == []


def test_the_hook_of_a_worker_imports_neither_a_framework_nor_torch() -> None:
    loaded = f"[name for name in {(*FRAMEWORKS, 'torch')} if name in sys.modules]"
    check = f"import sys, paceline.integrations.import_hook; print({loaded})"
    done = subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_no_process_of_pytest_imports_a_framework_when_tests_are_collected() -> None:
    """Every worker of every test is a fork of one, and the larger it is the slower they are."""
    heavy = (*FRAMEWORKS, "mlflow", "wandb", "ray", "sklearn")
    found = []
    for path in Path(__file__).parents[1].rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{path.name}: {name}" for name in names if name.split(".")[0] in heavy]
    assert found == []
