"""`paceline simulate`: what a policy would do, without training anything."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from paceline.errors import UsageError
from paceline.simulate.distributions import parse_distribution
from paceline.simulate.predict import predict, simulate


def simulate_command(
    strategy: Annotated[
        list[str] | None,
        typer.Option("--strategy", "-s", help="A policy of the parameter server. Repeatable. [default: sync]"),
    ] = None,
    workers: Annotated[int, typer.Option("--workers", "-w", help="How many workers.")] = 4,
    compute: Annotated[
        str,
        typer.Option(
            help="Seconds that a minibatch takes: 0.1, 'exp(1)', '1+exp(1)', 'pareto(1,2.5)', 'gamma(2,0.5)', "
            "'lognormal(1,0.3)'."
        ),
    ] = "1+exp(1)",
    slow: Annotated[
        list[str] | None, typer.Option(metavar="RANK:FACTOR", help="Make a worker slower: 3:4. Repeatable.")
    ] = None,
    updates: Annotated[int, typer.Option(help="How many updates to simulate.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Seeds the draws.")] = 0,
    theory: Annotated[bool, typer.Option("--theory", help="Beside it what the closed forms say.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object (a list for several strategies).")] = False,
) -> None:
    """Simulate policies of the parameter server, with the very objects that the server asks.

    Messages and updates cost nothing here; what differs is who waits for whom.

    Example: `paceline simulate --strategy k-sync:k=4 --workers 8 --compute 'exp(1)' --updates 20000 --seed 1 --json`
    """
    drawn = parse_distribution(compute)
    factors = _factors(slow or [], workers)
    answers: list[dict[str, Any]] = []
    for spec in strategy or ["sync"]:
        answer = msgspec.to_builtins(
            simulate(spec, workers, drawn, updates=updates, seed=seed, factors=factors), str_keys=True
        )
        if theory:
            answer["theory"] = msgspec.to_builtins(predict(spec, workers, drawn)) if factors is None else None
        answers.append(answer)
    if json:
        print(msgspec.json.format(msgspec.json.encode(answers[0] if len(answers) == 1 else answers), indent=2).decode())
        return
    _print(answers, theory)


def _factors(specs: list[str], workers: int) -> list[float] | None:
    if not specs:
        return None
    factors = [1.0] * max(workers, 0)
    for spec in specs:
        who, _, what = spec.partition(":")
        try:
            factor = float(what)
        except ValueError:
            factor = 0.0
        if not (who.isdecimal() and int(who) < workers and factor > 0):
            raise UsageError(
                f"--slow '{spec}': it must be RANK:FACTOR, a rank from 0 to {workers - 1} and a factor above 0"
            )
        factors[int(who)] = factor
    return factors


def _print(answers: list[dict[str, Any]], theory: bool) -> None:
    table = Table("strategy", box=None)
    heads = ["s per update", "±", *(["by formula"] if theory else []), "minibatches/s", "staleness"]
    heads += ["by formula"] if theory else []
    for head in (*heads, "waiting", "cancelled"):
        table.add_column(head, justify="right")
    for answer in answers:
        formula = answer.get("theory") or {}
        waiting = answer["waiting"]
        row = [
            answer["strategy"],
            f"{answer['seconds_per_update']:.4g}",
            f"{1.96 * (answer['standard_error'] or 0):.2g}",
        ]
        row += [_number(formula.get("seconds_per_update"))] if theory else []
        row += [f"{answer['minibatches_per_second']:.4g}", f"{answer['staleness']['mean']:.3f}"]
        row += [_number(formula.get("staleness"))] if theory else []
        share = sum(waiting) / len(waiting) if waiting else 0.0
        table.add_row(*row, f"{share:.1%}", f"{answer['cancelled']:,}")
    Console().print(table)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
