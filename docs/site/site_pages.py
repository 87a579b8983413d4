"""Where the files of the repository are on the site, and Markdown whose links lead there.

Pages are written for a Git host: they link to each other and to source files by relative paths. On the site the README
is the first page, and every source file that a page links to has a page of its own.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs"
HOME = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages outside of docs/, and their places on the site."""
SOURCES = "source"
"""Folder of the site with a page for each source file that is linked to."""
_LINK = re.compile(r"(?<=\]\()(?P<target>[^)\s]+)(?=[)\s])")
_CODE = re.compile(r"```.*?^\s*```|~~~.*?^\s*~~~|`[^`\n]+`", re.DOTALL | re.MULTILINE)
_LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".toml": "toml", ".json": "json"}


def links(markdown: str) -> Iterator[re.Match[str]]:
    """Targets of the links and images outside of code."""
    code = [match.span() for match in _CODE.finditer(markdown)]
    for match in _LINK.finditer(markdown):
        if not any(first <= match.start() < last for first, last in code):
            yield match


def is_relative(target: str) -> bool:
    """True if a link is to another file of the repository."""
    return not re.match(r"[a-z]+:|#|/", target)


def linked_file(page: str, target: str) -> str:
    """The file that a relative link on a page leads to, both from the root of the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target.partition("#")[0]))


def place(file: str) -> str:
    """The site's own path of a file of the repository."""
    if file in HOME:
        return HOME[file]
    if file.startswith(f"{DOCS}/"):
        return file.removeprefix(f"{DOCS}/")
    return f"{SOURCES}/{file}" if is_download(file) else f"{SOURCES}/{file}.md"


def is_download(file: str) -> bool:
    """True if a file is offered as it is, and not shown on a page of its own."""
    return file.endswith(".ipynb")


def rewritten(markdown: str, page: str) -> str:
    """Markdown of a page of the repository, with links that lead to the same files on the site."""
    here = posixpath.dirname(place(page)) or "."
    parts, last = [], 0
    for match in links(markdown):
        target = match["target"]
        if is_relative(target):
            anchor = "".join(target.partition("#")[1:])
            parts += [
                markdown[last : match.start()],
                posixpath.relpath(place(linked_file(page, target)), here) + anchor,
            ]
            last = match.end()
    return "".join([*parts, markdown[last:]])


def source_page(file: str) -> str:
    """A page that shows a source file."""
    language = _LANGUAGES.get(Path(file).suffix, "text")
    text = (ROOT / file).read_text(encoding="utf-8").rstrip()
    return f"# `{file}`\n\n~~~~~~{language}\n{text}\n~~~~~~\n"


def pages() -> list[str]:
    """All Markdown files that are pages of the site, from the root of the repository."""
    return [*HOME, *sorted(str(path.relative_to(ROOT)) for path in (ROOT / DOCS).rglob("*.md"))]


def linked_sources() -> list[str]:
    """Source files that pages link to."""
    found = set()
    for page in pages():
        for match in links((ROOT / page).read_text(encoding="utf-8")):
            if is_relative(match["target"]):
                found.add(linked_file(page, match["target"]))
    return sorted(file for file in found if place(file).startswith(f"{SOURCES}/") and (ROOT / file).is_file())
