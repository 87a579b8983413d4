"""The `paceline` command: assembles the verbs, and turns errors into one sentence and an exit code."""

from __future__ import annotations

import errno
import importlib
import resource
import sys
from importlib import metadata
from typing import Annotated

import typer

from paceline.errors import PacelineError, UsageError

VERBS = {
    "run": "run",
    "scale": "scale",
    "report": "report",
    "live": "live",
    "simulate": "simulate_command",
    "plan": "plan",
    "doctor": "doctor",
    "key": "key",
    "bench": "app",
}
"""Verbs, each with the name of its function in the module of the same name."""


def assemble(asked: str | None) -> typer.Typer:
    """The command with the given verb, or with all: a launcher of workers need not load the code of reports."""
    app = typer.Typer(
        name="paceline",
        help="Train PyTorch models over many devices at the pace of the pack, not of the slowest rider.",
        no_args_is_help=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)  # also so that the verb's name is needed even if it is the only one
    light = ["key"] if asked == "--version" else VERBS  # which needs none of them
    for verb in [asked] if asked in VERBS else light:
        found = getattr(importlib.import_module(f"paceline.cli.{verb}"), VERBS[verb])
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=verb)
        else:
            app.command(verb)(found)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        print(f"paceline {metadata.version('paceline')}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the console script. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    try:
        code = assemble(sys.argv[1] if len(sys.argv) > 1 else None)(standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    except typer.TyperException as error:
        code = _complain(error.format_message(), error.exit_code)
    except UsageError as error:
        code = _complain(str(error), 2)
    except PacelineError as error:
        code = _complain(str(error), 1)
    except BrokenPipeError:  # the reader of the output has gone
        sys.stdout = None
        code = 1
    except OSError as error:  # a full disk, a folder that cannot be read or written
        code = _complain(_system_error(error), 1)
    sys.exit(code or 0)


def _system_error(error: OSError) -> str:
    if error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{limit} open files, which is the limit here, are too few; raise it with ulimit -n"
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def _complain(sentence: str, code: int) -> int:
    if sentence:  # without a verb the help is printed instead
        print(f"paceline: {sentence}", file=sys.stderr)
    return code
