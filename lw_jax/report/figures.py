"""Figures of runs and evaluations from plain values, as PNG files or as SVG inside a page.

Imports matplotlib and no JAX, so that a report starts no device.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lw_jax.evals.results import Curve

REFERENCES = {"text": ("the text itself", "-"), "none": ("no context", ":")}  # row -> (name, line) in the picture
WORDS = ("none", "truncated", "selected_taught")  # rows without a message, besides those of the whole text
QUALITIES = {"nll": "NLL, nats a token", "f1": "F1"}
MARKERS = {16: "o", 8: "s", 6: "D", 4: "^", 2: "v"}  # by bits a value
COLOURS = matplotlib.color_sequences["petroff10"]  # distinct for colour-blind readers too [Petroff, 2021]
matplotlib.rcParams["text.parse_math"] = False  # names of tasks and readers may hold "$"
FEW = 40  # a line of at most so many points marks each one
POINTS = {"-": "o", "--": "x", ":": "+"}  # by style: a single point has no line that would tell them apart


@dataclasses.dataclass(frozen=True)
class Line:
    """Values over optimizer steps; NaN where there is none."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    colour: int | None = None  # index into COLOURS; None: the text colour
    style: str = "-"


@dataclasses.dataclass(frozen=True)
class Panel:
    """Lines on one axis."""

    title: str
    unit: str  # label and unit of the values
    lines: Sequence[Line]
    is_logarithmic: bool


def draw_panels(
    panels: Sequence[Panel], *, borders: Sequence[tuple[str, int]] = (), label: str = "optimizer step"
) -> Figure:
    """Returns the panels, at least one, in one column over the same steps.

    `borders`: (name, first step) of each stage of the run; a single one is not drawn. `label`: of the steps.
    """
    figure = Figure(figsize=(10, 0.7 + 2.4 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for place, panel in zip(axes, panels, strict=True):
        for line in panel.lines:
            marker = POINTS[line.style] if len(line.steps) <= FEW else ""
            place.plot(
                line.steps,
                line.values,
                color="black" if line.colour is None else COLOURS[line.colour % len(COLOURS)],
                linestyle=line.style,
                linewidth=1.5,
                marker=marker,
                markersize=3 if marker == "o" else 6,
                label=line.label,
            )
        if panel.is_logarithmic:
            place.set_yscale("log")
            place.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            place.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if _leads(value) else ""))
        scale = " (log)" if panel.is_logarithmic else ""
        place.set_ylabel(f"{panel.title}\n{panel.unit}{scale}".strip(), fontsize=9)
        place.margins(x=0.01)
        place.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
        if len(borders) > 1:
            _draw_borders(place, borders, named=place is axes[0])
    axes[-1].set_xlabel(label)
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _leads(value: float) -> bool:
    return round(value / 10 ** math.floor(math.log10(value) + 1e-9)) in (2, 5)


def _draw_borders(panel: Axes, borders: Sequence[tuple[str, int]], *, named: bool) -> None:
    for number, (name, step) in enumerate(borders):
        panel.axvline(step, color="gray", linestyle="--", linewidth=1, zorder=1)
        if named:
            panel.annotate(
                f"stage {name}",
                (step, 1.02),
                xycoords=("data", "axes fraction"),
                xytext=(2, 9 * (number % 2)),  # a short stage's name would stand on the next one's
                textcoords="offset points",
                fontsize=8,
                color="gray",
            )


def draw_slots(similarity: Sequence[Sequence[float]]) -> Figure:
    """Returns the heat map of a matrix of cosines: blue is 1, red is -1."""
    figure = Figure(figsize=(5.2, 4.4), layout="constrained")
    panel = figure.subplots()
    image = panel.imshow(np.asarray(similarity, float), cmap="RdBu", vmin=-1, vmax=1, interpolation="none")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    panel.set_xlabel("slot of the message (number)")
    panel.set_ylabel("slot of the message (number)")
    figure.colorbar(image, ax=panel, label="mean cosine (no unit)")
    return figure


def draw_positions(names: Sequence[str], losses: Sequence[float]) -> Figure:
    """Returns perplexity over ranges of positions that double in length; losses in nats."""
    figure = Figure(figsize=(10, 3), layout="constrained")
    panel = figure.subplots()
    with np.errstate(over="ignore"):  # a very large loss becomes infinite and is not drawn
        perplexities = np.exp(np.asarray(losses, float))
    panel.plot(range(len(names)), perplexities, color=COLOURS[0], marker="o", linewidth=1.5)
    panel.set_xticks(range(len(names)), names)
    panel.set_xlabel("position of the predicted token in its window")
    panel.set_ylabel("perplexity")
    panel.margins(y=0.15)
    return figure


def draw_rows(readers: Mapping[str, Mapping[str, Any]], curve: Curve | None) -> Figure:
    """Returns quality over reader positions: F1 and NLL of each reader's rows, and messages of other sizes as a line.

    Rows: figures with "positions", "f1", "nll" and their intervals. The curve's points of the most bits are drawn.
    """
    figure = Figure(figsize=(10, 0.8 + 3.2 * len(readers)), layout="constrained")
    panels = figure.subplots(len(readers), 2, squeeze=False, sharex="row")
    names = list(dict.fromkeys(row for rows in readers.values() for row in rows))
    colours = _colours(names)
    for pair, (reader, rows) in zip(panels, readers.items(), strict=True):
        for panel, quality in zip(pair, ("f1", "nll"), strict=True):
            for row, result in rows.items():
                middle, (low, high) = result[quality], result.get(f"{quality}_interval") or (math.nan, math.nan)
                panel.errorbar(
                    result["positions"],
                    middle,
                    yerr=[[max(middle - low, 0)], [max(high - middle, 0)]],
                    fmt="s" if "text" in row or row in WORDS else "o",
                    color=colours[row],
                    markersize=6,
                    capsize=3,
                    elinewidth=1,
                    zorder=4,
                    label=row,
                )
            x, y = _by_slots(curve, reader, quality)
            if curve and len(x) > 1:
                label = f"messages by slots, of {curve.examples} examples"
                panel.plot(x, y, "o-", color="gray", markersize=4, linewidth=1, zorder=2, label=label)
            panel.set_ylabel(f"{reader}\n{QUALITIES[quality]}")
            panel.margins(0.08)
            panel.grid(alpha=0.3)
    for panel in panels[-1]:
        panel.set_xlabel("positions of the reader that hold the context")
    legends = [panel.get_legend_handles_labels() for panel in panels.flat]
    handles = {label: handle for legend in legends for handle, label in zip(*legend, strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside right upper", fontsize=8, frameon=False)
    figure.suptitle("Quality of answers against reader positions, with 95 % intervals")
    return figure


def _by_slots(curve: Curve | None, reader: str, quality: str) -> tuple[list[float], list[float]]:
    """Returns positions and figures of a reader's messages of the most bits and width."""
    points: list[Any] = [p for p in curve.points if p["reader"] == reader and quality in p] if curve else []
    most = max(((p["width"], p["bits"]) for p in points), default=None)
    line = sorted((p["positions"], p[quality]) for p in points if (p["width"], p["bits"]) == most)
    return [position for position, _ in line], [value for _, value in line]


def to_svg(figure: Figure, *, label: str) -> str:
    """Returns an <svg> element for a page: text stays text, black becomes the page's text colour, no background.

    `label`: the figure's description for screen readers, plain text.
    """
    file = StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    # Several figures share a page: drop the ids of groups, which would repeat; only referenced ids are needed.
    text = re.sub(r' id="[a-zA-Z][\w.]*_\d+"', "", text)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"| version="[^"]*"', "", text).replace("xlink:href", "href")
    text = text.replace("#000000", "currentColor")
    text_label = label.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    return text.replace("<svg", f'<svg role="img" aria-label="{text_label}"', 1)


def draw_curve(curve: Curve) -> Figure:
    readers = list(dict.fromkeys(point["reader"] for point in curve.points))
    figure = Figure(figsize=(10, 1.6 + 3.2 * len(readers)), layout="constrained")
    panels = figure.subplots(len(readers), 1, sharex=True, squeeze=False)[:, 0]
    for panel, reader in zip(panels, readers, strict=True):
        _draw_reader(panel, curve, reader)
    _name_codings(panels[0], curve.text_bytes)
    panels[-1].set_xlabel("bytes of one message with its frame (logarithmic)")
    _draw_legend(figure, curve)
    figure.suptitle(f"Quality of answers against bytes on the wire, {curve.examples} examples")
    return figure


def _draw_reader(panel: Axes, curve: Curve, reader: str) -> None:
    points: list[Any] = [point for point in curve.points if point["reader"] == reader]
    for channel, colour in _channel_colours(curve).items():
        line = sorted((p for p in points if _channel(p) == channel), key=lambda p: p["framed_bytes"])
        x, y = [p["framed_bytes"] for p in line], [p[curve.quality] for p in line]
        panel.plot(x, y, color=colour, linewidth=1.5, zorder=3, label=channel)
        for point, nbytes, value in zip(line, x, y, strict=True):
            panel.plot(nbytes, value, MARKERS[point["bits"]], color=colour, markersize=7, zorder=4)
    rows: dict[Any, Any] = {**curve.references.get(reader, {})}
    levels = {name: row[curve.quality] for name, row in rows.items() if math.isfinite(row[curve.quality])}
    for name, level in levels.items():
        label, style = REFERENCES[name]
        panel.axhline(level, color="black", linestyle=style, linewidth=1)
        # Two levels may be close: the higher one is labelled above, the lower one below.
        side = "bottom" if level == max(levels.values()) else "top"
        panel.annotate(label, (1.01, level), xycoords=("axes fraction", "data"), va=side, fontsize=8)
    for size in curve.text_bytes.values():
        panel.axvline(size, color="gray", linestyle="--", linewidth=1, zorder=1)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panel.set_ylabel(f"{reader}\n{QUALITIES[curve.quality]}")
    panel.margins(y=0.12)


def _name_codings(panel: Axes, text_bytes: dict[str, float]) -> None:
    """Labels each coding's line with name and size at its own height: codings of one text are close."""
    for level, (name, size) in enumerate(sorted(text_bytes.items(), key=lambda item: -item[1])):
        height = 1.03 + 0.075 * level
        line = Line2D([size, size], [1, height], color="gray", linestyle="--", linewidth=1, clip_on=False)
        line.set_transform(panel.get_xaxis_transform())
        panel.add_artist(line)
        panel.annotate(
            f"text, {name}: {size:,.0f} bytes",
            (size, height),
            xycoords=("data", "axes fraction"),
            xytext=(3, 0),
            textcoords="offset points",
            fontsize=8,
            color="gray",
            va="center",
        )


def _draw_legend(figure: Figure, curve: Curve) -> None:
    lines = [Line2D([], [], color=colour, label=channel) for channel, colour in _channel_colours(curve).items()]
    shown = sorted({point["bits"] for point in curve.points}, reverse=True)
    marks = [
        Line2D([], [], color="black", marker=MARKERS[bits], linestyle="", label=f"{bits} bits a value")
        for bits in shown
    ]
    figure.legend(handles=[*lines, *marks], loc="outside right upper", fontsize=8, frameon=False)


def _channel(point: Mapping[str, Any]) -> str:
    slots = f"{point['ratio']} tokens a slot" if "ratio" in point else f"{point['slots']} slots"
    return f"{slots} x {point['width']}"


def _channel_colours(curve: Curve) -> dict[str, Any]:
    return _colours(list(dict.fromkeys(_channel(point) for point in curve.points)))


def _colours(names: Sequence[str]) -> dict[str, Any]:
    """Returns a colour of its own for each name."""
    if len(names) <= len(COLOURS):
        return dict(zip(names, COLOURS, strict=False))
    return dict(zip(names, matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(names))), strict=True))
