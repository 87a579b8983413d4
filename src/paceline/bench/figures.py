"""Figures of the measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Okabe and Ito's colours, which stay apart for colour-blind readers.
_COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"]


def draw_collectives(facts: dict[str, Any], path: Path) -> None:
    """Time and bandwidth over the size of the tensor, one curve per contestant, as a page that works offline."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(1, 2, subplot_titles=("Time (µs)", "Bus bandwidth (GB/s)"), horizontal_spacing=0.12)
    points = facts["points"]
    for number, name in enumerate(points[0]["contestants"]):
        style = {"color": _COLOURS[number % len(_COLOURS)]}
        for column, key, unit in ((1, "seconds", 1e-6), (2, "bus", 1e9)):
            values = [point["contestants"][name][key] / unit for point in points]
            curve = go.Scatter(
                x=[point["bytes"] for point in points], y=values, name=name, line=style, showlegend=column == 1
            )
            figure.add_trace(curve, row=1, col=column)
    figure.update_xaxes(title_text="bytes", type="log")
    figure.update_yaxes(type="log", col=1)
    title = f"{facts['operation']} on {facts['workers']} workers"
    figure.update_layout(title=title, template="plotly_white")
    figure.write_html(path, include_plotlyjs=True)


def draw_scaling(facts: dict[str, Any], path: Path) -> None:
    """Efficiency and throughput over workers, one curve per batch size and precision, as a page that works offline."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(1, 2, subplot_titles=("Scaling efficiency", "Samples per second"), horizontal_spacing=0.12)
    curves: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for point in facts["points"]:
        curves.setdefault((point["precision"], point["batch"]), []).append(point)
    for number, ((precision, batch), points) in enumerate(curves.items()):
        style = {"color": _COLOURS[number % len(_COLOURS)]}
        workers = [point["workers"] for point in points]
        name = f"batch {batch}, {precision}"
        for column, key in ((1, "efficiency"), (2, "throughput")):
            values = [point[key] for point in points]
            curve = go.Scatter(x=workers, y=values, name=name, line=style, showlegend=column == 1)
            figure.add_trace(curve, row=1, col=column)
    figure.add_hline(1.0, line_dash="dot", line_color="grey", row=1, col=1)
    figure.update_xaxes(title_text="workers", dtick=1)
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(title=f"{facts['model']} under {facts['strategy']}", template="plotly_white")
    figure.write_html(path, include_plotlyjs=True)
