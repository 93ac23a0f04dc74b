"""Exported wires: config.json, and arrays whose hash it states."""

import hashlib
import json
import math
import shutil
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from hypothesis import strategies as st

from lw_jax.core import config
from lw_jax.core.tree import flatten_paths
from lw_jax.training import run_folder, wire_folder, wire_tensors
from lw_jax.training.wire_folder import CONFIG, TENSORS
from tests import runs
from tests.chaos import mutations
from tests.chaos.cases import Kind, Sample
from tests.chaos.mutations import Files

SHAPES = {
    "adapters": {"llama": {"gain": jax.ShapeDtypeStruct((), jnp.float32)}},
    "encoder": {"head": jax.ShapeDtypeStruct((64, 65), jnp.float32)},  # large enough to have codes
}


def _part(file: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack_from("<Q", file)
    return json.loads(file[8 : 8 + length]), file[8 + length :]


def _join(header: bytes, data: bytes, *, extra: int = 0) -> bytes:
    """Returns a safetensors file; `extra` is added to the length that it says its header has."""
    return struct.pack("<Q", len(header) + extra) + header + data


@st.composite
def _changed_safetensors(draw: Any, sample: bytes) -> bytes:
    """Draws a file with a changed header, a wrong length of it, or other data."""
    header, data = _part(sample)
    what = draw(st.sampled_from(("header", "header", "offsets", "length", "data")))
    if what == "header":
        return _join(draw(mutations.json_text(header)).encode("utf-8", "surrogatepass"), data)
    if what == "offsets":
        name = draw(st.sampled_from(sorted(header.keys() - {"__metadata__"})))
        shift = draw(st.sampled_from((-64, -4, -1, 1, 4, 64)))
        begin, end = header[name]["data_offsets"]
        header[name]["data_offsets"] = draw(st.sampled_from(([begin + shift, end + shift], [begin, end + shift])))
        return _join(json.dumps(header).encode(), data)
    if what == "length":
        return _join(json.dumps(header).encode(), data, extra=draw(st.sampled_from((-8, -1, 1, 7, 2**20, 2**62))))
    changed = bytearray(data)
    place = 4 * draw(st.integers(0, len(data) // 4 - 1))
    changed[place : place + 4] = struct.pack("<f", draw(st.sampled_from((math.nan, math.inf, -math.inf, 1e38))))
    return _join(json.dumps(header).encode(), bytes(changed) + b"\0" * draw(st.sampled_from((0, 0, 0, 1, 8))))


def _write(folder: Path) -> None:
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: np.asarray(draw.normal(size=leaf.shape), np.float32), SHAPES)
    cfg = run_folder.read_config(runs.write_run(folder / "run"))
    shutil.rmtree(folder / "run")
    model = wire_folder.Model("folder/llama", True, "0" * 32, {"model.safetensors": "0" * 64}, "0" * 32)
    wire = wire_folder.WireFolder(
        format=wire_folder.FORMAT,
        version=wire_folder.VERSION,
        made_by="test",
        step=3,
        dtype="int8",
        tensors=wire_tensors.write(folder / TENSORS, params, "int8"),
        models={"llms/llama": model, "llms/qwen": model, "encoder": model},
        configuration=config.to_dict(cfg),
    )
    (folder / CONFIG).write_text(json.dumps(msgspec.to_builtins(wire)), "utf-8")


def _sign(sample: Sample, tensors: bytes) -> Files:
    """Returns changed arrays with a config.json that states their hash: someone may mean them."""
    told = json.loads(sample[CONFIG])
    told["tensors"] = {"bytes": len(tensors), "sha256": hashlib.sha256(tensors).hexdigest()}
    return {TENSORS: tensors, CONFIG: json.dumps(told).encode()}


def _load(folder: Path) -> Any:
    cfg = wire_folder.read_config(folder)
    return cfg, wire_folder.read(folder), wire_tensors.read(folder, SHAPES)


def _judge(value: Any, folder: Path) -> str:
    cfg, wire, params = value
    found, wanted = flatten_paths(params), flatten_paths(SHAPES)
    finite = all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in found.values())
    if not finite or any(found[name].shape != leaf.shape for name, leaf in wanted.items()):
        return "arrays of another shape, NaN or infinite"
    if hashlib.sha256((folder / TENSORS).read_bytes()).hexdigest() != wire.tensors.sha256:
        return "arrays that are not those of config.json"
    return "" if cfg.recipe == "latentwire" and wire.version == 1 else f"{wire.version} {cfg.recipe}"


def _mutate(sample: Sample) -> Any:
    signed = _changed_safetensors(sample[TENSORS]).map(lambda data: _sign(sample, data))
    makers = {
        CONFIG: [mutations.json_file(sample[CONFIG])] * 4 + [mutations.changed_bytes(sample[CONFIG])],
        TENSORS: [mutations.changed_bytes(sample[TENSORS], near=300)],
    }
    return mutations.files(sample, makers) | signed


KINDS = [Kind(name="wire", write=_write, mutate=_mutate, load=_load, judge=_judge)]
