"""Model card of an exported wire: README.md in the hub's form, from the run's folder. Needs no JAX."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lw_jax.core.validation import MADE
from lw_jax.data import row_sources
from lw_jax.evals.results import ROW
from lw_jax.hub import licences, wire_repository
from lw_jax.hub.sources import SELFMADE
from lw_jax.report import tables
from lw_jax.report.records import Run
from lw_jax.training.wire_folder import BODY, Model, WireFolder, flag, label

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

LIBRARY = "latentwire-jax"
COLUMNS = {  # of a row; of the intervals that of F1
    name: ROW[name]._replace(interval=name == "f1")
    for name in ("positions", "first_token_seconds", "em", "f1", "nll", "examples")
}
UNKNOWN = "not known to the program: state it here before you publish"


def render(run: Run, wire: WireFolder, sizes: Mapping[str, int], *, repository: str = "", licence: str = "") -> str:
    """Returns the card of a wire that was exported from a run.

    `sizes`: bytes of its parts. Its owner states the `repository` of the hub, where it goes there, and the `licence` of
    the wire itself by the hub's identifier; empty: not stated.
    """
    name = repository.rpartition("/")[2] or run.workdir.resolve().name
    parts = [
        _what(run, wire),
        _use(run, wire, repository),
        _results(run, wire),
        _licences(run, wire, licence),
        _models(wire),
        _made(run, wire),
        _limits(run, wire),
        _files(wire, sizes),
    ]
    return "\n".join([_front(run, wire, name, licence), f"# {_plain(name)}\n", *parts])


def _front(run: Run, wire: WireFolder, name: str, licence: str) -> str:
    from huggingface_hub import ModelCardData

    bases = dict.fromkeys(filter(None, [_joined(run), *map(_repository, wire.models.values())]))
    data = [_hub_data(source) for _, source in _named(run)]
    spoken = {licences.DATA[dataset].language for dataset in data if dataset in licences.DATA}
    spoken |= {"en" for _, source in _named(run) if source in MADE}  # the program's own texts are English
    own = _is_of(run, wire) and _is_exact(run, wire)
    scores = _scores(run) if own and not tables.other_settings(run) else []
    metadata = ModelCardData(
        language=sorted(spoken) or None,
        license=licence or "other",
        license_name=None if licence else "not-stated",
        library_name=LIBRARY,
        pipeline_tag="question-answering",
        tags=["latentwire", "context-compression", "soft-prompts", "jax"],
        base_model=list(bases) or None,
        base_model_relation="adapter" if bases else None,
        datasets=sorted(set(filter(None, data))) or None,
        model_name=name if scores else None,
        eval_results=scores or None,
    )
    return f"---\n{metadata.to_yaml()}\n---\n"


def _scores(run: Run) -> list["EvalResult"]:
    """Returns exact match and F1 of each reader's message, in the hub's form; shares of 1."""
    from huggingface_hub import EvalResult

    dataset, results = run.evaluation["validation"], []
    kind = "" if "," in dataset else _hub_data(dataset)
    for reader, rows in run.evaluation.get("rows", {}).items():
        sent = rows.get("latents", {})
        size = "" if sent.get("positions") is None else f", {sent['positions']:,.1f} positions"
        for key, metric, called in (("em", "exact_match", "EM"), ("f1", "f1", "F1")):
            if sent.get(key) is not None:
                results.append(
                    EvalResult(
                        task_type="question-answering",
                        dataset_type=kind or "other",
                        dataset_name=_name_of(dataset),
                        metric_type=metric,
                        metric_name=f"{called} of reader {reader}{size}",
                        metric_value=round(sent[key], 4),
                    )
                )
    return results


def _is_cache(run: Run) -> bool:
    return run.cfg.encoder.kind == "cache"


def _what(run: Run, wire: WireFolder) -> str:
    if _is_cache(run):
        return _what_cache(run, trained=wire.step > 0)
    encoder = run.cfg.encoder
    size = f"{encoder.slots} latents of {encoder.width} values"
    if encoder.ratio:
        size = f"a latent of {encoder.width} values for every {encoder.ratio} tokens, {encoder.slots} at most"
    prefix = "keys and values of every layer" if run.cfg.adapter.kind == "kv" else "soft input embeddings"
    readers = ", ".join(f"`{name}`" for name in run.cfg.llms)
    return _paragraph(
        f"A wire of LatentWire JAX: an encoder writes a text once as {size}. An adapter for each frozen reader "
        f"({readers}) turns them into {prefix}. The reader sees "
        "the message and the question, never the text. This folder holds the encoder's and the adapters' trained "
        "arrays; the readers are fetched from where they are."
    )


def _what_cache(run: Run, *, trained: bool) -> str:
    made = "Bases, means and scales were computed, then trained." if trained else "Nothing was trained."
    encoder, readers = run.cfg.encoder, ", ".join(f"`{name}`" for name in run.cfg.llms)
    return _paragraph(
        f"A wire of LatentWire JAX: a text's message is each frozen reader's own keys and values ({readers}), "
        f"{encoder.width} numbers a token in one basis, and which tokens each head keeps, 1 of {encoder.ratio} unless "
        f"asked otherwise. {made} This folder holds each reader's basis, means, scales and tables; the "
        "readers are fetched from where they are, and a text is written by those who have them."
    )


def _use(run: Run, wire: WireFolder, repository: str) -> str:
    local, place = [name for name, model in wire.models.items() if model.local], repository or "THIS_FOLDER"
    moved = "".join(f" {flag(name)}FOLDER" for name in local)
    pairs = ", ".join(f'"{name.replace("/", ".")}.source": "FOLDER"' for name in local)
    sources = f", config={{{pairs}}}" if pairs else ""
    validation = run.cfg.data.validation
    held_out = "" if validation in MADE or _hub_data(validation) else " --config.data.validation=FILE"
    reader = next(iter(run.cfg.llms))
    call, what = ("prompt_embeds", "f32 [t, d]")
    if run.cfg.adapter.kind == "kv" or _is_cache(run):
        call, what = "prefix_kv", "keys and values, and the embeddings behind them"
    options = ", ratio=1" if _is_cache(run) else ""
    lines = [
        "## Use\n",
        "```sh",
        f'python run.py answer --workdir {place} --context notes.txt --question "Who wrote it?"{moved}',
        f"python run.py eval --workdir {place} --out results{held_out}{moved}",
        "```\n",
        "```python",
        "import lw_jax",
        "",
        f'wire = lw_jax.load_wire("{place}"{sources})',
        'text, question = "Mara Ellis lives in Lisbon.", "Where does Mara Ellis live?"',
        f"message = wire.write(text{options})  # bytes",
        f'print(wire.read(message, reader="{reader}", question=question))',
        f'prompt = wire.{call}(message, reader="{reader}", question=question)  # {what}, for other programs',
        "```\n",
    ]
    if local:
        names = " and ".join(label(name) for name in local)
        lines.append(_paragraph(f"Local folders when the wire was exported, to be named where you have them: {names}."))
    return "\n".join(lines)


def _models(wire: WireFolder) -> str:
    rows = []
    for name, model in wire.models.items():
        rows += [(label(name), _place(model), f"`{file}`", f"`{sha256}`") for file, sha256 in model.sha256.items()]
    text = _paragraph(
        "The wire belongs to these models and holds none of their files. Others are refused by their hashes."
    )
    return f"## Models\n\n{text}\n{_table(('model', 'source', 'weight file', 'sha256'), rows)}"


def _results(run: Run, wire: WireFolder) -> str:
    if not run.evaluation:
        return f"## Results\n\nNot evaluated. `{run.command('eval')}` before the export fills this part.\n"
    lines = ["## Results\n"]
    if not _is_of(run, wire):
        lines.append(
            _paragraph(
                f"**Measured at step {run.evaluation['step']}, and this folder holds step {wire.step}.** "
                f"`{run.command('eval')}` measures that one; then export again."
            )
        )
    for verdict in tables.verdicts(run):
        head, *figures = verdict.text.split("; ")
        lines += [f"- {head}", *(f"  - {figure}" for figure in figures)]
    for reader, rows in run.evaluation["rows"].items():
        table = tables.control(rows, COLUMNS)
        head = ["95 % of F1" if cell == "95 %" else cell for cell in table.head]
        lines += [f"\nReader `{reader}`:\n", _table(head, table.rows)]
    meanings = (f"`{row}` {meaning}" for row, meaning in tables.meanings(run.evaluation["rows"]).items())
    exact = "" if _is_exact(run, wire) else f", with the run's fp32 values, not this folder's {wire.dtype}"
    measured = _plain(_name_of(run.evaluation["validation"]))
    lines.append(_paragraph(f"The reader sees, beside the question: {'; '.join(meanings)}."))
    sentences = [
        f"Measured at step {run.evaluation['step']} on {measured}{exact}.",
        tables.other_settings(run),
        "Times are of the machine that measured.",
    ]
    lines.append(_paragraph(" ".join(filter(None, sentences))))
    return "\n".join(lines)


def _is_of(run: Run, wire: WireFolder) -> bool:
    return run.evaluation.get("step") == wire.step


def _is_exact(run: Run, wire: WireFolder) -> bool:
    """Returns whether the folder holds the run's own values; int8 does those of a code that was computed alone."""
    return wire.dtype == "fp32" or (_is_cache(run) and wire.dtype == "int8" and not wire.step)


def _licences(run: Run, wire: WireFolder, licence: str) -> str:
    stated = f"`{licence}`" if licence else "not stated by its owner: `export --license ID` states it"
    arrays = "bases and tables of its readers" if _is_cache(run) else "the encoder's and the adapters' arrays"
    rows = [("this wire", arrays, stated)]
    for name, model in wire.models.items():
        inside = name == BODY and not run.cfg.encoder.rank
        what = label(name) + (", whose trained copy is part of the wire" if inside else "")
        rows.append((what, _place(model), _model_licence(model)))
    if joined := run.cfg.encoder.run:
        there = _joined(run)
        place = f"`{joined}`" if there else f"local folder `{Path(joined).name}`"
        rows.append(("the encoder's arrays, of another wire", place, _linked(None, licences.page(there), there)))
    for what, source in _named(run):
        rows.append((what, _plain(_name_of(source)), _data_licence(source)))
    method = ("computed and trained" if wire.step else "computed") if _is_cache(run) else "trained"
    text = _paragraph(
        f"The wire was {method} through its readers and on its data: what you may do with it depends on all of these."
    )
    return f"## Licences\n\n{text}\n{_table(('part', 'source', 'licence'), rows)}"


def _named(run: Run) -> list[tuple[str, str]]:
    data, uses = run.cfg.data, {}
    for use, key in (("training", data.train), ("validation", data.validation), ("passages", data.passages)):
        for name in filter(None, row_sources.split_sources(key)):
            uses.setdefault(name, []).append(use)
    return [(f"data of {' and '.join(roles)}", name) for name, roles in uses.items()]


def _name_of(source: str) -> str:
    return ", ".join(
        name if name.startswith(row_sources.HUB) or name in MADE else Path(name).name
        for name in row_sources.split_sources(source)
    )


def _hub_data(source: str) -> str:
    return row_sources.parse_hub(source, "")[0] if source.startswith(row_sources.HUB) else ""


def _data_licence(source: str) -> str:
    if source in MADE:
        return "made by the program, nobody's text"
    name = _hub_data(source)
    return _linked(licences.DATA[name].licence if name in licences.DATA else None, licences.page(name, data=True), name)


def _model_licence(model: Model) -> str:
    if model.source.startswith(SELFMADE):
        return "made by the program, nobody's weights"
    name = _repository(model)
    return _linked(licences.MODELS.get(name), licences.page(name), name)


def _linked(licence: str | None, page: str, name: str) -> str:
    """Returns a licence with the page that states it, or where to look for one that the program does not know."""
    if licence:
        return f"[{licence}]({page})"
    return f"not known to the program: see [{name}]({page})" if name else UNKNOWN


def _joined(run: Run) -> str:
    """Returns the hub's repository of the wire whose encoder this one took; empty for a path or an own encoder."""
    return wire_repository.parse(run.cfg.encoder.run)[0] if run.cfg.encoder.run else ""


def _repository(model: Model) -> str:
    return "" if model.local else licences.repository(model.source)


def _place(model: Model) -> str:
    return f"local folder `{Path(model.source).name}`" if model.local else f"`{model.source}`"


def _made(run: Run, wire: WireFolder) -> str:
    cfg = run.cfg
    versions = f"LatentWire JAX {wire.made_by}, seed {cfg.seed}"
    device, since = run.hardware.get("card") or run.hardware.get("kind"), run.hardware.get("since_step", 0)
    where = f", on {run.hardware.get('devices', 0)} x {device}" if device else ""
    if since:  # on which devices the steps before were taken is not known
        where = f", behind step {since:,}{where[1:]}" if since < wire.step else ""
    samples = wire.step * cfg.train.global_batch
    if _is_cache(run):
        trained = f" Then trained for {wire.step:,} steps, {samples:,} samples." if wire.step else ""
        texts = f"at most {cfg.encoder.texts} texts of the data above"
        text = f"Computed in closed form from {texts}, {versions}{where}.{trained}"
        text = _paragraph(f"{text} The whole configuration stands in config.json.")
        return f"## Start\n\n{text}\n````sh\n{run.training}\n````\n"
    text = _paragraph(
        f"Checkpoint {wire.step} of {cfg.train.steps} steps, {samples:,} samples ({cfg.train.global_batch} a step), "
        f"{versions}{where}. The whole configuration stands in config.json."
    )
    return f"## Training\n\n{text}\n````sh\n{run.training}\n````\n"


def _limits(run: Run, wire: WireFolder) -> str:
    encoder = run.cfg.encoder
    most = encoder.window * encoder.windows
    unit = "bytes" if encoder.kind == "bytes" else "tokens of its body"
    lines = [
        f"- A text may have {most:,} {unit}; it was trained on the data above, in their language and kind.",
        "- It serves these readers only, and messages of this encoder only: a message carries its fingerprint.",
        "- What a few latents cannot hold is lost, names and numbers first; a wrong answer gives no sign of it.",
        "- No word of the text arrives as it is written.",
    ]
    if _is_cache(run):
        lines = [
            "- A message is larger than its text: it saves the reading of a text that is asked often, not bytes.",
            "- A text may be half as long as a reader's positions, less its prompt: it is read twice.",
            "- It serves these readers only; who writes for a reader must have that reader.",
            "- Texts of another kind or language than the data above lose more.",
        ]
    if selfmade := [label(name) for name, model in wire.models.items() if model.source.startswith(SELFMADE)]:
        lines.append(
            f"- No hub has {' or '.join(selfmade)}: the command above makes them, with these hashes only where the "
            "arithmetic is that of the machine that trained."
        )
    if not _is_exact(run, wire):
        writer = "wire" if _is_cache(run) else "encoder"
        lines.append(
            f"- In {wire.dtype} this {writer} has a fingerprint of its own: it refuses messages of the run itself."
        )
    return "\n".join(["## Limits\n", *lines, ""])


def _files(wire: WireFolder, sizes: Mapping[str, int]) -> str:
    rows = [(f"`{name}`", f"{size / 1e6:,.2f}") for name, size in sizes.items()]
    text = _paragraph(
        f"`wire.safetensors`: {wire.tensors.bytes / 1e6:,.2f} MB, matrices in {wire.dtype}, small arrays in fp32, "
        "names = paths of the parameter tree. Nothing in this folder is a pickle, and nothing in it is run."
    )
    return f"## Files\n\n{text}\n{_table(('part', 'MB'), rows)}"


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False) + "\n"


def _plain(text: str) -> str:
    """Returns a text that Markdown shows as it is."""
    return re.sub(r"([\\`*_\[\]<>#])", r"\\\1", text)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
