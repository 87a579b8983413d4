"""Code in the docs uses what there is: names of the package, commands, options, strategies, make targets, files."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import site_commands
from helpers.documents import Block, all_blocks, blocks, commands, inline_commands
from site_pages import ROOT, pages

import paceline
import paceline.policies
from paceline import collectives
from paceline.config import parse_strategy
from paceline.errors import UsageError
from paceline.team import Team

PYTHON = [block for block in all_blocks() if block.language == "python"]
SHELL = [block for block in all_blocks() if block.language in ("", "sh", "bash", "console")]
KNOWN: dict[str, Any] = {"paceline": paceline, "collectives": collectives, "team": Team}
COMMANDS = dict(site_commands.commands())
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def missing_names(tree: ast.AST) -> Iterator[str]:
    """Attributes of the package, of `collectives` and of the team that there are not, and arguments that none takes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in KNOWN:
            if not hasattr(KNOWN[node.value.id], node.attr) and node.attr not in _of_instances(node.value.id):
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "paceline":
            module = __import__(node.module or "", fromlist=[alias.name for alias in node.names])
            yield from (f"{node.module}.{alias.name}" for alias in node.names if not hasattr(module, alias.name))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield from _unknown_arguments(node, node.func)


def _of_instances(name: str) -> set[str]:
    """Attributes that only a joined team has."""
    if name != "team":
        return set()
    return set(re.findall(r"self\.(\w+)(?:,| =)", inspect.getsource(Team.__init__)))


def _unknown_arguments(call: ast.Call, function: ast.Attribute) -> Iterator[str]:
    if not isinstance(function.value, ast.Name) or function.value.id not in KNOWN:
        return
    found = getattr(KNOWN[function.value.id], function.attr, None)
    if not callable(found):
        return
    taken = inspect.signature(found).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        return
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in taken:
            yield f"{function.value.id}.{function.attr}({keyword.arg}=…)"


def wrong_words(words: list[str]) -> Iterator[str]:
    """What is wrong about a command line of the docs: unknown commands, options, strategies, files, targets."""
    if words[0] == "make":
        yield from (f"make {word}" for word in words[1:] if word not in TARGETS)
    if words[0] == "python" and len(words) > 1 and words[1].startswith(("examples/", "benchmarks/", "tests/")):
        yield from (words[1] for _ in range(1) if not (ROOT / words[1]).is_file())
    if "-m" in words and "paceline" in words:  # torchrun … -m paceline run …
        words = words[words.index("paceline") :]
    if words[0] != "paceline" or len(words) == 1 or not words[1].islower():
        return
    name = next((name for name in COMMANDS if words[1 : 1 + len(name.split())] == name.split()), None)
    if name is None:
        yield from (" ".join(words[:2]) for _ in range(1) if words[1] not in ("bench", "--help", "--version"))
        return
    rest = words[1 + len(name.split()) :]
    options = {
        spelled: one for one in site_commands.parameters(COMMANDS[name]) for spelled in (*one.opts, *one.secondary_opts)
    }
    for place, word in enumerate(rest):
        if word == "--":
            break
        option, _, value = word.partition("=")
        if re.match(r"--?[a-z]", word) and option not in options:
            yield f"{name} {word}"
        elif option in ("--strategy", "-s"):
            yield from _wrong_strategy(value or (rest[place + 1] if place + 1 < len(rest) else ""))


def _wrong_strategy(spec: str) -> Iterator[str]:
    if re.search(r"[A-Z…]", spec):  # a placeholder, or a policy of the reader's own
        return
    try:
        parse_strategy(spec)
    except UsageError as error:
        yield str(error)


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_compiles_and_uses_names_that_exist(block: Block) -> None:
    assert list(missing_names(ast.parse(block.text))) == []


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_exist_and_take_these_options(block: Block) -> None:
    assert [wrong for words in commands(block) for wrong in wrong_words(words)] == []


@pytest.mark.parametrize("page", [page for page in pages() if page != "CHANGELOG.md"])
def test_commands_in_the_text_exist_and_take_these_options(page: str) -> None:
    assert [wrong for words in inline_commands(page) for wrong in wrong_words(words)] == []


def test_there_are_blocks_to_check() -> None:
    assert len(PYTHON) > 10 and len(SHELL) > 20
    assert blocks("README.md")[0].language == "diff"


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("paceline run train.py --worker 3", ["run --worker"]),
        ("paceline run train.py --strategy gossip -- --anything", ["unknown strategy 'gossip'"]),
        ("paceline rum train.py", ["paceline rum"]),
        ("make everything", ["make everything"]),
        ("python examples/nothing.py", ["examples/nothing.py"]),
        ("torchrun --nnodes 2 -m paceline run train.py --speed 3", ["run --speed"]),
        ("paceline run train.py -w 4 -s k-sync:k=3 --slow 3:4", []),
    ],
)
def test_a_wrong_command_is_found(line: str, wrong: list[str]) -> None:
    told = list(wrong_words(line.split()))
    assert len(told) == len(wrong) and all(word in one for word, one in zip(wrong, told, strict=True))


def test_a_wrong_name_is_found() -> None:
    code = "team = paceline.join(name='x', speed=2)\nteam.setup(a, b, global_batch=2, batch=3)\ncollectives.gossip()\n"
    assert set(missing_names(ast.parse(code))) == {
        "collectives.gossip",
        "paceline.join(speed=…)",
        "team.setup(batch=…)",
    }
