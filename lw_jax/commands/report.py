"""The verb `report`: one page of a run, from what its folder holds; it needs no network, no device and no weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from lw_jax.core.config import Config, flatten, to_dict
from lw_jax.core.errors import UserError
from lw_jax.core.files import write_whole
from lw_jax.report import claims, figures, language, records, scaling, series, tables
from lw_jax.report.records import Run

PAGE = "report.html"
SECTIONS = {
    "curves": "Curves",
    "controls": "Controls",
    "latents": "Latents",
    "bytes": "Bytes on the wire",
    "examples": "Examples",
    "made": "How it was made",
}

ANY = ("curves", "made")  # what every recipe's page has


def main(cfg: Config, *, resolved: Mapping[str, Any], workdir: Path) -> int:
    """Writes WORKDIR/report.html; what the run has not made yet is told with the command that makes it.

    Raises:
      UserError: the folder is no run's, holds a damaged file, or cannot be written.
    """
    del cfg, resolved  # the page shows the run as it was made, whatever else was asked for now
    text = render(records.read(workdir))
    path = workdir / PAGE
    try:
        write_whole(path, text)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; the run's folder must be writable.") from error
    print(f"{path}: {len(text.encode()) / 1e3:,.0f} kB, opens in any browser")
    return 0


def render(run: Run) -> str:
    """Returns the page; every text of the run is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parents[1] / "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    shown = _head(run) | _curves(run) | _evaluation(run) | _bytes(run) | _made(run) | {"language": None}
    if run.cfg.recipe == "ttt":
        shown |= {"language": _language(run)}
    return environment.get_template(PAGE).render(shown)


def _head(run: Run) -> dict[str, Any]:
    text = run.cfg.recipe == "ttt"
    sections = {id: title for id, title in SECTIONS.items() if run.cfg.recipe == "latentwire" or id in ANY}
    if text:
        sections = {"curves": SECTIONS["curves"]} | language.SECTIONS | {"made": SECTIONS["made"]}
    step, steps = max((row["step"] for row in run.metrics), default=0), run.cfg.train.steps
    return {
        "name": run.workdir.resolve().name,
        "progress": f"step {step:,} of {steps:,}",
        "logged": f"{run.logged:%Y-%m-%d %H:%M} UTC" if run.logged and run.metrics else "",
        "model": language.describe(run) if text else ", ".join(run.cfg.llms),
        "checkpoint": run.evaluation.get("step"),
        "verdicts": [language.verdict(run)] if text else tables.verdicts(run),
        "wire": run.cfg.recipe == "latentwire",
        "sections": list(sections.items()),
        "sections_by_id": sections,
        "commands": {
            "train": run.training,
            "eval": run.command("eval"),
            "curve": run.command("eval", "--config.eval.curve=nll"),
        },
    }


def _curves(run: Run) -> dict[str, Any]:
    kind = language if run.cfg.recipe == "ttt" else series
    training, validation, borders = kind.training(run), kind.validation(run), series.borders(run)
    label = "over optimizer steps" + (", by task and reader" if kind is series else "")
    return {
        "training": _picture(figures.draw_panels(training, borders=borders), f"training {label}") if training else "",
        "validation": (
            _picture(figures.draw_panels(validation, borders=borders), f"validation {label}") if validation else ""
        ),
        "stages": len(borders),
        "joined": series.count_joined(run),
        "undefined": series.count_undefined(run),
    }


def _language(run: Run) -> dict[str, Any]:
    step, found = language.positions(run)
    drawn = figures.draw_positions([one.name for one in found], [one.loss for one in found]) if found else None
    memory = language.memory(run)
    return {
        "positions": language.by_position(found),
        "position_step": f"{step:,}",
        "position_picture": _picture(drawn, "held-out perplexity by position in the window") if drawn else "",
        "tokens_a_step": language.tokens_a_step(run),
        "speed": language.speed(run),
        "devices": language.device_count(run),
        "balance": language.balance(run),
        "memory": memory,
        "memory_whole": memory is not None and {"activations and gradients", "peak"} <= {row[0] for row in memory.rows},
        "measure": scaling.command(run, "--measured"),
        "scaling": scaling.tables(run),
        "unscaled": scaling.missing(run),
        "configurations": scaling.configurations(run),
        "shares_cores": scaling.shares_cores(run),
        "notes": claims.notes(),
    }


def _evaluation(run: Run) -> dict[str, Any]:
    told = run.evaluation
    examples, count = tables.examples(run.predictions)
    return {
        "controls": [(reader, tables.control(rows)) for reader, rows in told.get("rows", {}).items()],
        "between": tables.between(told.get("readers", {})),
        "joint": tables.joint(told["joint"]) if told.get("joint") else None,
        "agreement": tables.agreement(told["joint"]) if told.get("joint") else "",
        "rows": tables.ROWS,
        "counts": ", ".join(f"{name} {number}" for name, number in told.get("counts", {}).items() if number),
        "geometry": tables.geometry(told["latents"]) if told else None,
        "slots": _picture(figures.draw_slots(run.slots), "cosine between slots") if run.slots else "",
        "examples": examples,
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
        "devices": tables.devices(run.devices) if run.devices else None,
    }


def _picture(figure: Any, label: str) -> Markup:
    return Markup(figures.to_svg(figure, label=label))
