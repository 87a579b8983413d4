"""Trainers are composed: a class owns its private fields, and its parent's constructor always runs."""

import ast
from pathlib import Path

import pytest

import paceline

STRATEGIES = Path(paceline.__file__).parent / "strategies"
Classes = dict[str, ast.ClassDef]


def classes_of(sources: list[str]) -> Classes:
    """All classes of some sources, by name."""
    return {
        node.name: node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)
    }


def parents(name: str, classes: Classes) -> list[str]:
    """The ancestors of a class that are among these classes, nearest first."""
    bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name) and base.id in classes]
    return bases + [ancestor for base in bases for ancestor in parents(base, classes)]


def assigned(node: ast.ClassDef) -> set[str]:
    """The private attributes of `self` that a class assigns in its methods."""
    return {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
        and part.attr.startswith("_")
    }


def constructor(node: ast.ClassDef) -> ast.FunctionDef | None:
    return next((part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"), None)


def calls_parent(function: ast.FunctionDef) -> bool:
    """True if a constructor calls `super().__init__`."""
    return any(
        isinstance(part, ast.Call) and ast.unparse(part.func) == "super().__init__" for part in ast.walk(function)
    )


def offences(sources: list[str]) -> list[str]:
    classes = classes_of(sources)
    found = []
    for name, node in classes.items():
        ancestors = parents(name, classes)
        own = constructor(node)
        if own is not None and not calls_parent(own) and any(constructor(classes[parent]) for parent in ancestors):
            found.append(f"{name}.__init__ does not call super().__init__")
        for parent in ancestors:
            again = assigned(node) & assigned(classes[parent])
            found += [f"{name} assigns {attribute} of {parent}" for attribute in sorted(again)]
        found += [
            f"{name} calls {ast.unparse(part.func)}"
            for part in ast.walk(node)
            if isinstance(part, ast.Call)
            and isinstance(part.func, ast.Attribute)
            and isinstance(part.func.value, ast.Name)
            and part.func.value.id in ancestors
            and part.func.attr == "__init__"
        ]
    return found


def test_no_trainer_skips_its_parents_constructor_or_assigns_its_fields() -> None:
    assert offences([path.read_text(encoding="utf-8") for path in sorted(STRATEGIES.glob("*.py"))]) == []


def test_every_trainer_has_the_one_base() -> None:
    classes = classes_of([path.read_text(encoding="utf-8") for path in sorted(STRATEGIES.glob("*.py"))])
    trainers = [name for name in classes if name.endswith("Trainer") and name != "Trainer"]
    assert len(trainers) >= 8
    assert [name for name in trainers if "Trainer" not in parents(name, classes)] == []


PARENT = "class A:\n    def __init__(self):\n        self._x = 1\n\n    def f(self):\n        self._y, self.z = 1, 2\n"


@pytest.mark.parametrize(
    "child",
    [
        "class B(A):\n    def __init__(self):\n        self._own = 1\n",
        "class B(A):\n    def f(self):\n        self._x = 2\n",
        "class B(A):\n    def f(self):\n        self._y += 2\n",
        "class B(A):\n    def f(self):\n        a, self._y = 2, 3\n",
        "class B(A):\n    pass\n\nclass C(B):\n    def f(self):\n        self._x = 2\n",
        "class B(A):\n    def __init__(self):\n        super().__init__()\n        A.__init__(self)\n",
    ],
)
def test_a_trainer_that_does_is_caught(child: str) -> None:
    assert len(offences([PARENT, child])) == 1


@pytest.mark.parametrize(
    "child",
    [
        "class B(A):\n    def __init__(self):\n        self._own = 1\n        super().__init__()\n",
        "class B(A):\n    def f(self):\n        self.z = self._x\n",
        "class B:\n    def __init__(self):\n        self._x = 2\n",
    ],
)
def test_a_trainer_that_does_not_is_not(child: str) -> None:
    assert offences([PARENT, child]) == []
