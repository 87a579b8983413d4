"""The site builds from the pages and the code, and every link leads somewhere: on the site and on a Git host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import site_commands
import site_pages
from helpers.documents import anchors, read
from site_docstrings import with_section
from site_pages import ROOT, is_relative, linked_file, links, pages, place, rewritten

import paceline
from paceline.cli.main import VERBS


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as strictly as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    # Strict: links, anchors and images that lead nowhere and pages that are not in the nav are errors.
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_has_all_pages_and_what_is_made_from_the_code(site: Path) -> None:
    expected = [place(page) for page in pages()]
    expected += [f"reference/{name}.md" for name in ("commands", "team", "strategies", "policies", "collectives")]
    for path in expected:
        assert (site / path).with_suffix(".html").is_file(), path
    text = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    assert "paceline simulate" in text and "--server-bandwidth" in text
    team = (site / "reference" / "team.html").read_text(encoding="utf-8")
    assert "clip_grad_norm_" in team and "samples of one step of all workers together" in team
    strategies = (site / "reference" / "strategies.html").read_text(encoding="utf-8")
    assert "zero-bubble-2p" in strategies


def test_nothing_on_the_site_is_loaded_from_elsewhere(site: Path) -> None:
    loaded = re.compile(
        r"<(?:script|img|iframe|source)[^>]*\ssrc=\"?(https?:[^\s\">]+)|<link[^>]*href=\"?(https?:[^\s\">]+)"
    )
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert [match[0] for match in loaded.finditer(text) if "canonical" not in match[0]] == [], path.name
    for path in (site / "site").iterdir():
        assert "http" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere_on_a_git_host(page: str) -> None:
    for match in links(read(page)):
        target = match["target"]
        if not is_relative(target) and not target.startswith("#"):
            assert target.startswith("https://"), target
            continue
        file = linked_file(page, target) if is_relative(target) else page
        assert (ROOT / file).exists(), f"{page} links to {target}"
        anchor = target.partition("#")[2]
        if anchor and file.endswith(".md"):
            assert anchor in anchors(file), f"{page} links to {target}"


def test_links_are_rewritten_outside_of_code_only() -> None:
    text = "[a](docs/plan.md#x) ![b](docs/figures/race.svg) [c](CHANGELOG.md) [d](https://e.org) `[e](docs/plan.md)`\n"
    told = "[a](plan.md#x) ![b](figures/race.svg) [c](changelog.md) [d](https://e.org) `[e](docs/plan.md)`\n"
    assert rewritten(text, "README.md") == told
    assert rewritten("[x](../../src/a.py)", "docs/policies/b.md") == "[x](../source/src/a.py.md)"
    assert rewritten("```\n[x](y.md)\n```\n[x](../README.md)", "docs/c.md") == "```\n[x](y.md)\n```\n[x](index.md)"


def test_every_command_and_option_is_in_the_reference() -> None:
    page = site_commands.command_reference()
    known = dict(site_commands.commands())
    assert {words.split()[0] for words in known} == set(VERBS)
    for words, command in known.items():
        section = page.partition(f"## paceline {words}\n")[2].partition("\n## ")[0]
        for one in site_commands.parameters(command):
            for name in one.opts if one.param_type_name == "option" else [(one.metavar or one.name.upper())]:
                assert re.search(rf"`{re.escape(name)}[ `]", section), f"{words}: {name}"


def test_every_public_name_is_in_the_reference() -> None:
    from site_reference import reference_pages

    text = "\n".join(reference_pages().values())
    for name in paceline.__all__:
        assert re.search(rf"^(::: paceline\.|## ){name}$", text, re.MULTILINE), name


def test_every_public_name_of_the_team_is_in_the_interface_at_a_glance() -> None:
    text = read("docs/interface.md")
    for name in (name for name in dir(paceline.Team) if not name.startswith("_")):
        assert re.search(rf"\bteam\.{name}\b", text), name


def test_lines_about_parameters_become_a_section() -> None:
    text = "Does it.\n\nMore: much.\n\nfirst: what it is,\nof two lines.\nsecond: another."
    told = "Does it.\n\nMore: much.\n\nArgs:\n    first: what it is,\n        of two lines.\n    second: another."
    assert with_section(text, ["first", "second"]) == told
    assert with_section("Only this.", ["first"]) == "Only this."
    assert with_section("So.\n\na, b: two.", ["a", "b"]) == "So.\n\nArgs:\n    a: two.\n    b: two."


def test_source_files_that_pages_link_to_have_pages() -> None:
    sources = site_pages.linked_sources()
    assert "src/paceline/collectives/algorithms/ring.py" in sources
    assert "examples/own_policy.py" in sources
    assert site_pages.source_page("examples/own_policy.py").startswith("# `examples/own_policy.py`\n\n~~~~~~python\n")
