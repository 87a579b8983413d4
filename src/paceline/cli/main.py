"""`paceline`: puts the verbs together and turns errors into one sentence and an exit code."""

from __future__ import annotations

import sys

import typer

from paceline.cli import bench, key, live, plan, report, run, simulate
from paceline.errors import PacelineError, UsageError

app = typer.Typer(
    name="paceline",
    help="Train PyTorch models over many devices at the pace of the pack, not of the slowest rider.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", context_settings={"ignore_unknown_options": False})(run.run)
app.command("report")(report.report)
app.command("live")(live.live)
app.command("simulate")(simulate.simulate_command)
app.command("plan")(plan.plan)
app.command("key")(key.key)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Entry point of the console script. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    try:
        code = app(standalone_mode=False)
    except typer.Abort:
        code = 130
    except typer.TyperException as error:
        code = _complain(error.format_message(), error.exit_code)
    except UsageError as error:
        code = _complain(str(error), 2)
    except PacelineError as error:
        code = _complain(str(error), 1)
    except BrokenPipeError:  # whoever read our output has stopped
        sys.stdout = None
        code = 1
    sys.exit(code or 0)


def _complain(sentence: str, code: int) -> int:
    print(f"paceline: {sentence}", file=sys.stderr)
    return code
