"""Evaluation of a trained wire: control table, joint answers, geometry of the latents, byte curve, and their files."""

import dataclasses
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import jax
import msgspec
import numpy as np

from lw_jax.core import eval_rows, progress, tree
from lw_jax.core.config import Eval
from lw_jax.core.errors import UserError
from lw_jax.core.files import write_whole
from lw_jax.core.progress import phase, say
from lw_jax.data.batches import Encoded, one_context
from lw_jax.data.examples import spread
from lw_jax.evals import (
    comparison,
    control_rows,
    first_token,
    geometry,
    joint,
    quality_curve,
    results,
    selection,
    swaps,
    verdict,
)
from lw_jax.evals.results import MODEL, Curve
from lw_jax.inference import coded_evaluation, taught_text
from lw_jax.inference.coded_wire import CodedWire
from lw_jax.inference.evaluation_log import PARTIAL, open_log
from lw_jax.inference.trained_wire import TrainedWire
from lw_jax.models import decoder
from lw_jax.planning.generation_memory import generation
from lw_jax.recipes.latentwire import LatentWire
from lw_jax.recipes.wire_readers import WireReaders
from lw_jax.training import evaluation_memory, memory_limit, out_of_memory, run_folder
from lw_jax.training.run_folder import EVALUATION
from lw_jax.training.step_spec import StepSpec

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Results of one evaluation."""

    measured: control_rows.Measured
    summary: dict[str, dict[str, comparison.Row]]  # reader -> row -> figures
    readers: dict[str, comparison.Row]  # reader -> comparison of its rows
    joint: dict[str, Any] | None  # None: one reader, or no row "latents"
    latents: dict[str, float | None]
    slots: list[list[float]]  # mean cosine between slots of one message
    curve: Curve | None  # quality by message size
    settings: dict[str, int]  # of section eval, on which figures depend


def evaluate(wire: TrainedWire | CodedWire, *, quiet: bool = False, folder: Path | None = None) -> Evaluation:
    """Returns the results that `cfg.eval` of the wire's configuration asks for; prints what it measures, or nothing.

    Records of the rows are written to the folder as they are made: see `evaluation_log`.
    """
    before = progress.quiet.set(quiet)  # sys.stdout is that of all threads
    try:
        return _evaluate_coded(wire, folder) if isinstance(wire, CodedWire) else _evaluate_latents(wire, folder)
    finally:
        progress.quiet.reset(before)


def _evaluate_latents(wire: TrainedWire, folder: Path | None) -> Evaluation:
    cfg, layout = wire.recipe.cfg, wire.recipe.layout
    coded_by_model = cfg.eval.curve != "none" and cfg.encoder.kind == "lm"
    if coded_by_model:  # it writes there behind all that is measured
        run_folder.check_writable(wire.recipe.surprisal.store.folder, remedy="set LW_JAX_CACHE to a writable folder")
    batch = _batch(wire.recipe)
    bench = _bench(wire, batch)
    measured = measure(wire, batch, bench, folder=folder)
    texts = control_rows.number_texts(measured.encoded)
    _, first = np.unique([texts[index] for index in measured.indices], return_index=True)
    latents = measured.latents[np.sort(first)]  # each text's once
    curve = None
    if cfg.eval.curve != "none":
        sizes = {"sent": cfg.stages.answer, "seed": cfg.seed}
        curve = _fitting(
            batch, cfg.eval, lambda options: quality_curve.sweep(bench, measured, options=options, **sizes)
        )
        if cut := measured.encoded.counts["source_cut"]:
            say(f"bytes of texts are of whole texts; the encoder read {cut} texts in part (data.overlong)")
        if coded_by_model:
            texts = quality_curve.texts_of(measured, cfg.eval)
            coded = quality_curve.model_bytes(texts, wire.recipe.surprisal.score(texts))
            if coded is not None:
                curve = dataclasses.replace(curve, text_bytes=curve.text_bytes | {MODEL: coded})
    summary = _summarise(measured, cfg.seed)
    readers = comparison.compare(measured.records, seed=cfg.seed)
    if jax.process_count() == 1:
        with phase("timing the first token of an answer"):
            times = first_token.measure(bench, measured, layout, rows=cfg.eval.rows)
        for name, reader_times in times.items():
            _add_times(reader_times, summary[name], readers[name])
    with phase("measuring rank and cosines of the latents"):
        figures, slots = geometry.describe(latents), geometry.slot_similarity(latents).tolist()
    return Evaluation(
        measured=measured,
        summary=summary,
        readers=readers,
        joint=_fitting(
            batch, cfg.eval, lambda options: joint.pick(bench, measured, layout, options=options, seed=cfg.seed)
        ),
        latents=figures,
        slots=slots,
        curve=curve,
        settings=_settings(cfg.eval),
    )


def _settings(options: Eval) -> dict[str, int]:
    return {"max_new_tokens": options.max_new_tokens, "taught_steps": options.taught_steps}


def _evaluate_coded(wire: CodedWire, folder: Path | None) -> Evaluation:
    """Returns the rows of a wire of kind "cache"; it has no latents whose geometry could be measured, and no curve."""
    cfg, batch = wire.recipe.cfg, _batch(wire.recipe)
    taught = _teach(wire, batch, set(cfg.eval.rows) & set(eval_rows.KNOWN_TO_CACHE))
    measured = _fitting(
        batch,
        cfg.eval,
        lambda options: coded_evaluation.measure(wire, batch=options.batch, folder=folder, taught=taught),
    )
    summary = _summarise(measured, cfg.seed)
    readers = comparison.compare(measured.records, seed=cfg.seed)
    for name, figures in readers.items():
        if (size := coded_evaluation.bytes_a_token(measured.records, name)) is not None:
            figures["bytes_a_token"] = size
        try:
            times, others = coded_evaluation.measure_times(wire, measured, name)
        except UserError as error:  # of the median text, where so few positions keep nothing: all rows are measured
            say(f"{name}: not timed: {error}")
            continue
        _add_times(times, summary[name], figures)
        figures |= {**others, "timed_ratio": wire.ratio or cfg.encoder.ratio}
    return Evaluation(
        measured, summary, readers, joint=None, latents={}, slots=[], curve=None, settings=_settings(cfg.eval)
    )


def _summarise(measured: control_rows.Measured, seed: int) -> dict[str, dict[str, comparison.Row]]:
    if not measured.records:
        raise UserError(
            "config.eval.rows: nothing is measured, as no answer of the questions can be exchanged for another's; name "
            "other rows too, or raise config.eval.examples"
        )
    return comparison.summarise(measured.records, seed=seed)


def _add_times(times: first_token.Times, summary: dict[str, comparison.Row], figures: comparison.Row) -> None:
    """Adds one reader's times to its rows and to their comparison."""
    for row, seconds in times.seconds.items():
        if row in summary:
            summary[row]["first_token_seconds"] = seconds
    text, message = times.seconds.values()
    figures |= {"faster": text / message, "timed_tokens": times.tokens}


def measure(
    wire: TrainedWire,
    batch: out_of_memory.HalvingBatch | None = None,
    bench: control_rows.WireSession | None = None,
    *,
    folder: Path | None = None,
) -> control_rows.Measured:
    """Returns one record per example, reader and row, with their examples and latents; the folder's are measured."""
    recipe, options = wire.recipe, wire.recipe.cfg.eval
    batch = batch or _batch(recipe)
    bench = bench or _bench(wire, batch)
    with phase("reading and tokenising the held-out data"):
        encoded = recipe.data("validation", rows=eval_rows.fields_of(options.rows), least=options.examples)
    say("held-out data: " + "\n".join([*encoded.describe(), *control_rows.describe_measured(encoded, options)]))
    options = _without_other_texts(options, encoded)
    _check_positions(recipe, encoded, options)
    changed = _make_swaps(recipe, encoded)
    if selection.ROW in options.rows:
        indices = spread(len(encoded), options.examples)
        scored = recipe.surprisal.score([encoded.examples[index].context for index in indices])
        encoded = selection.attach(encoded, indices, scored, layout=recipe.layout)
    if any(eval_rows.ROWS[row].compacted for row in options.rows):
        encoded = control_rows.attach_ceiling(encoded, spread(len(encoded), options.examples))
    if options.layers == "unstacked":
        say("answers: layers unstacked (eval.layers)")
    log = open_log(recipe, lambda: tree.digest(wire.trainable), encoded, folder, taught=bench.taught)
    return _fitting(
        batch,
        options,
        lambda options: control_rows.measure(
            bench, encoded, options=options, seed=recipe.cfg.seed, swaps=changed, log=log
        ),
    )


def _without_other_texts(options: Eval, encoded: Encoded) -> Eval:
    """Returns the options without the rows that need a second text, where the held-out examples have one alone.

    Random latents are drawn with the deviation over the texts that are measured: of one they would be its own.
    """
    measured = one_context([encoded.examples[index] for index in spread(len(encoded), options.examples)])
    alone = one_context(encoded.examples)
    other = [
        name
        for name in options.rows
        if (alone and (eval_rows.ROWS[name].latents == "other" or eval_rows.ROWS[name].compacted))
        or (measured and eval_rows.ROWS[name].latents == "random")
    ]
    if not other:
        return options
    rows = tuple(row for row in options.rows if row not in other)
    rule = f"need a second text, and all {'held-out' if alone else 'measured'} questions are about one"
    if not rows:
        raise UserError(
            f"config.eval.rows: {', '.join(other)} {rule}; name other rows, raise eval.examples, or export the "
            "wire and measure it on other data: eval --workdir WIRE --out DIR --config.data.validation=FILE"
        )
    say(f"left out: {', '.join(other)} {rule}")
    return dataclasses.replace(options, rows=rows)


def _check_positions(recipe: LatentWire, encoded: Encoded, options: Eval) -> None:
    """Refuses prompts that, with their answer, have more positions than a reader was trained on."""
    rows = [eval_rows.ROWS[row] for row in options.rows]
    for name, reader in recipe.wire.readers.items():
        lengths = {key: max(map(len, field.ids), default=0) for key, field in encoded.readers[name].items()}
        message = sum(lengths.get(key, 0) for key in ("before", "after")) + recipe.cfg.encoder.slots + 1
        prompts = [sum(lengths.get(key, 0) for key in row.fields) + row.taught for row in rows]
        needed = max(message, *prompts) + max(lengths["answer"] - 1, options.max_new_tokens)  # EOS is no input
        needs = [(needed, "the longest prompt and its answer take")]
        if any(row.compacted for row in rows):
            twice = 2 * lengths["context"] - lengths["before"] + lengths["asked"]
            needs.append((twice, "the longest text, which a row 'ceiling' reads twice, takes"))
        needed, what = max(needs)
        decoder.check_positions(
            reader.config,
            needed,
            what=f"reader {name!r}: {what}",
            remedy=f"lower config.data.context_tokens={recipe.cfg.data.context_tokens:,} (or encoder.slots, "
            "data.question_tokens, eval.max_new_tokens), or choose another reader or other rows",
        )


def _make_swaps(recipe: LatentWire, encoded: Encoded) -> swaps.Swaps | None:
    options = recipe.cfg.eval
    rows = [row for row in options.rows if eval_rows.ROWS[row].swapped]
    if not rows:
        return None
    indices = spread(len(encoded), options.examples)
    swapped = swaps.make(encoded, indices, layout=recipe.layout, fields=eval_rows.fields_of(rows))
    _check_positions(recipe, swapped.encoded, dataclasses.replace(options, rows=tuple(rows)))
    say(swapped.describe(rows, len(indices)))
    return swapped


def write(found: Evaluation, workdir: Path, *, step: int, data: str) -> list[Path]:
    """Writes eval.json, predictions.jsonl, slots.json and, with a curve, bytes.csv, of a checkpoint on these data."""
    result: results.Results = {
        "step": step,
        "validation": data,
        "rows": found.summary,
        "readers": found.readers,
        "joint": found.joint,
        "latents": found.latents,
        "curve": found.curve,
        "counts": found.measured.encoded.counts,
        "settings": found.settings,
    }  # pyright: ignore  # figures by name
    names = [EVALUATION, "predictions.jsonl", "slots.json"]
    if found.curve:
        names.append("bytes.csv")
        quality_curve.write_csv(found.curve, workdir / "bytes.csv")
    else:
        (workdir / "bytes.csv").unlink(missing_ok=True)  # of an earlier evaluation
    lines = (results.to_json(record) + "\n" for record in found.measured.records)
    write_whole(workdir / EVALUATION, msgspec.json.format(results.to_json(result), indent=2) + "\n")
    write_whole(workdir / "predictions.jsonl", "".join(lines))
    write_whole(workdir / "slots.json", results.to_json(found.slots) + "\n")
    (workdir / PARTIAL).unlink(missing_ok=True)
    return [workdir / name for name in names]


def describe(evaluation: Evaluation) -> str:
    lines = [comparison.table(evaluation.summary), ""]
    lines += [comparison.format_comparison(reader, figures) for reader, figures in evaluation.readers.items()]
    if evaluation.joint:
        lines.append(joint.format_figures(evaluation.joint))
    if evaluation.latents:
        lines.append(geometry.format_figures(evaluation.latents))
    if evaluation.curve:
        lines += ["", quality_curve.table(evaluation.curve)]
    rows = evaluation.summary
    lines += ["", *(verdict.sentence(name, row, rows.get(name, {})) for name, row in evaluation.readers.items())]
    return "\n".join(lines)


def _bench(wire: TrainedWire, batch: out_of_memory.HalvingBatch) -> control_rows.WireSession:
    taught = _teach(wire, batch, wire.recipe.cfg.eval.rows)
    return control_rows.WireSession(wire.functions, wire.frozen, wire.recipe.tokenizers, wire.trainable, taught=taught)


def _teach(
    wire: TrainedWire | CodedWire, batch: out_of_memory.HalvingBatch, rows: Collection[str]
) -> dict[str, jax.Array]:
    """Returns each reader's vector of the form of the answer, where one of the rows needs it."""
    if not any(eval_rows.ROWS[row].taught for row in rows):
        return {}
    options = wire.recipe.cfg.eval
    return _fitting(batch, options, lambda cfg: taught_text.teach(wire.recipe, wire.frozen, batch=cfg.batch))


def _batch(recipe: WireReaders) -> out_of_memory.HalvingBatch:
    cfg, batch = recipe.cfg, out_of_memory.HalvingBatch(recipe.cfg, recipe.placement, say=say)
    # Several processes cannot agree on another one where memory runs out.
    limit = memory_limit.local(cfg) if jax.process_count() > 1 else None
    if limit and (generates := generation(StepSpec(cfg, recipe))):  # of a cache wire it is not known
        estimate = evaluation_memory.of(generates, limit)
        if batch.fit(estimate.largest):
            say(f"{estimate.description}; it is taken")
    return batch


def _fitting(batch: out_of_memory.HalvingBatch, options: Eval, compute: Callable[[Eval], _T]) -> _T:
    try:
        return batch.run(lambda size: compute(dataclasses.replace(options, batch=size)))
    except out_of_memory.OutOfMemory as error:
        remedy = "split the readers (--config.mesh.placement=tensor) or take devices with more memory"
        raise UserError(f"{error}; {remedy}") from error
