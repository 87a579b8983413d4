"""The help of every command, and the line that says what one is doing."""

from __future__ import annotations

import re
from typing import Any

import pytest
from site_commands import commands, parameters

from paceline.cli import status
from paceline.cli.status import StatusLine

COMMANDS = dict(commands())


def options(command: Any) -> list[Any]:
    return [one for one in parameters(command) if one.param_type_name == "option"]


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_has_an_example_of_itself(words: str) -> None:
    assert re.search(rf"Example: `[^`]*paceline {words}\b", COMMANDS[words].help)


@pytest.mark.parametrize("words", ["run", "plan", "simulate", "report", "doctor"])
def test_every_option_of_the_long_commands_is_in_a_panel(words: str) -> None:
    panels = {option.name: option.rich_help_panel for option in options(COMMANDS[words])}
    assert [name for name, panel in panels.items() if panel is None] == []
    assert panels["help"] == "Output"


def test_the_panels_of_run_are_in_the_order_in_which_one_thinks_of_them() -> None:
    panels = [option.rich_help_panel for option in options(COMMANDS["run"])]
    assert list(dict.fromkeys(panels)) == [
        *("Workers", "Strategy", "Parameter server", "Faults and slowness", "Recording", "Engines", "Output")
    ]


def test_a_flag_shows_no_type() -> None:
    assert [option.metavar for option in options(COMMANDS["run"]) if option.is_flag] == [""] * 7


def test_without_a_terminal_the_status_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(status.time, "monotonic", lambda: now)
    for at_once in (True, False):
        now = 100.0
        with StatusLine("starting", at_once=at_once) as line:
            for second in range(25):
                now = 100.0 + second
                line.detail(f"second {second}")
        told = capsys.readouterr()
        first = ["paceline: starting"] * at_once
        assert told.err.splitlines() == [*first, *(f"paceline: starting: second {second}" for second in (10, 20))]
        assert told.out == ""
