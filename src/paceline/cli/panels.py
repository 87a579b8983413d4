"""Panels of the help, and the class of commands whose options are sorted into them."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperOption

WORKERS = "Workers"
STRATEGY = "Strategy"
SERVER = "Parameter server"
FAULTS = "Faults and slowness"
LINKS = "Links"
MODEL = "Model that is split"
GOAL = "Goal"
PROFILE = "Profile"
PARTITION = "With --partition"
RECORDING = "Recording"
ENGINES = "Engines"
MEASUREMENT = "Measurement"
EXPORTS = "Exports"
OUTPUT = "Output"


class PanelCommand(TyperCommand):
    """A command that shows no type beside a flag, and `--help` among the options of its output."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for parameter in self.params:
            _hide_type(parameter)

    def get_help_option(self, ctx: Any) -> TyperOption | None:
        option = super().get_help_option(ctx)
        if option is not None:
            _hide_type(option)
            option.rich_help_panel = OUTPUT
        return option


def _hide_type(parameter: Any) -> None:
    if getattr(parameter, "is_flag", False) and parameter.metavar is None:
        parameter.metavar = ""
