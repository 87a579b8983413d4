"""The Markdown of the repository as a reader uses it: its code blocks, commands, headings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from pymdownx.slugs import slugify  # type: ignore[import-untyped]
from site_pages import ROOT, pages

_FENCE = re.compile(
    r"(?:<!-- (?P<mark>[^>]*?) -->\n)?^(?P<indent> *)```(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
_INLINE = re.compile(r"(?<!`)`(paceline [^`\n]+)`(?!`)")


class Block(NamedTuple):
    """A code block."""

    page: str
    line: int
    language: str
    text: str
    mark: str = ""
    """What a comment above the block says about it: `file: NAME` or `run`."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """The fenced code blocks of a page, in their order."""
    text = read(page)
    found = []
    for match in _FENCE.finditer(text):
        indent = match["indent"]
        code = "".join(line.removeprefix(indent) for line in match["text"].splitlines(keepends=True))
        line = text.count("\n", 0, match.start("language")) + 1
        found.append(Block(page, line, match["language"], code, match["mark"] or ""))
    return found


def all_blocks() -> list[Block]:
    return [block for page in pages() if page != "CHANGELOG.md" for block in blocks(page)]


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command of a block that is no Python, without comments; lines that end in a backslash go on."""
    for line in block.text.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line.removeprefix("$ "), comments=True)
        except ValueError:  # no command: a drawing, or output
            continue
        while words and re.fullmatch(r"(export )?[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words:
            yield words


def inline_commands(page: str) -> Iterator[list[str]]:
    """The words of each `paceline …` in the text of a page."""
    for match in _INLINE.finditer(_FENCE.sub("", read(page))):
        yield shlex.split(match[1], comments=True)


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as Git hosts and the site make them."""
    found: dict[str, int] = {}
    slug = slugify(case="lower")
    for line in _FENCE.sub("", read(page)).splitlines():
        if match := re.match(r"#+ (.*)", line):
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match[1]).replace("`", "")
            found[slug(words, "-")] = found.get(slug(words, "-"), 0) + 1
    return {name if number == 0 else f"{name}-{number}" for name, count in found.items() for number in range(count)}


def with_added_lines(diff: str) -> str:
    """The code of a diff block: its lines with and without a plus."""
    return "".join(line[2:] if line.strip() else line for line in diff.splitlines(keepends=True))
