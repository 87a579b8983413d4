"""One word per thing: no public class name stands for two things, and no retired word comes back."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline

PACKAGE = Path(paceline.__file__).parent
DOCS = PACKAGE.parents[1] / "docs"
RETIRED = (
    *("office", "desk", "seat", "shelf", "haul", "freight", "charter", "letter", "conveyor", "rota", "passage"),
    *("homeward", "leavings", "takeover", "overtime", "surroundings", "outbox", "crew", "farewell", "doorkeeper"),
    *("rehearsal", "rehearse", "meeting", "wire", "pulse"),
)
"""Words that stood for a relay, a client, a session, … before the field's own words did."""
ALLOWED = re.compile(
    r"by_letters|letters? of|letters, digits|einsum.*letters?|letters?.*einsum|on the wire|wire format|WireGuard",
    re.IGNORECASE,
)
"""Other meanings of the same words: letters of the alphabet, bytes on the wire."""


def classes(source: str) -> Iterator[str]:
    """Names of the public classes that a module defines."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def retired_words(line: str) -> list[str]:
    """Retired words in a line of code or prose, also as parts of identifiers."""
    if ALLOWED.search(line):
        return []
    parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", line)
    return [part for part in parts if part.lower() in RETIRED or part.lower().removesuffix("s") in RETIRED]


def test_no_public_class_name_is_defined_twice() -> None:
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in classes(path.read_text(encoding="utf-8")):
            places[name].append(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_retired_word_is_in_the_package_or_the_docs() -> None:
    paths = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.js"), *DOCS.rglob("*.md")]
    found = [
        f"{path.name}:{number}: {word}"
        for path in sorted(paths)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for word in retired_words(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line", ["self._desk = desk", "class OfficeMain:", "All meetings end.", "WIRE = 1", "two wires"]
)
def test_a_retired_word_is_caught(line: str) -> None:
    assert retired_words(line)


@pytest.mark.parametrize("line", ["session.rotate()", "the letters of an equation", "bytes on the wire", "admission"])
def test_other_words_are_not(line: str) -> None:
    assert retired_words(line) == []
