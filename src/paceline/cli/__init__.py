"""The command line: one file per verb."""

from paceline.cli.main import main

__all__ = ["main"]
