"""Model card of an exported wire: README.md in the hub's form, from the run's folder. Needs no JAX."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from lw_jax.core.eval_rows import MESSAGES
from lw_jax.report import tables
from lw_jax.report.records import Run
from lw_jax.training.wire_folder import Wire, flag, label

LIBRARY = "latentwire-jax"
COLUMNS = (
    "row",
    "reader positions",
    "first answer token, ms",
    "EM, %",
    "F1, %",
    "95 %",
    "NLL, nats a token",
    "examples",
)
MADE = ("cards", "pairs")  # data that the program makes
# Data sets of the hub whose licence their authors state.
LICENCES = {"rajpurkar/squad": "CC BY-SA 4.0", "rajpurkar/squad_v2": "CC BY-SA 4.0"}


def render(run: Run, wire: Wire, sizes: Mapping[str, int]) -> str:
    """Returns the card of a wire that was exported from a run; `sizes`: bytes of its parts."""
    parts = [
        _what(run),
        _use(wire),
        _models(wire),
        _results(run, wire),
        _data(run),
        _made(run, wire),
        _limits(run, wire),
    ]
    parts.append(_files(wire, sizes))
    return "\n".join([_front(run, wire), f"# {run.workdir.resolve().name}\n", *parts])


def _front(run: Run, wire: Wire) -> str:
    """Returns the YAML that the hub reads; a licence is the owner's to add."""
    from huggingface_hub import EvalResult, ModelCardData

    bases = dict.fromkeys(model.source for model in wire.models.values() if _on_hub(model.source, model.local))
    scores = []
    for reader, rows in run.evaluation.get("rows", {}).items():
        sent = next((row for row in MESSAGES if row in rows), "")
        if sent and rows[sent]["f1"] is not None:
            dataset = run.cfg.data.validation
            scores.append(
                EvalResult(
                    task_type="question-answering",
                    dataset_type=dataset.removeprefix("hub:") if dataset.startswith("hub:") else "other",
                    dataset_name=_name_of(dataset),
                    metric_type="f1",
                    metric_name=f"F1 of reader {reader}, {rows[sent].get('positions') or 0:,.1f} positions",
                    metric_value=round(rows[sent]["f1"], 4),
                )
            )
    found = ModelCardData(
        library_name=LIBRARY,
        pipeline_tag="question-answering",
        tags=["latentwire", "context-compression", "soft-prompts", "jax"],
        base_model=list(bases) or None,
        datasets=sorted({name.removeprefix("hub:").split(":")[0] for name in _named(run) if name.startswith("hub:")})
        or None,
        model_name=run.workdir.resolve().name if scores else None,
        eval_results=scores or None,
    )
    return f"---\n{found.to_yaml()}\n---\n"


def _what(run: Run) -> str:
    encoder, literals = run.cfg.encoder, run.cfg.message.literals
    size = f"{encoder.slots} latents of {encoder.width} values"
    if encoder.ratio:
        size = f"a latent of {encoder.width} values for every {encoder.ratio} tokens, {encoder.slots} at most"
    words = f", and carries {literals} of the text's own words beside them" if literals else ""
    prefix = "keys and values of every layer" if run.cfg.adapter.kind == "kv" else "soft input embeddings"
    readers = ", ".join(f"`{name}`" for name in run.cfg.llms)
    return _paragraph(
        f"A wire of LatentWire JAX: an encoder writes a text once as {size}{words}. An adapter for each frozen reader "
        f"({readers}) turns them into {prefix}. The reader sees "
        "the message and the question, never the text. This folder holds the encoder's and the adapters' trained "
        "arrays; the readers are fetched from where they are."
    )


def _use(wire: Wire) -> str:
    local = [name for name, model in wire.models.items() if model.local]
    moved = "".join(f" {flag(name)}FOLDER" for name in local)
    lines = [
        "## Use\n",
        "```sh",
        f'python run.py answer --workdir THIS_FOLDER --context notes.txt --question "Who wrote it?"{moved}',
        f"python run.py eval --workdir THIS_FOLDER --out results{moved}",
        "```\n",
        "```python",
        "import lw_jax",
        "",
        f'wire = lw_jax.load_wire("THIS_FOLDER"{_python_sources(local)})',
        "```\n",
    ]
    if local:
        names = " and ".join(label(name) for name in local)
        lines.append(_paragraph(f"Local folders when the wire was exported, to be named where you have them: {names}."))
    return "\n".join(lines)


def _python_sources(local: Sequence[str]) -> str:
    pairs = ", ".join(f'"{name.replace("/", ".")}.source": "FOLDER"' for name in local)
    return f", config={{{pairs}}}" if pairs else ""


def _models(wire: Wire) -> str:
    rows = []
    for name, model in wire.models.items():
        place = f"local folder `{Path(model.source).name}`" if model.local else f"`{model.source}`"
        rows += [(label(name), place, f"`{file}`", f"`{sha256}`") for file, sha256 in model.sha256.items()]
    text = _paragraph(
        "The wire belongs to these models. Others are refused by their hashes. Their licences are their authors'."
    )
    return f"## Models\n\n{text}\n{_table(('model', 'source', 'weight file', 'sha256'), rows)}"


def _results(run: Run, wire: Wire) -> str:
    if not run.evaluation:
        return f"## Results\n\nNot evaluated. `{run.command('eval')}` before the export fills this part.\n"
    found = ["## Results\n"]
    found += [f"- {one.text}" for one in tables.verdicts(run)]
    for reader, rows in run.evaluation["rows"].items():
        table = tables.control(rows)
        first = [table.head.index(name) for name in COLUMNS if name in table.head]
        kept = [[row[at] for at in _with_interval(table.head, first)] for row in table.rows]
        found += [f"\nReader `{reader}`:\n", _table([table.head[at] for at in _with_interval(table.head, first)], kept)]
    meanings = (f"`{row}` {meaning}" for row, meaning in tables.meanings(run.evaluation["rows"]).items())
    exact = "" if wire.dtype == "fp32" else f", with the run's fp32 values, not this folder's {wire.dtype}"
    found.append(_paragraph(f"The reader sees, beside the question: {'; '.join(meanings)}."))
    found.append(
        _paragraph(f"Measured at step {run.evaluation['step']} on {_name_of(run.cfg.data.validation)}{exact}.")
    )
    return "\n".join(found)


def _with_interval(head: Sequence[str], first: Sequence[int]) -> list[int]:
    """Returns the columns, the interval that is kept being that of F1."""
    interval = head.index("95 %")
    return sorted({at for at in first if at != interval} | {list(head).index("F1, %") + 1})


def _data(run: Run) -> str:
    rows = [(name, _licence(name)) for name in _named(run)]
    return f"## Data\n\n{_table(('data', 'licence'), [(_name_of(name), licence) for name, licence in rows])}"


def _named(run: Run) -> list[str]:
    data = run.cfg.data
    return list(
        dict.fromkeys(name for key in (data.train, data.validation, data.passages) for name in key.split(",") if name)
    )


def _name_of(source: str) -> str:
    """Returns data by name: no path of the machine that trained."""
    return ", ".join(one if one.startswith("hub:") or one in MADE else Path(one).name for one in source.split(","))


def _licence(name: str) -> str:
    if name in MADE:
        return "made by the program, nobody's text"
    if name.startswith("hub:"):
        repository = name.removeprefix("hub:").split(":")[0]
        page = f"https://huggingface.co/datasets/{repository}"
        return f"{LICENCES[repository]} ({page})" if repository in LICENCES else f"see {page}"
    return "not known to the program: state it here before you publish"


def _made(run: Run, wire: Wire) -> str:
    cfg = run.cfg
    versions = f"LatentWire JAX {wire.made_by}, seed {cfg.seed}"
    samples = wire.step * cfg.train.global_batch
    text = _paragraph(
        f"Checkpoint {wire.step} of {cfg.train.steps} steps, {samples:,} samples ({cfg.train.global_batch} a step), "
        f"{versions}. The whole configuration stands in config.json."
    )
    return f"## Training\n\n{text}\n````sh\n{run.training}\n````\n"


def _limits(run: Run, wire: Wire) -> str:
    encoder = run.cfg.encoder
    most = encoder.window * encoder.windows
    unit = "bytes" if encoder.kind == "bytes" else "tokens of its body"
    lines = [
        f"- A text may have {most:,} {unit}; it was trained on the data above, in their language and kind.",
        "- It serves these readers only, and messages of this encoder only: a message carries its fingerprint.",
        "- What a few latents cannot hold is lost, names and numbers first; a wrong answer gives no sign of it.",
    ]
    if not run.cfg.message.literals:
        lines.append("- Messages carry no literals: no word of the text arrives as it is written.")
    if wire.dtype != "fp32":
        lines.append(
            f"- In {wire.dtype} this encoder has a fingerprint of its own: it refuses messages of the run itself."
        )
    return "\n".join(["## Limits\n", *lines, ""])


def _files(wire: Wire, sizes: Mapping[str, int]) -> str:
    rows = [(f"`{name}`", f"{size / 1e6:,.2f}") for name, size in sizes.items()]
    text = _paragraph(
        f"`wire.safetensors`: {wire.tensors.bytes / 1e6:,.2f} MB, matrices in {wire.dtype}, small arrays in fp32, "
        "names = paths of the parameter tree. Nothing in this folder is a pickle, and nothing in it is run."
    )
    return f"## Files\n\n{text}\n{_table(('part', 'MB'), rows)}"


def _on_hub(source: str, local: bool) -> bool:
    return not local and ":" not in source and source.count("/") == 1


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
