"""The reference of the Python interface, made from the public names, their docstrings and their options."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from typing import Any

import paceline
import paceline.policies
from paceline import collectives
from paceline.config.strategy import STRATEGIES, Strategy, strategy_class
from paceline.policies import Policy

_STRATEGIES = """# Strategies

Each is a value: `paceline.join(paceline.KSync(k=3))` is `--strategy k-sync:k=3` on the command line, which wins over
the script. A policy of the parameter server also takes the options of all policies.
"""


def reference_pages() -> dict[str, str]:
    """Markdown of every page of the reference, by its path on the site."""
    public = {name: getattr(paceline, name) for name in paceline.__all__}
    errors = [name for name, one in public.items() if _is(one, paceline.PacelineError)]
    others = [name for name, one in public.items() if name not in errors and not _is(one, Strategy)]
    own = [name for name in paceline.policies.__all__ if name not in public]
    return {
        "reference/team.md": _page(
            "Team and join", "All that a training script uses.", sorted(others, key=_join_first), "paceline"
        ),
        "reference/strategies.md": _strategies(),
        "reference/policies.md": _page(
            "The interface of a policy", "For a policy of your own.", own, "paceline.policies"
        ),
        "reference/collectives.md": _page(
            "Functions of paceline.collectives",
            "`from paceline import collectives`",
            list(collectives.__all__),
            "paceline.collectives",
        ),
        "reference/errors.md": _page("Errors", "The exceptions, all of them a `PacelineError`.", errors, "paceline"),
    }


def _is(one: object, base: type) -> bool:
    return isinstance(one, type) and issubclass(one, base)


def _join_first(name: str) -> tuple[int, str]:
    return ("join", "Team").index(name) if name in ("join", "Team") else 2, name


def _page(title: str, words: str, names: list[str], module: str) -> str:
    return "\n\n".join([f"# {title}", words, *(f"::: {module}.{name}" for name in names)]) + "\n"


# -- strategies ------------------------------------------------------------------------------------------------------


def _strategies() -> str:
    general = Policy.options()
    sections = [_STRATEGIES, "## Options of all policies\n", _options(Policy, general)]
    for spec in STRATEGIES:
        found = strategy_class(spec)
        own = {name: one for name, one in found.options().items() if not (_is(found, Policy) and name in general)}
        kind = "a policy of the parameter server; " if _is(found, Policy) else ""
        sections += [
            f"## {found.__name__}\n\n{kind}on the command line `{spec}`\n",
            inspect.cleandoc(found.__doc__ or "") + "\n",
            _options(found, own),
        ]
    return "\n".join(sections)


def _options(owner: type[Strategy], options: dict[str, Any]) -> str:
    if not options:
        return ""
    words: dict[str, str] = {}
    for one in reversed(owner.__mro__[:-1]):
        words |= _attribute_docs(one)
    defaults = {name: getattr(owner, name, None) for name in options}
    rows = [
        f"| `{name}` | {_default(default) if hasattr(owner, name) else 'required'} "
        f"| {words.get(name, '').replace('|', chr(92) + '|')} |"
        for name, default in defaults.items()
    ]
    return "\n".join(["| option | default | |", "|---|---|---|", *rows, ""])


def _default(value: object) -> str:
    return f"`{value.__name__ if isinstance(value, type) else repr(value)}`"


def _attribute_docs(owner: type) -> dict[str, str]:
    """Docstrings below the annotated attributes of a class."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    except (OSError, TypeError):
        return {}
    found: dict[str, str] = {}
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    for attribute, after in itertools.pairwise(body):
        if (
            isinstance(attribute, ast.AnnAssign)
            and isinstance(attribute.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            found[attribute.target.id] = " ".join(str(after.value.value).split())
    return found
