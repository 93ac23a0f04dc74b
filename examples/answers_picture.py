"""Draws docs/answers.png from an evaluated run: answers of one frozen reader side by side, and exact match by row.

    python run.py --config configs/pairs.py
    python run.py eval --workdir runs/pairs-latentwire --config.eval.examples=256
    python examples/answers_picture.py --run runs/pairs-latentwire --reader qwen --out docs/answers.png

The cards are the first of the evaluation; none is chosen.
"""

import argparse
import dataclasses
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lw_jax.core import environment
from lw_jax.core.errors import UserError, leave
from lw_jax.report import records
from lw_jax.report.figures import COLOURS

COLUMNS = {"text": "with the text", "latents": "with its latents", "shuffled": "with another\ncard's latents"}
ROWS = COLUMNS | {"none": "with neither"}
RIGHT, WRONG, INK, FAINT = "#1a7f37", "#b3261e", "#1f2328", "#6e7781"
CARDS = 5


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of a run with eval.json")
    parser.add_argument("--reader", required=True, help="whose answers are shown")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    figure = draw(*read(args.run, args.reader), args.reader)
    try:
        figure.savefig(args.out, dpi=150, metadata={"Software": None})
    except (OSError, ValueError) as error:  # the last of a format
        raise UserError(f"--out {args.out}: {error}; name a .png in a writable folder") from error
    return 0


def read(run: Path, reader: str) -> tuple[list[dict[str, Any]], dict[str, Any], int]:
    """Returns the first cards with their answers by row, the figures by reader and row, the number of latents."""
    found = records.read(run)
    if not found.evaluation:
        raise UserError(f"{run}: it has no eval.json; run `python run.py eval --workdir {run}` first.")
    cfg, rows = found.cfg, found.evaluation["rows"]
    if reader not in rows:
        raise UserError(f"--reader {reader}: this run has {', '.join(rows)}.")
    if missing := [row for row in ROWS if row not in rows[reader]]:
        remedy = f"run `eval` again with --config.eval.rows={','.join(ROWS)}"
        raise UserError(f"{run}: its evaluation has no row {', '.join(missing)}; {remedy}")
    environment.hide_idle_cuda()  # before anything imports JAX
    from lw_jax.data import examples

    data = dataclasses.replace(cfg.data, validation_limit=0)  # an evaluation may take more than the limit
    contexts = {(one.id, one.question): one.context for one in examples.load(data, "validation", seed=cfg.seed)}
    cards: dict[int, dict[str, Any]] = {}
    for one in found.predictions:
        if one["reader"] != reader or (one["index"] not in cards and len(cards) == CARDS):
            continue
        context = contexts.get((one["id"], one["question"]))
        if context is None:
            raise UserError(f"{run}: predictions.jsonl is of other data than {cfg.data.validation}; run `eval` again")
        card = cards.setdefault(one["index"], {"context": context, "question": one["question"]})
        card[one["row"]] = (one["prediction"], one["em"] == 1)
    return list(cards.values()), rows, cfg.encoder.slots


def draw(cards: list[dict[str, Any]], rows: dict[str, Any], slots: int, reader: str) -> Figure:
    """Returns the picture: a table of answers on the left, exact match by row on the right."""
    figure = Figure(figsize=(13, 4.4), facecolor="white")
    _draw_answers(figure.add_axes((0.012, 0.02, 0.655, 0.96)), cards, slots, reader)
    _draw_bars(figure.add_axes((0.79, 0.06, 0.2, 0.79)), rows)
    return figure


def _draw_answers(panel: Axes, cards: list[dict[str, Any]], slots: int, reader: str) -> None:
    panel.set(xlim=(0, 1), ylim=(0, 1))
    panel.axis("off")
    title = f"A frozen reader ({reader}) answers from the text, or from {slots} latents alone"
    panel.text(0, 0.965, title, fontsize=12.5, weight="bold", color=INK, va="center")
    places = (0, 0.475, 0.60, 0.735, 0.88)
    heads = ("a card it was never trained on", "question", *COLUMNS.values())
    for x, head in zip(places, heads, strict=True):
        panel.text(x, 0.86, head, fontsize=10, color=FAINT, va="center")
    step = 0.80 / len(cards)
    for number, card in enumerate(cards):
        y = 0.80 - (number + 0.5) * step
        panel.axhline(y + step / 2, color="#d0d7de", linewidth=0.8)
        panel.text(0, y, textwrap.fill(card["context"], 58), fontsize=9, color=INK, va="center", linespacing=1.35)
        panel.text(places[1], y, card["question"], fontsize=10.5, color=INK, va="center")
        for x, row in zip(places[2:], COLUMNS, strict=True):
            answer, right = card[row]
            panel.text(x, y, answer or "(nothing)", fontsize=10.5, color=RIGHT if right else WRONG, va="center")


def _draw_bars(panel: Axes, rows: dict[str, Any]) -> None:
    count = round(max(figures["examples"] for found in rows.values() for figures in found.values()))
    panel.set_title(f"Exact match, {count} cards", fontsize=12.5, weight="bold", color=INK, pad=10)
    height = 0.8 / len(rows)
    for place, (name, found) in enumerate(rows.items()):
        for number, row in enumerate(ROWS):
            value, y = found[row]["em"], number + (place - (len(rows) - 1) / 2) * height
            panel.barh(y, value, height * 0.9, color=COLOURS[place], label=name if not number else None)
            low, high = found[row]["em_interval"] or (value, value)
            panel.plot((low, high), (y, y), color=INK, linewidth=1.2)
            panel.text(max(value, high) + 0.02, y, f"{value:.3f}", fontsize=9, va="center", color=INK)
    panel.set(xlim=(0, 1.2), yticks=range(len(ROWS)), xticks=(0, 0.5, 1))
    panel.set_yticklabels(ROWS.values(), fontsize=10)
    panel.invert_yaxis()
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(title=None, frameon=False, fontsize=9.5, loc="lower right")


if __name__ == "__main__":
    leave(main)
