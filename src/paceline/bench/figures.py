"""Figures of the measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Okabe and Ito's colours, which stay apart for colour-blind readers.
_COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"]


def draw_collectives(facts: dict[str, Any], path: Path) -> None:
    """Time and bandwidth over the size of the tensor, one curve per contestant, as a page that works offline."""
    points = facts["points"]
    curves: dict[str, tuple[list[Any], ...]] = {}
    for name in points[0]["contestants"]:
        seen = [point["contestants"][name] for point in points]
        both = [each["seconds"] / 1e-6 for each in seen], [each["bus"] / 1e9 for each in seen]
        curves[name] = [point["bytes"] for point in points], *both
    figure = _figure(f"{facts['operation']} on {facts['workers']} workers", "Time (µs)", "Bus bandwidth (GB/s)", curves)
    figure.update_xaxes(title_text="bytes", type="log")
    figure.update_yaxes(type="log", col=1)
    figure.write_html(path, include_plotlyjs=True)


def draw_scaling(facts: dict[str, Any], path: Path) -> None:
    """Efficiency and throughput over workers, one curve per batch size and precision, as a page that works offline."""
    curves: dict[str, tuple[list[Any], ...]] = {}
    for point in facts["points"]:
        curve = curves.setdefault(f"batch {point['batch']}, {point['precision']}", ([], [], []))
        for values, key in zip(curve, ("workers", "efficiency", "throughput"), strict=True):
            values.append(point[key])
    title = f"{facts['model']} under {facts['strategy']}"
    figure = _figure(title, "Efficiency over plain processes at once", "Samples per second", curves)
    figure.add_hline(1.0, line_dash="dot", line_color="grey", row=1, col=1)
    figure.update_xaxes(title_text="workers", dtick=1)
    figure.update_yaxes(rangemode="tozero")
    figure.write_html(path, include_plotlyjs=True)


def _figure(title: str, left: str, right: str, curves: dict[str, tuple[list[Any], ...]]) -> Any:
    """Two diagrams side by side. curves: by name, the values on the x axis, and those in the left and right one."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(1, 2, subplot_titles=(left, right), horizontal_spacing=0.12)
    for number, (name, (x, *both)) in enumerate(curves.items()):
        style = {"color": _COLOURS[number % len(_COLOURS)]}
        for column, y in enumerate(both, 1):
            figure.add_trace(go.Scatter(x=x, y=y, name=name, line=style, showlegend=column == 1), row=1, col=column)
    figure.update_layout(title=title, template="plotly_white")
    return figure
