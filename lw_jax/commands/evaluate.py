"""The verb `eval`: a trained wire beside its controls, and the quality of its answers against bytes on the wire."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax

from lw_jax.core.config import Config, Eval
from lw_jax.core.errors import UserError
from lw_jax.core.files import write_whole
from lw_jax.data import batches
from lw_jax.evals import control_rows, geometry, joint, quality_curve
from lw_jax.inference.trained_wire import TrainedWire, open_wire
from lw_jax.recipes.latentwire import LatentWire
from lw_jax.report import figures
from lw_jax.training import micro_batch_search
from lw_jax.training.run_folder import check_writable
from sharding import place

_T = TypeVar("_T")


def main(cfg: Config, *, resolved: dict[str, Any], workdir: Path) -> int:
    """Measures `eval.examples` validation examples from the best checkpoint (the latest where none was validated)."""
    del resolved
    if jax.process_index() == 0:
        check_writable(workdir, remedy="`eval` leaves its results in the run's folder: copy it to where you can write")
    wire = open_wire(cfg, workdir)
    found = evaluate(wire)
    if jax.process_index() == 0:
        paths = write(found, workdir, step=wire.step)
        print(tell(found))
        print(f"checkpoint {wire.step}; " + ", ".join(map(str, paths)))
    return 0


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Everything that one evaluation found."""

    measured: control_rows.Measured
    summary: dict[str, dict[str, control_rows.Row]]  # reader -> row -> figures
    readers: dict[str, control_rows.Row]  # reader -> figures between its rows
    joint: dict[str, Any] | None  # None: one reader, or no row "latents"
    latents: dict[str, float | None]
    slots: list[list[float]]  # mean cosine between slots of one message
    sizes: quality_curve.Curve | None  # quality against bytes


def evaluate(wire: TrainedWire) -> Evaluation:
    """Returns what `cfg.eval` of the wire's configuration asks for."""
    cfg = wire.recipe.cfg
    told = {"seed": cfg.seed}
    batch = _batch(wire.recipe)
    measured = measure(wire, batch)
    used, bench = measured.latents[different_inputs(measured, wire.recipe.layout)], _bench(wire)
    sizes = None
    if cfg.eval.curve != "none":
        named = {"sent": cfg.stages.answer, "encoder": wire.encoder_fingerprint, "seed": cfg.seed}
        sizes = _fitting(batch, cfg.eval, lambda asked: quality_curve.sweep(bench, measured, asked=asked, **named))
    layout = wire.recipe.layout
    return Evaluation(
        joint=_fitting(batch, cfg.eval, lambda asked: joint.pick(bench, measured, layout, asked=asked, seed=cfg.seed)),
        measured=measured,
        summary=control_rows.summarise(measured.records, **told),
        readers=control_rows.compare(measured.records, **told),
        latents=geometry.describe(used),
        slots=geometry.slot_similarity(used).tolist(),
        sizes=sizes,
    )


def measure(wire: TrainedWire, batch: micro_batch_search.Batch | None = None) -> control_rows.Measured:
    """Returns one record per example, reader and row, and what they were made of."""
    batch = batch or _batch(wire.recipe)
    encoded = wire.recipe.data("validation", rows=wire.recipe.cfg.eval.rows)
    for line in encoded.describe():
        print(line, flush=True)
    if wire.recipe.cfg.eval.layers == "unstacked":
        print("answers: each layer's weights are an array of their own (eval.layers)", flush=True)
    return _fitting(batch, wire.recipe.cfg.eval, lambda asked: control_rows.measure(_bench(wire), encoded, asked=asked))


def predict(recipe: LatentWire) -> control_rows.Predict:
    """Returns the recipe's functions that the control table is made with."""
    return control_rows.Predict(
        recipe.encode, recipe.prompt_from_latents, recipe.prompt_from_text, recipe.score, recipe.generate
    )


def write(found: Evaluation, workdir: Path, *, step: int) -> list[Path]:
    """Writes eval.json, predictions.jsonl, slots.json and, with a curve, bytes.csv and bytes.png."""
    result = {
        "step": step,
        "rows": found.summary,
        "readers": found.readers,
        "joint": found.joint,
        "latents": found.latents,
        "curve": None,
        "text_bytes": None,
        "counts": found.measured.encoded.counts,
    }
    names = ["eval.json", "predictions.jsonl", "slots.json"]
    if found.sizes:
        told = dataclasses.asdict(found.sizes)
        result |= {"text_bytes": told.pop("text_bytes"), "curve": told}
        names += ["bytes.csv", "bytes.png"]
        quality_curve.write_csv(found.sizes, workdir / "bytes.csv")
        figures.draw_curve(found.sizes).savefig(workdir / "bytes.png", dpi=130)
    lines = (_to_json(record) + "\n" for record in found.measured.records)
    write_whole(workdir / "eval.json", _to_json(result, indent=2) + "\n")
    write_whole(workdir / "predictions.jsonl", "".join(lines))
    write_whole(workdir / "slots.json", _to_json(found.slots) + "\n")
    return [workdir / name for name in names]


def tell(found: Evaluation) -> str:
    """Returns everything that a person at a terminal wants to see."""
    lines = [control_rows.table(found.summary), ""]
    lines += [control_rows.tell(reader, figures) for reader, figures in found.readers.items()]
    if found.joint:
        lines.append(joint.tell(found.joint))
    lines.append(geometry.tell(found.latents))
    if found.sizes:
        lines += ["", quality_curve.table(found.sizes)]
    return "\n".join(lines)


def _bench(wire: TrainedWire) -> control_rows.Bench:
    recipe = wire.recipe
    return control_rows.Bench(
        predict(recipe),
        wire.trainable,
        wire.frozen,
        decode={name: tokenizer.decode for name, tokenizer in recipe.tokenizers.items()},
        place=lambda batch, name: place.put_eval(batch, recipe.mesh_of(name)),
    )


def _batch(recipe: LatentWire) -> micro_batch_search.Batch:
    size, multiple = recipe.cfg.eval.batch, recipe.placement.data
    return micro_batch_search.Batch(
        place.round_up(size, multiple), multiple=multiple, tell=functools.partial(print, flush=True)
    )


def _fitting(batch: micro_batch_search.Batch, asked: Eval, compute: Callable[[Eval], _T]) -> _T:
    """Returns what is computed in batches that fit into memory."""
    try:
        return batch.run(lambda size: compute(dataclasses.replace(asked, batch=size)))
    except micro_batch_search.OutOfMemory as error:
        remedy = "split the readers (--config.mesh.placement=tensor) or store them in fewer bits"
        raise UserError(f"{error}; {remedy}") from error


def different_inputs(measured: control_rows.Measured, layout: batches.Layout) -> list[int]:
    """Returns the first position of each text that was written: questions about one context may share its latents."""
    first: dict[str, int] = {}
    for position, index in enumerate(measured.indices):
        first.setdefault(layout.source_text(measured.encoded.examples[index]), position)
    return list(first.values())


def _to_json(value: Any, *, indent: int | None = None) -> str:
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    """Returns the value with null for every number that JSON has no word for."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
