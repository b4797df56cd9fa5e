"""The figures of the demonstration, on matplotlib. They show results and compute none.

Colours tell the same apart everywhere: blue is reliable or right, red unreliable or wrong, amber never seen.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from terrafirma.errors import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from terrafirma.experiments.digits import Digits
    from terrafirma.experiments.half_moons import HalfMoons

__all__ = ["digits_figure", "half_moons_figure", "render"]

BLUE, RED, AMBER, GREY, INK = "#2b6cb0", "#c53030", "#d69e2e", "#a0aec0", "#1a202c"
SCORES = (  # colour, line style and width of each score's line
    (INK, "-", 2.0),
    ("#2c7a7b", "-", 1.4),
    ("#805ad5", (0, (5, 2)), 1.4),
    ("#b83280", (0, (1, 1.4)), 1.6),
)
SHOWN, EXTREME = 24, 0.2  # digits shown, drawn from this share of the most and of the least reliable
RELIABILITY = "YlGnBu_r"  # dark = dense = reliable
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "terrafirma",  # the same picture gives the same bytes
}


def half_moons_figure(result: HalfMoons) -> Figure:
    """Four panels: the data, the linear regions, the log bound as a surface and as a heat map."""
    with _style():
        figure = _figure(13.6, 3.5)
        grid = figure.add_gridspec(
            1, 5, width_ratios=[1, 1, 1.3, 1, 0.045], wspace=0.2, left=0.025, right=0.95, bottom=0.1, top=0.9
        )
        extent = float(result.axis[-1])
        flat = [figure.add_subplot(grid[0, i]) for i in (0, 1, 3)]
        surface = figure.add_subplot(grid[0, 2], projection="3d")
        for axes in flat:
            axes.set(xlim=(-extent, extent), ylim=(-extent, extent), aspect="equal", anchor="C")
            axes.set(xticks=(-extent, 0, extent), yticks=(-extent, 0, extent))
        _draw_points(flat[0], result)
        _draw_regions(flat[1], result)
        _draw_surface(surface, result)
        _draw_heat(flat[2], figure.add_subplot(grid[0, 4]), result)
    return figure


def digits_figure(result: Digits) -> Figure:
    """Accuracy against coverage, the distribution of the log bound, and the least and most reliable digits."""
    with _style():
        figure = _figure(11, 5.6)
        grid = figure.add_gridspec(
            2, 2, height_ratios=[2.1, 1], hspace=0.34, wspace=0.16, left=0.07, right=0.98, top=0.94, bottom=0.02
        )
        _draw_accuracy(figure.add_subplot(grid[0, 0]), result)
        _draw_distribution(figure.add_subplot(grid[0, 1]), result)
        order = np.argsort(result.log_bound, kind="stable")
        draw, n = np.random.default_rng(0), round(EXTREME * len(order))
        for axes, rows, name in (
            (figure.add_subplot(grid[1, 0]), order[:n], "most reliable (blue: right, red: wrong, amber: never seen)"),
            (figure.add_subplot(grid[1, 1]), order[-n:], "least reliable"),
        ):
            _draw_digits(axes, result, draw.choice(rows, SHOWN, replace=False), f"Of the {EXTREME:.0%} {name}")
    return figure


def render(figure: Figure, kind: str) -> bytes:
    """The picture as the bytes of a PNG or SVG file."""
    buffer = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else None
    with _style():
        figure.savefig(buffer, format=kind, dpi=170, metadata=metadata)
    return buffer.getvalue()


def _style() -> Any:
    matplotlib = require("matplotlib", extra="plots")
    return matplotlib.rc_context(STYLE)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor="white")


def _draw_points(axes: Axes, result: HalfMoons) -> None:
    for label, colour in ((0, BLUE), (1, AMBER)):
        points = result.points[result.labels == label]
        axes.scatter(points[:, 0], points[:, 1], s=1.5, color=colour, linewidths=0, rasterized=True)
    axes.set_title(f"(a) {len(result.points)} training points")


def _draw_regions(axes: Axes, result: HalfMoons) -> None:
    from matplotlib.collections import PolyCollection

    colours = np.random.default_rng(0).uniform(0.55, 0.95, size=(len(result.regions), 3))  # to tell neighbours apart
    polygons = PolyCollection(
        [r.corners for r in result.regions], facecolors=colours, edgecolors="white", linewidths=0.15
    )
    axes.add_collection(polygons)
    axes.set_title(f"(b) {len(result.regions)} linear regions")


def _draw_surface(axes: Any, result: HalfMoons) -> None:
    x, y = np.meshgrid(result.axis, result.axis)
    ends = (result.axis[0], 0, result.axis[-1])
    axes.plot_surface(
        x, y, result.surface, cmap=RELIABILITY, rcount=120, ccount=120, linewidth=0, antialiased=False, rasterized=True
    )
    axes.view_init(elev=38, azim=-60)
    axes.set_box_aspect((1, 1, 0.6), zoom=1.04)
    axes.tick_params(labelsize=7, pad=-2)
    axes.set(xticks=ends, yticks=ends)
    axes.set_title("(c) log bound: a landscape", y=1.04)


def _draw_heat(axes: Axes, bar: Axes, result: HalfMoons) -> None:
    from matplotlib.collections import PolyCollection

    # edges in the colour of the face close the hair between neighbours
    polygons = PolyCollection(
        [r.corners for r in result.regions],
        array=result.log_bounds,
        cmap=RELIABILITY,
        edgecolors="face",
        linewidths=0.3,
    )
    axes.add_collection(polygons)
    sparse = result.points[::10]
    axes.scatter(sparse[:, 0], sparse[:, 1], s=2, color="white", edgecolors=INK, linewidths=0.2, rasterized=True)
    axes.set_title("(d) log bound: from above")
    axes.figure.colorbar(polygons, cax=bar, label="log bound")


def _draw_accuracy(axes: Axes, result: Digits) -> None:
    for (name, curve), (colour, style, width) in zip(result.curves.items(), SCORES, strict=True):
        accuracy = 100 * (1 - curve.risk)
        axes.plot(100 * curve.coverage, accuracy, label=name, color=colour, linestyle=style, linewidth=width)
    axes.set(xlim=(50, 100.5), xlabel="accepted (%)", ylabel="accuracy of the accepted (%)")
    axes.legend(loc="lower left")
    axes.set_title("Digits 0-7: refusing the least reliable")


def _draw_distribution(axes: Axes, result: Digits) -> None:
    known = ~result.novel
    right, wrong = result.log_bound[known & ~result.wrong], result.log_bound[result.wrong]
    novel = result.log_bound[result.novel]
    edges = np.linspace(result.log_bound.min(), result.log_bound.max(), 41)
    tallest = 0.0
    for name, values, colour in (("0-7, right", right, BLUE), ("8 and 9, never seen", novel, AMBER)):
        shares = 100.0 * np.histogram(values, edges)[0] / len(values)
        axes.stairs(shares, edges, fill=True, color=colour, alpha=0.55, label=f"{name} ({len(values)})")
        tallest = max(tallest, shares.max())
    # few are wrong: one tick each, below the histogram, says more than bars
    ticks = np.full(len(wrong), -0.05 * tallest)
    axes.plot(wrong, ticks, "|", color=RED, markersize=9, label=f"0-7, wrong ({len(wrong)}, one tick each)")
    axes.set(xlabel="log bound (higher = less reliable)", ylabel="share of the group (%)")
    axes.set(ylim=(-0.1 * tallest, 1.05 * tallest))
    axes.legend(loc="upper right", handlelength=1.2)
    axes.set_title("Unreliability by outcome")


def _draw_digits(axes: Axes, result: Digits, rows: Any, title: str) -> None:
    """Digits in three rows of eight, each with its prediction, in the colour of its outcome."""
    for i, row in enumerate(rows):
        x, y = 1.6 * (i % 8), -(i // 8)
        axes.imshow(result.images[row], cmap="gray_r", extent=(x, x + 0.92, y, y + 0.92), interpolation="nearest")
        colour = AMBER if result.novel[row] else RED if result.wrong[row] else BLUE
        axes.text(
            x + 1.0, y + 0.46, str(result.predictions[row]), color=colour, va="center", fontsize=10, fontweight="bold"
        )
    axes.set(xlim=(-0.05, 12.8), ylim=(-2.05, 1.0), aspect="equal")
    axes.axis("off")
    axes.set_title(title)
