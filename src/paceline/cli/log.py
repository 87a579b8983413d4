"""`paceline log`: passes the values of a run to loggers and Prometheus, while it goes on or afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import UsageError
from paceline.loggers import LOGGERS, parse_loggers
from paceline.loggers.process import check_gateway

LOG_HELP = f"Loggers to pass the run's values to, with commas: {', '.join(LOGGERS)}."
PUSH_HELP = "The address of a Prometheus Pushgateway to push the run's metrics to."


def log(
    run: Annotated[Path, typer.Argument(help="The folder of the run.", show_default=False)],
    to: Annotated[str, typer.Option(metavar="NAMES", help=LOG_HELP)] = "",
    push_metrics: Annotated[str | None, typer.Option(metavar="URL", help=PUSH_HELP)] = None,
    until_over: Annotated[
        bool, typer.Option("--until-over", help="Follow a run that goes on, or begins soon, until it ends.")
    ] = False,
) -> None:
    """Pass the values of a run to TensorBoard, Weights & Biases, MLflow or a Prometheus Pushgateway.

    A run that is over is logged as a whole. `paceline run --log NAMES` does it while a run goes on.

    Example: `paceline log runs/first --to tensorboard,wandb`
    """
    names = parse_loggers(to or None, "--to")
    if push_metrics is not None:
        check_gateway(push_metrics)
    if not names and push_metrics is None:
        raise UsageError(f"there is nothing to log to; give --to with one of {', '.join(LOGGERS)}, or --push-metrics")
    from paceline.cli.logged_run import LoggedRun  # here: `paceline run` needs only the texts above

    LoggedRun(run, names, push_metrics).follow(until_over=until_over)
