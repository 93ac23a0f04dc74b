"""What a run reads beside data and models: its own folder, messages, configuration files and flags, checkpoints."""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import math
import re
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st

import run
from configs import base
from lw_jax.commands import parser
from lw_jax.core.config import flatten
from lw_jax.core.errors import UserError
from lw_jax.inference import message_io
from lw_jax.models import codec
from lw_jax.training import sinks
from lw_jax.training.checkpoint import Checkpointer
from tests import language_runs, runs
from tests.chaos import mutations
from tests.chaos.cases import Kind, Sample
from tests.chaos.mutations import Files


def door(argv: list[str]) -> str:
    """Runs the one command in this process; returns what it printed. Raises UserError where its code is 2."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run.main(argv)
    if code == 2:
        raise UserError(err.getvalue().strip())
    if code:
        raise RuntimeError(f"code {code}: {err.getvalue()[:200]}")
    return out.getvalue()


# --- the page of a run

_DEVICE = {"time": 1.0, "seconds": 30.0, "device": "gpu0", "samples": 3, "utilisation": 0.5, "peak_bytes": 3e9}
_DEVICE |= {"limit_bytes": 8e9, "memory_bytes": 2e9, "celsius": 50.0, "watts": 300.0}
_LINES = ("metrics.jsonl", "predictions.jsonl", "devices.jsonl")


def _write_wire(folder: Path) -> None:
    runs.write_run(folder)
    runs.write_lines(folder / "predictions.jsonl", runs.predictions(3))
    runs.write_lines(folder / "metrics.jsonl", runs.metrics(steps=6))
    runs.write_lines(folder / "devices.jsonl", [_DEVICE] * 2)
    (folder / "hardware.json").write_text(json.dumps({"device_kind": "cpu", "cores": 2}), "utf-8")


def _write_language(folder: Path) -> None:
    rows = [language_runs.row_of("measured", "strong", devices, 100.0 * devices) for devices in (1, 2)]
    rows += [language_runs.row_of("planned", "weak", devices, 500.0 * devices) for devices in (1, 8)]
    language_runs.write_run(folder, rows=rows, changes={"data.train": "docstrings", "data.validation": ""})
    runs.write_lines(folder / "devices.jsonl", [_DEVICE] * 2)


def _mutate_folder(sample: Sample) -> Any:
    makers: dict[str, list[Any]] = {}
    for name, data in sample.items():
        changed = mutations.changed_bytes(data)
        if name.endswith(".json"):
            makers[name] = [mutations.json_file(data)] * 4 + [changed]
        else:
            makers[name] = [mutations.json_lines(data)] * 4 + [changed] if name in _LINES else [changed]
    twice = {name: makers[name] for name in ("eval.json", "scaling.json", "config.json") if name in makers}
    return st.one_of(mutations.files(sample, makers), mutations.files(sample, twice))


def _judge_page(_: str, folder: Path) -> str:
    text = (folder / "report.html").read_text("utf-8")
    if "<script" in text:
        return "an element of the input in the page"
    return "" if "default-src 'none'" in text else "a page without its policy"


def _explicit_folder(sample: Sample) -> dict[str, Files]:
    """eval.json with each of its first two levels as each of some wrong types."""
    told, found = json.loads(sample["eval.json"]), {}
    wrong = (None, 5, "x", [], [1], {}, {"x": 1}, "@nan", "@digits", "@deep", "@surrogate", True)
    for key, value in told.items():
        for what in wrong:
            found[f"{key} {what!r}"] = {"eval.json": mutations.text_of(told | {key: what}).encode()}
            for inner in value if isinstance(value, dict) else ():
                changed = told | {key: value | {inner: what}}
                found[f"{key}.{inner} {what!r}"] = {"eval.json": mutations.text_of(changed).encode()}
    return found


# --- messages

MESSAGE, ENCODER = "notes.lwjx", "0123456789abcdef"
_SLOTS, _WIDTH = 7, 13
_FRAME = struct.Struct("<4sBBHH8sI")


def _write_message(folder: Path) -> None:
    values = np.random.default_rng(0).normal(size=(_SLOTS, _WIDTH)).astype(np.float32)
    values /= np.sqrt(np.mean(values**2, axis=1, keepdims=True))
    (folder / MESSAGE).write_bytes(codec.pack(values, bits=16, encoder=ENCODER))


def signed(message: bytes, **changes: Any) -> bytes:
    names = ("magic", "version", "bits", "slots", "width", "encoder")
    fields = dict(zip(names, _FRAME.unpack_from(message), strict=False)) | changes
    payload = fields.pop("payload", message[_FRAME.size :])
    head = list(fields.values())
    return _FRAME.pack(*head, zlib.crc32(_FRAME.pack(*head, 0) + payload)) + payload


@st.composite
def _changed_message(draw: Any, sample: bytes) -> bytes:
    what = draw(st.sampled_from(("bytes", "header", "payload", "payload", "sizes")))
    if what == "bytes":
        return draw(mutations.changed_bytes(sample, near=_FRAME.size))
    if what == "header":
        field = draw(st.sampled_from(("version", "bits", "slots", "width")))
        return signed(sample, **{field: draw(st.integers(0, 255))})
    if what == "payload":
        return signed(sample, payload=draw(mutations.changed_bytes(sample[_FRAME.size :])))
    bits, slots = draw(st.sampled_from(codec.BITS)), draw(st.sampled_from((1, 2, 7)))
    width = draw(st.sampled_from((0, 1, 3, 13, 4097, 65535)))
    size = -(-slots * width * bits // 8)
    byte = draw(st.sampled_from((b"\0", b"\xff", b"\x7c", b"\x5a")))
    return signed(sample, bits=bits, slots=slots, width=width, payload=byte * size)


def _read_message(folder: Path) -> Any:
    message = message_io.read_message(str(folder / MESSAGE))
    return message, codec.unpack(message, encoder=ENCODER)


def _judge_message(value: Any, _: Path) -> str:
    message, latents = value
    if not np.isfinite(latents).all():
        return "values that are NaN or infinite"
    rms = np.sqrt(np.mean(latents.astype(np.float64) ** 2, axis=1))
    if np.abs(rms - 1).max() > 2 * codec.RMS_TOLERANCE:
        return f"a slot of RMS {rms[np.argmax(np.abs(rms - 1))]:.4g}"
    frame = _FRAME.unpack_from(message)
    if zlib.crc32(message[: _FRAME.size - 4] + bytes(4) + message[_FRAME.size :]) != frame[6]:
        return "a message whose checksum does not fit"
    return ""


# --- the run of a service

SERVICE, _RECORD = "wandb.json", b'{"run":"0a1b2c3d","logged":{"train":120,"validation":100}}'


def _judge_record(value: Any, _: Path) -> str:
    if value is None:
        return ""
    steps = all(name in ("train", "validation") and 0 <= step < 2**31 for name, step in value.logged.items())
    return "" if steps and re.fullmatch(r"[\w-]+", value.run) else "a run or step that no start has written"


# --- configuration files and flags

FILE, FLAGS = "config.py", "flags.json"
_HEAD = "from configs import base\n\n\ndef get_config():\n    c = base.get_config({recipe!r})\n{body}    return c\n"
_READER = "    c.llms.llama = base.llm('readers/llama')\n    c.encoder.kind = 'bytes'\n"
_RECIPES = ("latentwire", "dpo", "ttt")
_VALUES = ["None", "True", "-1", "0.5", "1e300", "float('nan')", "-float('inf')", "10**30", "10**5000", "1j"]
_VALUES += ["'x'", "''", "'@\\ud800'", "[]", "(1, 'x')", "{}", "{'x': 1}", "object()", "b'x'", "'a' * 10**6"]
_WORDS = ["", "nan", "-inf", "1e999", "-1", "1" * 5000, "10" + "0" * 29, "x", "(1,", "[]", "None", "1.5", "1,2"]
_WORDS += ["__import__('os')", "\ud800", "a\nb", "{}", "'", "(" * 200, "0x10", "1_000", "٣"]
_BODIES = {
    "value for a section": "    c.seed = c.train\n",
    "template nested": "    c.prompt.user = '{context:{question}} {question}'\n",
}
_SOURCES = {
    "empty": "",
    "null bytes": "x = '\0'\n",
    "deep": "x = " + "(" * 5000 + ")" * 5000 + "\n",
    "surrogate escape": "x = '\\ud800'\nraise ValueError(x)\n",
}
_OWN_FLAGS = {
    "generate": ["--workdir", "w", "--prompt", "x", ("--tokens", "--temperature", "--prompt")],
    "slurm": ["--config", FILE, ("--hours",)],
    "bench": ["--config", FILE, ("--repeats", "--parts", "--target")],
    "answer": ["--workdir", "w", "--context", "x", "--question", "y", ("--bits", "--slots", "--width", "--question")],
}


def _file(body: str, recipe: str = "latentwire") -> bytes:
    reader = "" if recipe == "ttt" else _READER
    return _HEAD.format(recipe=recipe, body=reader + body).encode("utf-8", "surrogatepass")


def _flags(*words: str) -> bytes:
    return json.dumps(["show", "--json", "--config", FILE, *words]).encode()


def _write_config(folder: Path) -> None:
    (folder / FILE).write_bytes(_file(""))
    (folder / FLAGS).write_bytes(_flags())


@functools.cache
def _keys(recipe: str) -> list[str]:
    values = base.get_config(recipe)
    if recipe != "ttt":
        values.llms.llama = base.llm("readers/llama")
    return list(flatten(values))


@st.composite
def _changed_config(draw: Any) -> Files:
    recipe = draw(st.sampled_from(_RECIPES))
    key, what = draw(st.sampled_from(_keys(recipe))), draw(st.sampled_from(("file", "file", "flag", "flag", "own")))
    if what == "file":
        section, _, leaf = key.rpartition(".")
        holder = f"c.{section}" if section else "c"
        value, forced = draw(st.sampled_from(_VALUES)), draw(st.booleans())
        line = f"    {holder}[{leaf!r}] = {value}\n"
        if forced:  # past ml_collections' own check of types
            line = f"    {holder}.unlock()\n    with {holder}.ignore_type():\n    {line}"
        return {FILE: _file(line, recipe)}
    if what == "flag":
        word = f"--config.{key}={draw(st.sampled_from(_WORDS))}"
        return {FILE: _file("", recipe), FLAGS: _flags(word).replace(b"\\\\ud800", b"\\ud800")}
    verb = draw(st.sampled_from(sorted(_OWN_FLAGS)))
    *words, own = _OWN_FLAGS[verb]
    argv = [verb, *words, f"{draw(st.sampled_from(own))}={draw(st.sampled_from(_WORDS))}"]
    return {FLAGS: json.dumps(argv).encode()}


def _explicit_configs(_: Sample) -> dict[str, Files]:
    found: dict[str, Files] = {f"body {name}": {FILE: _file(body)} for name, body in _BODIES.items()}
    found |= {f"file {name}": {FILE: text.encode("utf-8", "surrogatepass")} for name, text in _SOURCES.items()}
    found["file not UTF-8"] = {FILE: b"x = '\xff'\n"}
    return found


def _read_config(folder: Path) -> Any:
    words = [str(folder / FILE) if word == FILE else word for word in json.loads((folder / FLAGS).read_text("utf-8"))]
    if words[0] == "show":
        return json.loads(door(words))
    return parser.parse(words)


def _judge_config(value: Any, _: Path) -> str:
    if isinstance(value, argparse.Namespace):
        return _judge_numbers(vars(value))
    flat = {path: found["value"] for path, found in value["config"].items()}
    flat = {path: tuple(found) if isinstance(found, list) else found for path, found in flat.items()}
    kinds = flatten(base.get_config(str(flat["recipe"])))
    for path, kind in kinds.items():
        if path in flat and type(flat[path]) is not type(kind) and not isinstance(kind, dict):
            return f"{path} = {flat[path]!r:.40}, a {type(flat[path]).__name__} for a {type(kind).__name__}"
    if "!" in str(flat.get("prompt.user", "")) or ":" in str(flat.get("prompt.user", "")).partition("{context")[2][:3]:
        return f"prompt.user = {flat['prompt.user']!r:.60}"
    return _judge_numbers(flat)


def _judge_numbers(flat: Mapping[str, Any]) -> str:
    for path, found in flat.items():
        for one in found if isinstance(found, tuple | list) else (found,):
            if isinstance(one, float) and not math.isfinite(one):
                return f"{path} = {one}"
            if isinstance(one, int) and abs(one) > (2**63 if path == "seed" else 2**40):
                return f"{path} = {one:.3e}" if abs(one) < 10**300 else f"{path}: {one.bit_length()} bits"
            if isinstance(one, str) and any(0xD800 <= ord(letter) < 0xE000 for letter in one):
                return f"{path} holds half a surrogate pair"
    return ""


# --- checkpoints

IDENTITY = {"config": "a1", "frozen/llama": "b2"}
STEPS = (2, 3)


def _state(step: int) -> dict[str, Any]:
    values = np.random.default_rng(step).normal(size=(16, 3)).astype(np.float32)
    return {"trainable": {"encoder": values, "gain": values[0]}, "opt_state": [values * 2, np.int32(step)]}


def _write_checkpoints(folder: Path) -> None:
    with Checkpointer(folder / "checkpoints", keep=3, identity=IDENTITY) as checkpointer:
        for step in STEPS:
            checkpointer.save(step, jax.device_put(_state(step)), data={"next_index": 10 * step}, wait=True)


def _mutate_checkpoints(sample: Sample) -> Any:
    makers: dict[str, list[Any]] = {}
    for name, data in sample.items():
        changed = mutations.changed_bytes(data)
        makers[name] = [mutations.json_file(data)] * 2 + [changed] if name.endswith("record.json") else [changed]
        makers[name].append(st.sampled_from((b"", b"x", b"{}")))
    records = {name: makers[name] for name in makers if name.endswith("record.json")}
    newest = {name: makers[name] for name in makers if name.startswith(f"checkpoints/{STEPS[-1]}/")}
    return st.one_of(mutations.files(sample, makers), mutations.files(sample, newest), mutations.files(sample, records))


def _explicit_checkpoints(sample: Sample) -> dict[str, Files]:
    newest = f"checkpoints/{STEPS[-1]}/"
    inside = [name for name in sample if name.startswith(newest)]
    found: dict[str, Files] = {f"missing {name}": {name: None} for name in inside}
    found |= {f"empty {name}": {name: b""} for name in inside}
    found |= {f"cut {name}": {name: sample[name][: len(sample[name]) // 2]} for name in inside}
    found["empty folder"] = dict.fromkeys(inside) | {f"{newest}.keep": b""}
    found["all gone"] = dict.fromkeys(sample)
    found["foreign files"] = {"checkpoints/notes.txt": b"x", f"{newest}foreign": b"x", "checkpoints/9/foreign": b"x"}
    found["step of digits"] = {f"checkpoints/{'9' * 30}/record.json": sample[f"{newest}record.json"]}
    found["step of other digits"] = {"checkpoints/\u0663/record.json": sample[f"{newest}record.json"]}
    found["superscript"] = {"checkpoints/\u00b2/record.json": sample[f"{newest}record.json"]}
    record = json.loads(sample[f"{newest}record.json"])["record"]
    for name, change in {
        "files a number": {"files": 5},
        "files of numbers": {"files": {"_METADATA": 5}},
        "file outside": {"files": {"../../x": [1, "y"]}},
        "no leaves": {"leaves": None},
        "step text": {"step": "x"},
        "metrics null": {"metrics": None},
        "score text": {"metrics": {"nll": "x"}},
        "identity text": {"identity": "x"},
        "identity null": {"identity": None},
        "another version": {"version": 2},
    }.items():
        changed = record | change
        digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()
        found[f"signed: {name}"] = {f"{newest}record.json": json.dumps({"sha256": digest, "record": changed}).encode()}
    return found


def _restore(folder: Path) -> Any:
    with Checkpointer(folder / "checkpoints", keep=3, identity=IDENTITY) as checkpointer:
        return checkpointer.restore(jax.device_put(_state(STEPS[-1])))


def _judge_restored(restored: Any, _: Path) -> str:
    if restored is None:
        return ""  # nothing there
    want = _state(restored.step)
    equal = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), restored.state, want)
    return "" if all(jax.tree.leaves(equal)) else f"step {restored.step} with other values"


_REPORT = Kind(
    name="report",
    write=_write_wire,
    mutate=_mutate_folder,
    load=lambda folder: door(["report", "--workdir", str(folder)]),
    judge=_judge_page,
    explicit=_explicit_folder,
)
KINDS = [
    _REPORT,
    dataclasses.replace(_REPORT, name="report-language", write=_write_language, explicit=lambda sample: {}),
    Kind(
        name="message",
        write=_write_message,
        mutate=lambda sample: mutations.files(sample, {MESSAGE: [_changed_message(sample[MESSAGE])]}),
        load=_read_message,
        judge=_judge_message,
    ),
    Kind(
        name="configuration",
        write=_write_config,
        mutate=lambda sample: _changed_config(),
        load=_read_config,
        judge=_judge_config,
        explicit=_explicit_configs,
    ),
    Kind(
        name="service",
        write=lambda folder: (folder / SERVICE).write_bytes(_RECORD),
        mutate=lambda sample: mutations.files(
            sample, {SERVICE: [mutations.json_file(sample[SERVICE]), mutations.changed_bytes(sample[SERVICE])]}
        ),
        load=lambda folder: sinks.read_record(folder / SERVICE),
        judge=_judge_record,
    ),
    Kind(
        name="checkpoint",
        write=_write_checkpoints,
        mutate=_mutate_checkpoints,
        load=_restore,
        judge=_judge_restored,
        explicit=_explicit_checkpoints,
    ),
]
