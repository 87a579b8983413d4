"""Figures of what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw_scaling(facts: dict[str, Any], path: Path) -> None:
    """Efficiency and throughput over workers, one curve per batch size and precision, as a page that works offline."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(1, 2, subplot_titles=("Scaling efficiency", "Samples per second"), horizontal_spacing=0.12)
    curves: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for point in facts["points"]:
        curves.setdefault((point["precision"], point["batch"]), []).append(point)
    # Okabe and Ito's colours, which stay apart for colour-blind readers.
    colours = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"]
    for number, ((precision, batch), points) in enumerate(curves.items()):
        style = {"color": colours[number % len(colours)]}
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
