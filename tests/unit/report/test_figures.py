"""Figures of a report, from plain values: lw_jax/report/figures.py."""

from matplotlib.colors import to_hex

from lw_jax.core import eval_rows
from lw_jax.evals.results import Curve
from lw_jax.report import figures
from lw_jax.report.figures import Line, Panel
from tests import runs


def test_the_legend_names_what_any_panel_shows():
    told = runs.evaluation()["curve"]
    points = [told["points"][0] | {"reader": "qwen", "slots": slots, "positions": slots + 1.0} for slots in (3, 5)]
    rows = {"llama": {"text": runs.figures(0.5)}, "qwen": {"latents": runs.figures(0.25), "text": runs.figures(0.5)}}
    (legend,) = figures.draw_rows(rows, Curve(**told | {"points": points})).legends
    names = ["text", "latents", "messages by slots, of 11 examples"]
    assert [text.get_text() for text in legend.get_texts()] == names


def test_each_row_has_a_colour_of_its_own():
    rows = {row: runs.figures(0.5) for row, kind in eval_rows.ROWS.items() if not (kind.swapped or kind.ratio)}
    (legend,) = figures.draw_rows({"llama": rows}, None).legends
    colours = {to_hex(handle.get_color()[0]) for handle in legend.legend_handles}
    assert len(colours) == len(rows) > len(figures.COLOURS)


def test_lines_of_one_colour_are_told_apart_where_each_is_a_single_point():
    lines = [Line(style, [30], [1.0], 0, style) for style in ("-", "--", ":")]
    drawn = figures.draw_panels([Panel("answer", "NLL", lines, False)]).axes[0].lines
    assert len({line.get_marker() for line in drawn}) == len(lines)


def test_labels_of_readers_with_long_names_stand_apart():
    told, names = runs.evaluation()["curve"], [f"a_reader_of_thirty_letters_{n}" for n in ("one", "two")]
    curve = Curve(**told | {"points": [told["points"][0] | {"reader": name} for name in names], "references": {}})
    for figure in (
        figures.draw_curve(curve),
        figures.draw_rows({name: {"text": runs.figures(0.5)} for name in names}, None),
    ):
        figure.canvas.draw()
        upper, lower = (figure.axes[place].yaxis.label.get_window_extent() for place in (0, len(figure.axes) // 2))
        assert upper.y0 > lower.y1
