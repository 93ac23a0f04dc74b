"""Figures of a report, from plain values: lw_jax/report/figures.py."""

from lw_jax.evals.results import Curve
from lw_jax.report import figures
from tests import runs


def test_the_legend_names_what_any_panel_shows():
    told = runs.evaluation()["curve"]
    points = [told["points"][0] | {"reader": "qwen", "slots": slots, "positions": slots + 1.0} for slots in (3, 5)]
    rows = {"llama": {"text": runs.figures(0.5)}, "qwen": {"latents": runs.figures(0.25), "text": runs.figures(0.5)}}
    (legend,) = figures.draw_rows(rows, Curve(**told | {"points": points})).legends
    assert [text.get_text() for text in legend.get_texts()] == ["text", "latents", "messages by slots"]
