"""Writes the page for one or several runs: a single file that needs no network."""

from __future__ import annotations

import string
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import UsageError
from paceline.report.compare import compare

_STATIC = resources.files("paceline.report") / "static"


def static(name: str) -> str:
    """The text of a static file."""
    return (_STATIC / name).read_text(encoding="utf-8")


SCRIPTS = ("timeline.js", "figures.js", "page.js")
"""Of every page, in their order."""


def html(title: str, scripts: str) -> str:
    """The page around its scripts."""
    page = string.Template(static("page.html"))
    return page.substitute(title=escape(title), style=static("page.css"), scripts=scripts)


def write_report(path: Path, title: str, runs: list[dict[str, Any]]) -> None:
    """Writes the page for the facts of these runs."""
    comparison = compare(runs) if len(runs) > 1 else None
    facts = {"title": title, "runs": runs, "comparison": comparison}
    data = msgspec.json.encode(facts).decode().replace("<", "\\u003c")
    scripts = [*map(static, SCRIPTS), f"report({data});"]
    safe = (script.replace("</script", "<\\/script") for script in scripts)
    page = html(title, "\n".join(f"<script>{script}</script>" for script in safe))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the page cannot be written to {path}: {error.strerror or error}") from None
