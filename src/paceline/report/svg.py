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


class Figure(str):
    """An SVG as text, which notebooks draw."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"<Figure of {len(self):,} characters>"


def document(title: str, height: int, shapes: Iterable[str], style: str = "") -> Figure:
    """An SVG of these shapes below its title; `style` is added to the styles of text."""
    size = f"viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}' style='max-width:100%'"
    # The class keeps the styles off the page that the figure is put into.
    return Figure(
        f"<svg xmlns='http://www.w3.org/2000/svg' class='paceline' {size}><style>"
        ".paceline text{font:13px system-ui,sans-serif;fill:#222}.paceline .small{font-size:11px;fill:#555}"
        f".paceline .inside{{font-size:11px;fill:#fff}}{style}</style>"
        f"<rect width='{WIDTH}' height='{height}' fill='#ffffff'/>"
        f"<text x='{LEFT}' y='26' style='font-weight:600;font-size:15px'>{escape(title)}</text>{''.join(shapes)}</svg>"
    )
