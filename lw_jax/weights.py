"""Frozen weights: from safetensors or GGUF, tensor by tensor, into the decoder's tree and its shards, and back.

Bytes are read with plain file reads, not memory maps, so that the host holds the final arrays and about one tensor.
Nothing is ever unpickled.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from huggingface_hub.errors import StrictDataclassError
from safetensors.numpy import save_file
from transformers import AutoConfig, PreTrainedTokenizerBase

from lw_jax.core.errors import UserError
from lw_jax.core.types import Tree
from lw_jax.data.gguf_header import read_header
from lw_jax.models import bert, bert_family, families, quant, ttt, ttt_family
from lw_jax.models.bert import BertConfig
from lw_jax.models.decoder import DecoderConfig, abstract
from lw_jax.models.ttt import TTTConfig

_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_NUMBERS = _FLOATS | {"I32": np.int32}  # read as they are; AWQ's words of eight nibbles
# of the safetensors format; those that are no float are named so that a header with them can be checked and refused
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_WIDTHS |= {"U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1}
_INTEGERS = {"I8", "I16", "I32", "I64"}  # GGUF types that hold no weights
_CHUNK_BYTES = 8 << 20  # read and converted at once
_SAMPLE_BYTES = 4096
_HEADER_LIMIT = 100 << 20  # the safetensors library's own
_STRANGE = "belongs to no known part of the model; it is of another kind than it says"

Place = tuple[tuple[str, ...], int | None]  # path in the parameter tree, layer of a stacked leaf
Config = TypeVar("Config", DecoderConfig, BertConfig, TTTConfig)


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where one tensor's bytes lie; `shape` is [out, in] for a matrix."""

    file: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def label(self) -> str:
        """Names the tensor in messages."""
        return f"{self.file}: tensor {self.name}"


class AWQ(NamedTuple):
    """The three tensors of one AWQ matrix, stored [in, out]."""

    codes: Stored
    zeros: Stored
    scales: Stored


def describe(location: Path) -> DecoderConfig:
    """Returns the configuration of a model folder or .gguf file; reads no weight.

    Raises:
        UserError: see `families.decoder_config`.
    """
    if location.is_dir():
        return describe_config(location / "config.json")
    _require_gguf(location)
    catalogue, metadata = _catalogue(location), read_header(location).metadata
    factors = catalogue.get("rope_freqs.weight")
    fields = families.gguf_fields(
        metadata,
        {name: stored.shape for name, stored in catalogue.items()},
        rope_factors=None if factors is None else _read(factors, np.float32),
        where=str(location),
    )
    return families.decoder_config(fields, raw_keys=set(fields), where=str(location))


def describe_config(file: Path) -> DecoderConfig:
    """Returns the configuration that a config.json tells; see `describe`."""
    fields, raw_keys = _read_config(file)
    return families.decoder_config(fields, raw_keys=raw_keys, where=str(file))


def model_type(location: Path) -> str:
    """Returns the family of a model folder or .gguf file, one of `families.FAMILIES`, once `describe` has read it."""
    if location.is_dir():
        return _read_config(location / "config.json")[0]["model_type"]
    return read_header(location).metadata["general.architecture"]


def describe_bert(location: Path) -> BertConfig:
    """Returns the configuration of a BERT-class encoder's folder; reads no weight.

    Raises:
        UserError: see `bert_family.bert_config`.
    """
    if not location.is_dir():
        raise UserError(f"{location}: a BERT-class body is a folder with config.json and *.safetensors; name one")
    file = location / "config.json"
    fields, raw_keys = _read_config(file)
    return bert_family.bert_config(fields, raw_keys=raw_keys, where=str(file))


def is_ttt(location: Path) -> bool:
    """Says whether a folder's config.json names a Test-Time-Training model."""
    file = location / "config.json"
    return file.is_file() and _read_json(file).get("model_type") == ttt_family.MODEL_TYPE


def describe_ttt(location: Path) -> TTTConfig:
    """Returns the configuration of a TTT model's folder; reads no weight.

    Raises:
        UserError: see `ttt_family.ttt_config`.
    """
    file = location / "config.json"
    if not file.is_file():
        raise UserError(f"{location}: no config.json; name a TTT model's folder, with config.json and *.safetensors")
    return ttt_family.ttt_config(_read_json(file), where=str(file))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: no JSON can be read in it ({error}); fetch it again") from error
    if not isinstance(found, dict):
        raise UserError(f"{file}: named fields are needed, it holds {found!r:.40}; fetch it again")
    return found


def _read_config(file: Path) -> tuple[dict[str, Any], set[str]]:
    """Returns a config.json as transformers understands it, and the keys that it states itself."""
    folder = file.parent
    if not file.is_file():
        raise UserError(f"{folder}: no config.json; name a model folder, or the .gguf file itself")
    try:
        # transformers brings the old and the new spelling of the rotary fields into one form
        fields = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False).to_dict()
        raw = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, StrictDataclassError) as error:
        raise UserError(f"{file}: transformers cannot read it ({' '.join(str(error).split())})") from error
    return fields, set(raw)


def load(
    location: Path,
    *,
    dtype: jax.typing.DTypeLike,
    shardings: Tree | None = None,
    layers: int = 0,
    packed: str = "",
) -> Tree:
    """Loads a frozen reader as the tree of `docs/architecture.md`.

    Args:
        location: a folder with config.json and *.safetensors, or a .gguf file.
        dtype: of all weights that are not packed; the cast is per tensor on the host.
        shardings: the same tree of shardings; None: the default device.
        layers: keeps the first so many (0: all).
        packed: one of `quant.PACKED` keeps the layers' matrices so, packed one by one while they stream; another word
            leaves them as they are.

    Raises:
        UserError: a tensor unknown, missing, stored twice, of another shape or not of a float type, or a file cut off;
            an AWQ folder that is not asked for as "awq", or another one that is.
    """
    cfg = describe(location)
    shapes = quant.abstract(abstract(_keep(location, cfg, layers), np.dtype(dtype)), packed)
    sources = _sources(location, cfg, awq=packed == "awq")
    return _fill(
        shapes, sources, shardings=shardings, row_order=functools.partial(_row_order, location, cfg), packed=packed
    )


def load_bert(location: Path, *, dtype: jax.typing.DTypeLike, shardings: Tree | None = None, layers: int = 0) -> Tree:
    """Loads a BERT-class body as the tree of `bert.abstract`; arguments and refusals as in `load`."""
    cfg = describe_bert(location)
    catalogue: dict[str, Stored] = {}
    for stored in _catalogue(location).values():
        name = bert_family.present_name(stored.name)
        if name in catalogue:
            raise UserError(f"{stored.label} is the same as {catalogue[name].name}; keep one of the two")
        if name is not None:
            catalogue[name] = stored
    slots = bert_family.tensor_map(cfg)
    for name in sorted(catalogue.keys() - slots.keys()):
        raise UserError(f"{catalogue[name].label} {_STRANGE}")
    shapes = bert.abstract(_keep(location, cfg, layers), np.dtype(dtype))
    return _fill(shapes, _match(location, catalogue, slots), shardings=shardings, row_order=lambda path: None)


def load_ttt(location: Path, *, dtype: jax.typing.DTypeLike = jnp.float32, shardings: Tree | None = None) -> Tree:
    """Loads a TTT model of the authors' layout as the tree of `ttt.abstract`; arguments and refusals as in `load`."""
    cfg = describe_ttt(location)
    slots, catalogue = ttt_family.tensor_map(cfg), _catalogue(location)
    for name in sorted(catalogue.keys() - slots.keys()):
        _refuse_unknown(catalogue[name], catalogue, cfg)
    shapes = ttt.abstract(cfg, np.dtype(dtype))
    return _fill(shapes, _match(location, catalogue, slots), shardings=shardings, row_order=lambda path: None)


def _keep(location: Path, cfg: Config, layers: int) -> Config:
    """Returns the configuration with the first so many layers (0: all)."""
    if not 0 <= layers <= cfg.layers:
        raise UserError(f"{location}: layers={layers}, the model has {cfg.layers}; take 0 (all) to {cfg.layers}")
    return dataclasses.replace(cfg, layers=layers or cfg.layers)


def _fill(
    shapes: Tree,
    sources: Mapping[Place, "Stored | AWQ"],
    *,
    shardings: Tree | None,
    row_order: Callable[[tuple[str, ...]], np.ndarray | None],
    packed: str = "",
) -> Tree:
    """Reads every leaf of a tree of shapes, tensor by tensor, into its shards; a packed matrix counts as one leaf."""
    tree: dict[str, Any] = {}
    for key, leaf in jax.tree_util.tree_leaves_with_path(shapes, is_leaf=_is_packed):
        path = tuple(str(part.key) for part in key)
        sharding = functools.reduce(lambda node, name: node[name], path, shardings) if shardings is not None else None
        order, stacked = row_order(path), path[0] == "layers"
        one = _one(leaf, stacked)
        tensors = [
            functools.partial(_read_leaf, sources[path, layer], one, order, packed)
            for layer in (range(jax.tree.leaves(leaf)[0].shape[0]) if stacked else [None])
        ]
        parent = functools.reduce(lambda node, name: node.setdefault(name, {}), path[:-1], tree)
        parent[path[-1]] = _stack(tensors, leaf, sharding) if stacked else _put(tensors[0](), sharding)
    return tree


def _is_packed(node: Any) -> bool:
    return isinstance(node, dict) and "codes" in node


def _one(leaf: Tree, stacked: bool) -> Tree:
    """Returns the shapes of one layer's part of a leaf."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), leaf) if stacked else leaf


def _stack(tensors: list[Callable[[], Tree]], leaf: Tree, sharding: Tree | None) -> Tree:
    """Fills a stacked leaf layer by layer, in place."""
    part = jax.tree.map(_of_a_layer, sharding)
    zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), leaf)
    stack = jax.jit(zeros, out_shardings=sharding)()
    write = jax.jit(
        lambda stack, layer, i: jax.tree.map(
            lambda whole, one: jax.lax.dynamic_update_index_in_dim(whole, one, i, 0), stack, layer
        ),
        donate_argnums=0,
        out_shardings=sharding,
    )
    for i, read in enumerate(tensors):
        # waits, or the queue would hold many layers on the host
        stack = jax.block_until_ready(write(stack, _put(read(), part), np.int32(i)))
    return stack


def _of_a_layer(sharding: Any) -> Any:
    if isinstance(sharding, jax.NamedSharding):
        return sharding.update(spec=jax.P(*sharding.spec[1:]))
    return sharding


def _put(value: Tree, sharding: Tree | None) -> Tree:
    if sharding is None:
        return jax.device_put(value)
    return jax.tree.map(
        lambda x, at: jax.make_array_from_callback(x.shape, at, lambda index: x[index]), value, sharding
    )


def _read_leaf(stored: "Stored | AWQ", shapes: Tree, order: np.ndarray | None, packed: str) -> Tree:
    """Reads one tensor in the form that `shapes` describes."""
    if isinstance(stored, AWQ):
        return _read_awq(stored, shapes)
    if not _is_packed(shapes):
        return _read(stored, shapes.dtype, order).reshape(shapes.shape)
    *out, _ = shapes["codes"].shape
    matrix = _read(stored, np.float32, order).reshape(*out, stored.shape[1])
    return jax.device_get(quant.pack(matrix, packed))


def _read_awq(stored: "AWQ", shapes: Tree) -> dict[str, np.ndarray]:
    """Reads an AWQ matrix, stored [in, out], in our order [out.., in]."""
    codes, zeros = (quant.unpack_awq(_read(one, np.int32)).T for one in (stored.codes, stored.zeros))
    found = {"codes": quant.pack_nibbles(codes), "zero": zeros, "scale": _read(stored.scales, np.float16).T}
    return {name: np.ascontiguousarray(value).reshape(shapes[name].shape) for name, value in found.items()}


def _read(stored: Stored, dtype: jax.typing.DTypeLike, order: np.ndarray | None = None) -> np.ndarray:
    """Reads one tensor, cast, its rows put in `order`."""
    out = np.empty(stored.shape, dtype)
    rows = out.reshape(1 if out.ndim == 1 else out.shape[0], -1)
    at = 0
    for piece in _pieces(stored):
        place = slice(at, at + len(piece)) if order is None else order[at : at + len(piece)]
        rows[place] = piece.astype(dtype)
        at += len(piece)
    return out


def _pieces(stored: Stored) -> Iterator[np.ndarray]:
    """Yields a tensor's rows as floats, a few at a time; a vector is one row."""
    rows = stored.shape[0] if len(stored.shape) > 1 else 1
    row_bytes = stored.nbytes // rows
    step = max(1, _CHUNK_BYTES // row_bytes)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        raw = np.fromfile(stored.file, np.uint8, count * row_bytes, offset=stored.offset + start * row_bytes)
        if raw.size != count * row_bytes:
            raise UserError(f"{stored.label} is cut off; fetch the file again")
        if stored.kind in _NUMBERS:
            yield raw.view(_NUMBERS[stored.kind]).reshape(count, -1)
            continue
        try:
            yield dequantize(raw.reshape(count, row_bytes), GGMLQuantizationType[stored.kind])
        except NotImplementedError as error:
            raise UserError(
                f"{stored.label} has type {stored.kind}, which is not supported; use another file"
            ) from error


def _row_order(location: Path, cfg: DecoderConfig, path: tuple[str, ...]) -> np.ndarray | None:
    if location.is_dir():
        return None
    return families.gguf_row_order(cfg, read_header(location).metadata["general.architecture"], path)


def _sources(location: Path, cfg: DecoderConfig, *, awq: bool) -> dict[Place, Stored | AWQ]:
    """Maps a decoder's places to stored tensors, after checking that the file holds exactly this model."""
    slots = families.tensor_map(cfg) if location.is_dir() else families.gguf_names(cfg)
    catalogue = {part.name: part for stored in _catalogue(location).values() for part in _split(stored, slots)}
    if any(name.endswith(".qweight") for name in catalogue) != awq:
        told = "no AWQ matrices: store it as nf4" if awq else "AWQ matrices: set this model's weights to 'awq'"
        raise UserError(f"{location} has {told}")
    triples = _match_awq(location, catalogue, slots) if awq else {}
    for name in sorted(catalogue.keys() - slots.keys()):
        _refuse_unknown(catalogue[name], catalogue, cfg)
    return {**_match(location, catalogue, slots), **triples}


def _match_awq(
    location: Path, catalogue: dict[str, Stored], slots: dict[str, families.Slot]
) -> dict[Place, Stored | AWQ]:
    """Takes the packed matrices out of both, checked."""
    if "quantization_config" not in _read_config(location / "config.json")[1]:
        raise UserError(f"{location}/config.json: it has no quantization_config to say how matrices are packed")
    found: dict[Place, Stored | AWQ] = {}
    for name in [name for name, slot in slots.items() if slot.path[-1] in quant.MATRICES]:
        slot, stem = slots.pop(name), name.removesuffix(".weight")
        out, size = slot.shape
        blocks = size // quant.BLOCK["awq"]
        wanted = {
            f"{stem}.qweight": ("I32", (size, out // 8)),
            f"{stem}.qzeros": ("I32", (blocks, out // 8)),
            f"{stem}.scales": ("F16", (blocks, out)),
        }
        for part, (kind, shape) in wanted.items():
            if part not in catalogue:
                raise UserError(f"{location}: tensor {part} is missing; fetch the model again")
            if (catalogue[part].kind, catalogue[part].shape) != (kind, shape):
                had = f"{catalogue[part].kind} {catalogue[part].shape}"
                raise UserError(f"{catalogue[part].label} is {had}, AWQ with groups of 128 asks for {kind} {shape}")
        found[slot.path, slot.layer] = AWQ(*(catalogue.pop(part) for part in wanted))
    return found


def _split(stored: Stored, slots: Mapping[str, families.Slot]) -> Iterator[Stored]:
    """Yields the tensors that a stored one stands for: a run of its rows each."""
    names = families.parts(stored.name)
    if len(names) == 1:
        yield stored
        return
    rows = [slots[name].shape[0] for name in names if name in slots]
    if len(rows) < len(names) or len(stored.shape) == 0 or sum(rows) != stored.shape[0]:
        raise UserError(f"{stored.label} has shape {stored.shape}, the configuration asks for {sum(rows)} rows")
    row_bytes, begin = stored.nbytes // stored.shape[0], 0
    for name, count in zip(names, rows, strict=True):
        offset = stored.offset + begin * row_bytes
        yield Stored(stored.file, name, stored.kind, (count, *stored.shape[1:]), offset, count * row_bytes)
        begin += count


def _match(location: Path, catalogue: Mapping[str, Stored], slots: Mapping[str, families.Slot]) -> dict[Place, Stored]:
    """Maps places to stored tensors, after checking that each is there in its shape and as floats."""
    if missing := sorted(slots.keys() - catalogue.keys()):
        raise UserError(f"{location}: tensor {missing[0]} is missing ({len(missing)} in all); fetch the model again")
    for name, slot in slots.items():
        stored = catalogue[name]
        if stored.shape != slot.shape:
            raise UserError(f"{stored.label} has shape {stored.shape}, the configuration asks for {slot.shape}")
        if stored.kind in _INTEGERS or (location.is_dir() and stored.kind not in _FLOATS):
            raise UserError(
                f"{stored.label} is stored as {stored.kind}; {sorted(_FLOATS)} or a quantised .gguf are read"
            )
    return {(slot.path, slot.layer): catalogue[name] for name, slot in slots.items()}


def _refuse_unknown(stored: Stored, catalogue: Mapping[str, Stored], cfg: DecoderConfig | TTTConfig) -> None:
    if stored.name.endswith(("rotary_emb.inv_freq", ".token_idx")) or stored.name == "rope_freqs.weight":
        return  # follows from the configuration; `describe` has checked the second
    embed = catalogue.get("model.embed_tokens.weight")
    if stored.name != "lm_head.weight" or not cfg.tied or embed is None:
        raise UserError(f"{stored.label} {_STRANGE}")
    same = stored.shape == embed.shape and all(
        np.array_equal(a, b) for a, b in zip(_pieces(stored), _pieces(embed), strict=True)
    )
    if not same:
        raise UserError(
            f"{stored.label} differs from the embedding although tie_word_embeddings is true; "
            "set tie_word_embeddings to false in config.json if the head is its own"
        )


def _catalogue(location: Path) -> dict[str, Stored]:
    """Lists every tensor of a model by name."""
    if not location.is_dir():
        _require_gguf(location)
        return {
            name: Stored(location, name, info.kind, info.shape, info.offset, info.nbytes)
            for name, info in read_header(location).tensors.items()
        }
    catalogue: dict[str, Stored] = {}
    for file in _safetensors_files(location):
        for name, stored in _safetensors_header(file).items():
            if name in catalogue:
                raise UserError(f"{stored.label} stands in {catalogue[name].file.name} too; keep one of the two")
            catalogue[name] = stored
    return catalogue


def _require_gguf(location: Path) -> None:
    if not location.is_file():
        raise UserError(f"{location}: no such file or folder")
    if location.suffix != ".gguf":
        raise UserError(
            f"{location}: a reader is a folder with config.json and *.safetensors, or a .gguf file; convert other "
            "files (.bin, .pt are never opened) with transformers' save_pretrained"
        )


def _safetensors_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.is_file() and not single.is_file():
        try:
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{index}: no weight_map can be read in it ({error}); fetch it again") from error
        files = [folder / Path(name).name for name in names]
        if absent := [file for file in files if not file.is_file()]:
            raise UserError(f"{index}: names {absent[0].name}, which is not in {folder}; fetch it too")
        return files
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        raise UserError(
            f"{folder}: {len(files)} .safetensors files and no {index.name} that says which belong together"
        )
    if pickled := sorted(file.name for suffix in ("bin", "pt", "pth") for file in folder.glob(f"*.{suffix}")):
        raise UserError(
            f"{folder}: {pickled[0]} is a pickle and is never opened; convert it with transformers' save_pretrained"
        )
    raise UserError(f"{folder}: no *.safetensors in it; fetch the model's weights")


def _safetensors_header(file: Path) -> dict[str, Stored]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise UserError(
                f"{file}: a header of {length} bytes in a file of {size}; it is cut off or no safetensors file"
            )
        text = stream.read(length)
    try:
        table = json.loads(text)
        table.pop("__metadata__", None)
        entries = {name: (row["dtype"], tuple(row["shape"]), tuple(row["data_offsets"])) for name, row in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: its safetensors header cannot be read ({error}); fetch it again") from error
    out = {}
    for name, (kind, shape, (begin, end)) in entries.items():
        stored = Stored(file, name, kind, shape, 8 + length + begin, end - begin)
        if begin < 0 or (kind in _WIDTHS and stored.nbytes != math.prod(shape) * _WIDTHS[kind]):
            raise UserError(f"{stored.label} has {stored.nbytes} bytes, which shape {shape} of {kind} does not fill")
        if 8 + length + end > size:
            raise UserError(f"{stored.label} ends at byte {8 + length + end}, the file at {size}; fetch it again")
        out[name] = stored
    return out


def fingerprint(location: Path, *, describe: Callable[[Path], Config] = describe) -> str:
    """Identifies a model's weights and configuration wherever they lie; `describe_bert` describes a BERT-class body.

    A blake2b hash over the configuration and, for every tensor in the order of names: name, type, shape and 4 KiB at
    the start, the middle and the end of its bytes. Fast at any size; a change elsewhere in a tensor is not seen.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(dataclasses.asdict(describe(location)), sort_keys=True).encode())
    for name, stored in sorted(_catalogue(location).items()):
        digest.update(json.dumps([name, stored.kind, stored.shape]).encode())
        last = max(0, stored.nbytes - _SAMPLE_BYTES)
        with stored.file.open("rb") as file:
            for at in sorted({0, last // 2, last}):
                file.seek(stored.offset + at)
                digest.update(file.read(min(_SAMPLE_BYTES, stored.nbytes)))
    return digest.hexdigest()


def save(
    folder: Path, params: Tree, cfg: DecoderConfig, *, model_type: str, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Writes a reader as a folder that `load` and transformers open: config.json, model.safetensors, tokenizer files.

    All weights pass through host memory at once; meant for small readers.
    """
    fields = families.hf_fields(cfg, model_type)
    if tokenizer is not None:
        fields |= {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    _write(folder, families.fuse(_named(params, families.tensor_map(cfg)), model_type), fields, tokenizer)


def save_ttt(folder: Path, params: Tree, cfg: TTTConfig, *, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Writes a TTT model as a folder of the authors' layout, fp32: `load_ttt` opens it and so does their class.

    Rows of the table that are no token are left out.
    """
    tables = {name: params[name][: cfg.vocab] for name in ("embed", "head") if name in params}
    cfg = dataclasses.replace(cfg, rows=0)
    tensors = _named(params | tables, ttt_family.tensor_map(cfg))
    _write(folder, tensors, ttt_family.hf_fields(cfg), tokenizer)


def _named(params: Tree, slots: Mapping[str, families.Slot]) -> dict[str, np.ndarray]:
    """Returns a tree's leaves as stored tensors."""
    tensors = {}
    for name, slot in slots.items():
        leaf = functools.reduce(lambda node, part: node[part], slot.path, params)
        value = np.asarray(leaf if slot.layer is None else leaf[slot.layer])
        tensors[name] = np.ascontiguousarray(value.reshape(slot.shape))
    return tensors


def _write(
    folder: Path,
    tensors: dict[str, np.ndarray],
    fields: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
    partial = folder / "model.safetensors.partial"
    save_file(tensors, str(partial), metadata={"format": "pt"})
    os.replace(partial, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", "utf-8")
