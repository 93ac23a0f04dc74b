"""HTML page of a run, assembled from the files in its folder."""

from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from lw_jax.core.config import flatten, to_dict
from lw_jax.report import device_use, figures, language, records, scaling, series, tables
from lw_jax.report.records import Run

PAGE = "report.html"
SECTIONS = {
    "positions": "Reader positions",
    "controls": "Controls",
    "curves": "Curves",
    "latents": "Latents",
    "bytes": "Bytes on the wire",
    "examples": "Examples",
    "made": "Provenance",
}

COMMON = ("curves", "made")  # sections of every recipe's page


def render(run: Run) -> str:
    """Returns the page; every text from the run is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    shown = _head(run) | _curves(run) | _evaluation(run) | _bytes(run) | _made(run)
    shown["language"] = _language(run) if run.cfg.recipe == "ttt" else None
    return environment.get_template(PAGE).render(shown)


def _head(run: Run) -> dict[str, Any]:
    text = run.cfg.recipe == "ttt"
    sections = {id: title for id, title in SECTIONS.items() if run.cfg.recipe == "latentwire" or id in COMMON}
    if text:
        sections = {"curves": SECTIONS["curves"]} | language.SECTIONS | {"made": SECTIONS["made"]}
    step, steps = max((row["step"] for row in run.metrics), default=0), run.cfg.train.steps
    if run.cfg.encoder.kind == "cache":  # nothing is written of latents, nor of bytes below a message's own
        hidden = ("latents", "bytes") if steps else ("latents", "bytes", "curves")
        sections = {id: title for id, title in sections.items() if id not in hidden}
    return {
        "name": run.workdir.resolve().name,
        "progress": f"step {step:,} of {steps:,}" if steps else "nothing is trained",
        "logged": f"{run.logged:%Y-%m-%d %H:%M} UTC" if run.logged and run.metrics else "",
        "model": language.describe(run) if text else ", ".join(run.cfg.llms),
        "checkpoint": run.evaluation.get("step"),
        "verdicts": [language.verdict(run)] if text else tables.verdicts(run),
        "wire": run.cfg.recipe == "latentwire",
        "sections": sections,
        "commands": {
            "train": run.training,
            "eval": run.command("eval"),
            "curve": run.command("eval", "--config.eval.curve=nll"),
        },
    }


def _curves(run: Run) -> dict[str, Any]:
    kind, borders = language if run.cfg.recipe == "ttt" else series, series.borders(run)
    label = "over optimizer steps" + (", by task and reader" if kind is series else "")
    drawn = {
        name: _picture(figures.draw_panels(panels, borders=borders), f"{name} {label}") if panels else ""
        for name, panels in {"training": kind.training(run), "validation": kind.validation(run)}.items()
    }
    return drawn | {
        "stages": len(borders),
        "joined": series.count_joined(run),
        "undefined": series.count_undefined(run),
    }


def _language(run: Run) -> dict[str, Any]:
    step, spans = language.positions(run)
    positions, memory = language.by_position(spans), language.memory(run)
    known = {row[0] for row in memory.rows} if memory else set()
    names, losses = [row[0] for row in positions.rows], [loss for _, _, loss in spans]
    drawn = figures.draw_positions(names, losses) if spans else None
    return {
        "positions": positions,
        "position_step": f"{step:,}",
        "position_picture": _picture(drawn, "held-out perplexity by position in the window") if drawn else "",
        "tokens_a_step": language.tokens_a_step(run),
        "speed": language.speed(run),
        "devices": language.device_count(run),
        "balance": language.balance(run),
        "memory": memory,
        "memory_lacks": [name for name in ("activations and gradients", "peak") if name not in known],
        "scaling": scaling.tables(run),
        "configurations": scaling.configurations(run),
        "shares_cores": scaling.shares_cores(run),
    }


def _evaluation(run: Run) -> dict[str, Any]:
    evaluation = run.evaluation
    shown = tables.shown_rows(run.predictions)
    examples, count = tables.examples(run.predictions, shown)
    drawn = tables.drawable_rows(evaluation.get("rows", {}))
    return {
        "controls": [(reader, tables.control(rows)) for reader, rows in evaluation.get("rows", {}).items()],
        "between": tables.between(evaluation.get("readers", {})),
        "joint": tables.joint(evaluation["joint"]) if evaluation.get("joint") else None,
        "agreement": tables.agreement(evaluation["joint"]) if evaluation.get("joint") else "",
        "by_position": _picture(figures.draw_rows(drawn, run.curve), "quality of answers against reader positions")
        if drawn
        else "",
        "rows": tables.meanings(evaluation.get("rows", {})),
        "counts": tables.counts(evaluation["counts"]) if evaluation.get("counts") else "",
        "other_settings": tables.other_settings(run),
        "geometry": tables.geometry(evaluation["latents"]) if evaluation else None,
        "slots": _picture(figures.draw_slots(run.slots), "cosine between slots") if run.slots else "",
        "examples": examples,
        "example_rows": [tables.TITLES[row] for row in shown],
        "example_count": count,
    }


def _bytes(run: Run) -> dict[str, Any]:
    if (curve := run.curve) is None:
        return {"curve": ""}
    return {
        "curve": _picture(figures.draw_curve(curve), "quality of answers against bytes of a message"),
        "curve_examples": curve.examples,
        "points": tables.points(curve),
        "sizes": tables.sizes(curve),
    }


def _made(run: Run) -> dict[str, Any]:
    flat = flatten(to_dict(run.cfg))
    return {
        "texts": {name: run.texts.get(name, "").strip() for name in records.TEXTS},
        "config": "\n".join(f"{path}: {value!r}" for path, value in flat.items()),
        "devices": device_use.table(run.devices) if run.devices else None,
        "device_findings": device_use.findings(run.last_devices),
    }


def _picture(figure: Any, label: str) -> Markup:
    return Markup(figures.to_svg(figure, label=label))
