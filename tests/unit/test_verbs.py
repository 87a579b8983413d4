"""The verbs of the command line, and what it takes to start one."""

import subprocess
import sys
from importlib import metadata

import pytest

from paceline.cli.main import VERBS

HEAVY = ("torch", "starlette", "plotly", "ray")
LOADED = """
import sys
from paceline.cli.main import assemble
assemble({verb!r})
print(*[name for name in {heavy!r} if name in sys.modules])
"""


def answer(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("verb", ["run", "scale", "key", "doctor"])
def test_what_starts_workers_loads_nothing_that_takes_long(verb: str) -> None:
    told = answer("-c", LOADED.format(verb=verb, heavy=HEAVY))
    assert (told.returncode, told.stdout.split()) == (0, [])


def test_without_a_verb_all_of_them_are_told() -> None:
    told = answer("-m", "paceline")
    assert all(f" {verb} " in told.stdout for verb in VERBS)
    assert told.stderr == ""


def test_its_version_is_told() -> None:
    told = answer("-m", "paceline", "--version")
    assert (told.returncode, told.stdout, told.stderr) == (0, f"paceline {metadata.version('paceline')}\n", "")


def test_a_verb_that_there_is_not_is_one_sentence_that_names_the_nearest() -> None:
    told = answer("-m", "paceline", "rum")
    assert told.returncode == 2
    assert told.stderr.splitlines() == ["paceline: no such command 'rum'; did you mean 'run'?"]
