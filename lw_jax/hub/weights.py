"""Frozen weights: from stored tensors, one by one, into a model's tree and its shards, and back."""

import dataclasses
import functools
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from lw_jax.core import schema
from lw_jax.core.errors import UserError
from lw_jax.core.files import content_hash, whole
from lw_jax.core.progress import phase
from lw_jax.core.types import Tree
from lw_jax.hub import awq, bert_family, families, gguf_family, sources, tokenizer_files, ttt_family
from lw_jax.hub.config_json import Kind, read_or_default
from lw_jax.hub.families import Place
from lw_jax.hub.gguf_header import read_header
from lw_jax.hub.tensor_files import (
    FLOATS,
    INTEGERS,
    Stored,
    list_tensors,
    make_buffer,
    read_tensor,
    same_values,
    write_safetensors,
)
from lw_jax.models import bert, quant, ttt
from lw_jax.models.bert import BertConfig
from lw_jax.models.decoder import DecoderConfig, abstract
from lw_jax.models.products import BITS
from lw_jax.models.ttt import TTTConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAMPLE_BYTES = 4096
# Leaves of more bytes are put on their devices layer by layer, so that the host holds two layers and not all.
_STACKED_ON_HOST = 2**25
# What may stand beside a model's config.json and tensors: patterns of an earlier model's files.
_BESIDE = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("generation_config.json", "chat_template.jinja", "additional_chat_templates/*.jinja"),
)

Config = TypeVar("Config", DecoderConfig, BertConfig, TTTConfig)


def describe(location: Path) -> DecoderConfig:
    """Returns the configuration of a model folder or .gguf file, no weights; raises as `families.decoder_config`."""
    if location.is_dir():
        return families.decoder_config(_read_config(location), where=str(location / "config.json"))
    tensors, where = list_tensors(location), str(location)
    fields = gguf_family.hf_fields(read_header(location).metadata, tensors, where=where)
    return families.decoder_config(fields, where=where)


def model_type(location: Path) -> str:
    """Returns the family of a model folder or .gguf file, one of `families.FAMILIES`, once `describe` has read it."""
    if location.is_dir():
        return _read_config(location)["model_type"]
    return read_header(location).metadata["general.architecture"]


def describe_bert(location: Path) -> BertConfig:
    """Returns the configuration of a BERT-class encoder's folder, no weights; raises as `bert_family.bert_config`."""
    if not location.is_dir():
        raise UserError(f"{location}: a BERT-class body is a folder with config.json and *.safetensors; name one")
    return bert_family.bert_config(_read_config(location), where=str(location / "config.json"))


def is_ttt(location: Path) -> bool:
    return location.is_dir() and read_or_default(location / "config.json", Kind).model_type == ttt_family.MODEL_TYPE


def describe_ttt(location: Path) -> TTTConfig:
    """Returns the configuration of a TTT model's folder, no weights; raises as `ttt_family.ttt_config`."""
    return ttt_family.ttt_config(_read_config(location), where=str(location / "config.json"))


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return schema.read(folder / "config.json", dict[str, Any], remedy="fetch the file again")
    except FileNotFoundError as error:
        raise UserError(f"{folder}: no config.json; name a model folder, or the .gguf file itself") from error


def load(
    location: Path,
    *,
    dtype: jax.typing.DTypeLike,
    shardings: Tree | None = None,
    factors: jax.typing.DTypeLike | None = None,
    layers: int = 0,
    packed: str = "",
) -> Tree:
    """Loads a frozen reader as the tree of `docs/architecture.md`.

    Args:
        location: a folder with config.json and *.safetensors, or a .gguf file.
        dtype: of all weights that are not packed; the cast is per tensor on the host.
        shardings: the same tree of shardings; None: the default device.
        factors: dtype of what is only multiplied; see `decoder.abstract`.
        layers: keeps the first so many (0: all).
        packed: one of `quant.PACKED` keeps the layers' matrices so, packed one by one while they stream; another word
            leaves them as they are.

    Raises:
        UserError: a tensor unknown, missing, stored twice, of another shape or not of a float type, or a file cut off;
            an AWQ folder that is not asked for as "awq", or another one that is.
    """
    cfg = describe(location)
    shapes = quant.abstract(abstract(_keep(location, cfg, layers), np.dtype(dtype), factors=factors), packed)
    sources = _sources(location, cfg, is_awq=packed == "awq")
    if "head" in shapes and cfg.tied:
        sources[("head",), None] = sources[("embed",), None]
    # A folder's rows are in our order whatever its family.
    architecture = "" if location.is_dir() else model_type(location)
    row_order = functools.partial(gguf_family.row_order, cfg, architecture)
    return _fill(location, shapes, sources, shardings=shardings, row_order=row_order, packed=packed)


def load_bert(location: Path, *, layers: int = 0) -> Tree:
    """Loads a BERT-class body as the tree of `bert.abstract`, in fp32; arguments and refusals as in `load`."""
    cfg = describe_bert(location)
    catalogue: dict[str, Stored] = {}
    for stored in list_tensors(location).values():
        name = bert_family.present_name(stored.name)
        if name in catalogue:
            raise UserError(f"{stored.label} is the same as {catalogue[name].name}; keep one of the two")
        if name is not None:
            catalogue[name] = stored
    shapes = bert.abstract(_keep(location, cfg, layers), jnp.float32)
    return _fill(location, shapes, _match(location, catalogue, bert_family.tensor_map(cfg)))


def load_ttt(location: Path, *, shardings: Tree | None = None) -> Tree:
    """Loads a TTT model of the authors' layout as `ttt.abstract`, in fp32; arguments and refusals as in `load`."""
    cfg = describe_ttt(location)
    sources = _match(location, list_tensors(location), ttt_family.tensor_map(cfg), tied=cfg.tied)
    return _fill(location, ttt.abstract(cfg), sources, shardings=shardings)


def _keep(location: Path, cfg: Config, layers: int) -> Config:
    if not 0 <= layers <= cfg.layers:
        raise UserError(f"{location}: layers={layers}, the model has {cfg.layers}; take 0 (all) to {cfg.layers}")
    return dataclasses.replace(cfg, layers=layers or cfg.layers)


def _fill(
    location: Path,
    shapes: Tree,
    sources: Mapping[Place, Stored | awq.Matrix],
    *,
    shardings: Tree | None = None,
    row_order: Callable[[tuple[str, ...]], np.ndarray | None] = lambda path: None,
    packed: str = "",
) -> Tree:
    """Reads every leaf of a tree of shapes, tensor by tensor, into its shards; a packed matrix counts as one leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(shapes, is_leaf=_is_packed)
    what = f"loading {location.name}" + (f", its matrices stored as {packed}" if packed in quant.PACKED else "")
    with phase(what, sum(len(_layers(key[0].key, leaf)) for key, leaf in leaves), "tensors") as done:

        def fill(key: Any, leaf: Tree, target: Tree | None = None) -> Tree:
            path = tuple(str(part.key) for part in key)
            order, stacked, layers = row_order(path), path[0] == "layers", _layers(path[0], leaf)
            struct = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), leaf) if stacked else leaf
            reused = stacked and not _is_packed(struct)
            buffers = [make_buffer(struct.shape, struct.dtype) for _ in layers[:2]] if reused else [None]
            tensors = [
                functools.partial(_read_leaf, sources[path, layer], struct, order, packed, buffers[i % len(buffers)])
                for i, layer in enumerate(layers)
            ]
            values = done.track(_ahead(tensors) if len(buffers) > 1 else (read() for read in tensors))
            if stacked:
                return _stack(values, leaf, target)
            (value,) = values
            return _put(value, target)

        placed = [shapes] if shardings is None else [shapes, shardings]
        return jax.tree_util.tree_map_with_path(fill, *placed, is_leaf=_is_packed)


def _layers(part: str, leaf: Tree) -> Sequence[int | None]:
    """Returns the numbers of a leaf's tensors, one a layer; of a leaf outside the layers, None."""
    return range(jax.tree.leaves(leaf)[0].shape[0]) if part == "layers" else [None]


def _is_packed(node: Any) -> bool:
    return isinstance(node, dict) and "codes" in node


def _ahead(reads: Sequence[Callable[[], Tree]]) -> Iterator[Tree]:
    """Yields each function's result while the next one runs; an earlier result is not used again."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(reads[0])
        for following in reads[1:]:
            value, future = future.result(), pool.submit(following)
            yield value
        yield future.result()


def _stack(layers: Iterator[Tree], leaf: Tree, sharding: Tree | None) -> Tree:
    shapes, tree = jax.tree.flatten(leaf)
    if sum(x.size * x.dtype.itemsize for x in shapes) <= _STACKED_ON_HOST:  # without a program for each leaf's shape
        stacks = [make_buffer(x.shape, x.dtype) for x in shapes]
        for i, layer in enumerate(layers):
            for stack, value in zip(stacks, jax.tree.leaves(layer), strict=True):
                stack[i] = value
        return _put(jax.tree.unflatten(tree, stacks), sharding)
    part = jax.tree.map(_of_a_layer, sharding)
    # Functions of the module: JAX compiles them once for leaves of the same shapes, of this model or of the next.
    stack = jax.jit(_zeros, static_argnums=(0, 1), out_shardings=sharding)(tree, tuple(shapes))
    write = jax.jit(_set_layer, donate_argnums=0, out_shardings=sharding)
    for i, layer in enumerate(layers):
        # Waits: the layer's memory is the next but one's, and a queue would hold many layers on the host.
        stack = jax.block_until_ready(write(stack, _put(layer, part), np.int32(i)))
    return stack


def _zeros(tree: Any, shapes: Sequence[jax.ShapeDtypeStruct]) -> Tree:
    return jax.tree.unflatten(tree, [jnp.zeros(x.shape, x.dtype) for x in shapes])


def _set_layer(stack: Tree, layer: Tree, i: jax.Array) -> Tree:
    return jax.tree.map(lambda stacked, value: jax.lax.dynamic_update_index_in_dim(stacked, value, i, 0), stack, layer)


def _of_a_layer(sharding: Any) -> Any:
    if isinstance(sharding, jax.NamedSharding):
        return sharding.update(spec=jax.P(*sharding.spec[1:]))
    return sharding


def _put(value: Tree, sharding: Tree | None) -> Tree:
    if sharding is None:
        return jax.device_put(value)
    return jax.tree.map(
        lambda x, target: jax.make_array_from_callback(x.shape, target, lambda index: x[index]), value, sharding
    )


def _read_leaf(
    stored: Stored | awq.Matrix, shapes: Tree, order: np.ndarray | None, packed: str, into: np.ndarray | None
) -> Tree:
    """Reads one tensor in the form that `shapes` describes; one that is not packed `into` a buffer, if there is one."""
    if isinstance(stored, awq.Matrix):
        return awq.read(stored, shapes)
    if not _is_packed(shapes):
        dtype = np.dtype(jnp.bfloat16 if shapes.dtype == BITS else shapes.dtype)
        read = read_tensor(stored, dtype, order, None if into is None else into.view(dtype))
        return read.view(shapes.dtype).reshape(shapes.shape)
    *out, _ = shapes["codes"].shape
    matrix = read_tensor(stored, np.float32, order).reshape(*out, stored.shape[1])
    return jax.device_get(quant.pack(matrix, packed))


def _sources(location: Path, cfg: DecoderConfig, *, is_awq: bool) -> dict[Place, Stored | awq.Matrix]:
    """Maps a decoder's places to stored tensors, after checking that the file holds exactly this model."""
    slots = families.tensor_map(cfg) if location.is_dir() else gguf_family.tensor_map(cfg)
    catalogue = {part.name: part for stored in list_tensors(location).values() for part in _split(stored, slots)}
    if any(name.endswith(".qweight") for name in catalogue) != is_awq:
        fault = "no AWQ matrices: store it as nf4" if is_awq else "AWQ matrices: set this model's weights to 'awq'"
        raise UserError(f"{location} has {fault}")
    if is_awq and not _read_config(location).get("quantization_config"):
        raise UserError(f"{location}/config.json: no quantization_config, which AWQ matrices need")
    triples = awq.match(location, catalogue, slots) if is_awq else {}
    return {**_match(location, catalogue, slots, tied=cfg.tied), **triples}


def _split(stored: Stored, slots: Mapping[str, families.Slot]) -> Iterator[Stored]:
    names = families.parts(stored.name)
    if len(names) == 1:
        yield stored
        return
    rows = [slots[name].shape[0] for name in names if name in slots]
    if stored.name.endswith((".qweight", ".qzeros", ".scales")):
        raise UserError(
            f"{stored.label}: AWQ matrices of a family that stores several as one are not read; use the unquantised "
            "folder, packed while loading: weights='nf4'"
        )
    if len(rows) < len(names) or len(stored.shape) == 0 or sum(rows) != stored.shape[0]:
        raise UserError(f"{stored.label} has shape {stored.shape}, the configuration asks for {sum(rows)} rows")
    row_bytes, begin = stored.nbytes // stored.shape[0], 0
    for name, count in zip(names, rows, strict=True):
        offset = stored.offset + begin * row_bytes
        yield Stored(stored.file, name, stored.kind, (count, *stored.shape[1:]), offset, count * row_bytes)
        begin += count


def _match(
    location: Path, catalogue: Mapping[str, Stored], slots: Mapping[str, families.Slot], *, tied: bool = False
) -> dict[Place, Stored]:
    """Returns the stored tensor of each place; refuses a wrong or missing one, and one that has no place."""
    for name in sorted(catalogue.keys() - slots.keys()):
        _refuse_unknown(catalogue[name], catalogue, tied)
    if missing := sorted(slots.keys() - catalogue.keys()):
        raise UserError(f"{location}: tensor {missing[0]} is missing ({len(missing)} in all); fetch the model again")
    for name, slot in slots.items():
        stored = catalogue[name]
        if stored.shape != slot.shape:
            raise UserError(f"{stored.label} has shape {stored.shape}, the configuration asks for {slot.shape}")
        if stored.kind in INTEGERS or (location.is_dir() and stored.kind not in FLOATS):
            raise UserError(
                f"{stored.label} is stored as {stored.kind}; {sorted(FLOATS)} or a quantised .gguf are read"
            )
    return {(slot.path, slot.layer): catalogue[name] for name, slot in slots.items()}


def _refuse_unknown(stored: Stored, catalogue: Mapping[str, Stored], tied: bool) -> None:
    if stored.name.endswith(("rotary_emb.inv_freq", ".token_idx")) or stored.name == "rope_freqs.weight":
        return  # follows from the configuration; `describe` has checked the second
    embed = catalogue.get("model.embed_tokens.weight")
    if stored.name != "lm_head.weight" or not tied or embed is None:
        raise UserError(f"{stored.label} belongs to no known part of the model; it is of another kind than it says")
    if not same_values(stored, embed):
        raise UserError(
            f"{stored.label} differs from the embedding although tie_word_embeddings is true; "
            "set tie_word_embeddings to false in config.json if the head is its own"
        )


def fingerprint(location: Path, *, describe: Callable[[Path], Config] = describe) -> str:
    """Identifies a model's weights and configuration, not their path; `describe_bert` describes a BERT-class body.

    A blake2b hash over the configuration and, for every tensor in the order of names: name, type, shape and 4 KiB at
    the start, the middle and the end of its bytes. Fast at any size, the same however a model is split into files; a
    change elsewhere in a tensor is not seen. What is computed with a model is kept under its `identify`.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(dataclasses.asdict(describe(location)), sort_keys=True).encode())
    for name, stored in sorted(list_tensors(location).items()):
        digest.update(json.dumps([name, stored.kind, stored.shape]).encode())
        last = max(0, stored.nbytes - _SAMPLE_BYTES)
        with stored.file.open("rb") as file:
            for start in sorted({0, last // 2, last}):
                file.seek(stored.offset + start)
                digest.update(file.read(min(_SAMPLE_BYTES, stored.nbytes)))
    return digest.hexdigest()


def identify(location: Path) -> str:
    """Returns the hash of a model's configuration and of all its weights, whose files are read once (`file_hash`)."""
    return content_hash([fingerprint(location), sorted(hash_files(location).values())])


def hash_files(location: Path) -> dict[str, str]:
    """Returns the sha256 of each of a model's weight files."""
    files = sorted({stored.file for stored in list_tensors(location).values()})
    return {file.name: sources.file_hash(file) for file in files}


def save(
    folder: Path,
    params: Tree,
    cfg: DecoderConfig,
    *,
    model_type: str,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    generation: Mapping[str, Any] | None = None,
) -> None:
    """Writes a reader as a folder that `load` and transformers open: config.json, model.safetensors, tokenizer files.

    `generation` are fields of a generation_config.json; None: there is none. All weights pass through host memory at
    once; meant for small readers.
    """
    fields = families.hf_fields(cfg, model_type) | _special_ids(tokenizer)
    tensors = families.fuse(_named(params, families.tensor_map(cfg)), model_type)
    _write(folder, tensors, fields, tokenizer, generation)


def save_ttt(folder: Path, params: Tree, cfg: TTTConfig, *, tokenizer: "PreTrainedTokenizerBase | None" = None) -> None:
    """Writes a TTT model as a folder of the authors' layout, fp32: `load_ttt` opens it and so does their class.

    Rows of the table that are no token are left out.
    """
    tables = {name: params[name][: cfg.vocab] for name in ("embed", "head") if name in params}
    cfg = dataclasses.replace(cfg, rows=0)
    tensors = _named(params | tables, ttt_family.tensor_map(cfg))
    _write(folder, tensors, ttt_family.hf_fields(cfg) | _special_ids(tokenizer), tokenizer)


def _special_ids(tokenizer: "PreTrainedTokenizerBase | None") -> dict[str, int | None]:
    """Returns the fields of config.json that name special tokens, so that no class's defaults stand for them."""
    if tokenizer is None:
        return {}
    return {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}


def _named(params: Tree, slots: Mapping[str, families.Slot]) -> dict[str, np.ndarray]:
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
    tokenizer: "PreTrainedTokenizerBase | None",
    generation: Mapping[str, Any] | None = None,
) -> None:
    """Writes a model's folder: all files are written before one that is there is replaced, config.json last.

    With a tokenizer, files of an earlier model's that the new one has not are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (
        whole(folder / "config.json") as config,
        whole(folder / "model.safetensors") as stored,
        tempfile.TemporaryDirectory(prefix=".tokenizer.", dir=folder) as words,
    ):
        write_safetensors(stored, tensors, layout="pt")
        # Without it vLLM runs bf16 weights in fp16; the old spelling, which transformers 4 and 5 both read.
        dtype = str(next(iter(tensors.values())).dtype)
        config.write_text(json.dumps(fields | {"torch_dtype": dtype}, indent=2) + "\n", "utf-8")
        if tokenizer is not None:
            tokenizer_files.save(tokenizer, Path(words))
        if generation is not None:
            marks = {name: fields[name] for name in ("bos_token_id", "pad_token_id") if fields.get(name) is not None}
            Path(words, "generation_config.json").write_text(
                json.dumps({**marks, **generation}, indent=2) + "\n", "utf-8"
            )
        files = {path.relative_to(words): path for path in sorted(Path(words).rglob("*")) if path.is_file()}
        for name, file in files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            file.replace(target)
        for pattern in _BESIDE if tokenizer is not None else ():
            for path in list(folder.glob(pattern)):
                if path.is_file() and path.relative_to(folder) not in files:
                    path.unlink()
