"""Hooks of MkDocs: pages that are made from the code, and links that lead to them."""

from __future__ import annotations

from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from site_commands import command_reference
from site_pages import HOME, ROOT, is_download, linked_sources, place, rewritten, source_page
from site_reference import reference_pages


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are not in docs/."""
    made = {HOME[page]: (ROOT / page).read_text(encoding="utf-8") for page in HOME}
    made |= {place(file): source_page(file) for file in linked_sources() if not is_download(file)}
    made |= reference_pages()
    made["reference/commands.md"] = command_reference()
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    for file in linked_sources():
        if is_download(file):
            files.append(File.generated(config, place(file), content=(ROOT / file).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lets the links of a page lead to places of the site."""
    home = {made: written for written, made in HOME.items()}
    path = page.file.src_uri
    if path == HOME["README.md"]:
        page.meta["hide"] = ["navigation"]  # which would be empty
    if path in home:
        return rewritten(markdown, home[path])
    if page.file.generated_by is not None:
        return markdown
    return rewritten(markdown, f"docs/{path}")
