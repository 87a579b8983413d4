"""The frame and the colours that all SVG figures share."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

WIDTH, LEFT = 960, 76
"""The width of a figure, and the place right of its rows' names, in pixels."""
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Okabe and Ito's colours, which stay apart for colour-blind readers."""
PASSES = {"F": "#0072B2", "B": "#009E73", "W": "#56B4E9"}
"""The colours of a pipeline's passes."""


def document(title: str, height: int, shapes: Iterable[str], style: str = "") -> str:
    """An SVG of these shapes below its title; `style` is added to the styles of text."""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}'>"
        f"<style>text{{font:13px system-ui,sans-serif;fill:#222}}.small{{font-size:11px;fill:#555}}{style}</style>"
        f"<rect width='{WIDTH}' height='{height}' fill='#ffffff'/>"
        f"<text x='{LEFT}' y='26' style='font-weight:600;font-size:15px'>{escape(title)}</text>{''.join(shapes)}</svg>"
    )
