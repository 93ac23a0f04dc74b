"""Two random readers as model folders, of two families and two vocabularies, and configurations that use them."""

import argparse
import dataclasses
import errno
import functools
import importlib
import json
import os
import re
import string
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from gguf import GGUFWriter
from ml_collections import ConfigDict
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedTokenizerFast

from configs import base
from lw_jax import recipes
from lw_jax.commands import loading, parser, train
from lw_jax.core import config, tree, validation
from lw_jax.core.config import Config
from lw_jax.core.types import Tree
from lw_jax.data import question_cards
from lw_jax.data.tokens import load_tokenizer
from lw_jax.evals import control_rows
from lw_jax.evals.wire_functions import WireFunctions
from lw_jax.hub import bert_family, weights
from lw_jax.inference.coded_wire import CodedWire
from lw_jax.inference.trained_wire import TrainedWire
from lw_jax.models import bert, decoder
from lw_jax.recipes import selfmade
from lw_jax.recipes.cache_wire import CacheWire
from lw_jax.recipes.latentwire import LatentWire
from lw_jax.recipes.ttt import TTT
from lw_jax.training import run_folder, trainer
from lw_jax.training.checkpoint import Checkpointer
from lw_jax.training.recipe import Weights
from lw_jax.training.step_spec import StepSpec
from sharding import place as places
from sharding import placement

LOSS = 1e-5  # relative, fp32 after a few optimizer steps: sums in another order
PARAMETERS = 2e-4  # absolute; Adam divides by the root of small squares, which magnifies rounding

SIZES = {
    # heads divide by 4 and kv heads by 2, so that model axes of 1, 2 and 4 are legal
    "llama": {"width": 48, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 10, "ffn": 72},
    "qwen2": {"width": 56, "layers": 3, "heads": 8, "kv_heads": 4, "head_dim": 6, "ffn": 88},
}

CACHE = {  # of a wire of kind "cache" whose start is all of it
    **{"encoder__kind": "cache", "encoder__ratio": 2, "encoder__width": 200, "encoder__texts": 24},
    **{"message__bytes": 130, "train__steps": 0},
}

DECODER = decoder.DecoderConfig(
    vocab=53,
    width=26,
    layers=3,
    heads=6,
    kv_heads=2,
    head_dim=10,
    ffn=34,
    rope_theta=1e4,
    norm_eps=1e-5,
    max_positions=64,
    tied=False,
    qkv_bias=True,
)


@functools.partial(jax.jit, static_argnums=0)
def draw_decoder(cfg: decoder.DecoderConfig) -> Tree:
    """Draws a decoder's weights; unit norms and zero biases, which would hide an error in them, are moved too."""
    params = decoder.init(jax.random.key(1), cfg, jnp.float32, scale=0.2)
    noise = iter(jax.random.split(jax.random.key(2), 32))
    return jax.tree.map(
        lambda leaf: leaf + 0.3 * jax.random.normal(next(noise), leaf.shape) if leaf.ndim < 4 else leaf, params
    )


def write_reader(folder: Path, family: str, *, seed: int = 0, **sizes: int) -> Path:
    """Writes a random reader with weights large enough that its logits differ; `sizes` change those of `SIZES`."""
    kind = dataclasses.replace(selfmade.FAMILIES[family], vocab=352 if family == "llama" else 320)
    texts = [example.context for example in question_cards.make(64, facts=2, seed=0, split="train")]
    selfmade.write_tokenizer(folder, kind, texts)
    cfg = decoder.DecoderConfig(
        vocab=kind.vocab,
        rope_theta=kind.rope_theta,
        norm_eps=1e-6,
        max_positions=512,
        tied=family == "qwen2",
        qkv_bias=kind.qkv_bias,
        **(SIZES[family] | sizes),
    )
    params = decoder.init(jax.random.key(seed), cfg, jnp.float32, scale=0.1)
    if kind.qkv_bias:
        for name in ("q_bias", "k_bias", "v_bias"):
            params["layers"][name] = 0.3 * jax.random.normal(jax.random.key(5), params["layers"][name].shape)
    weights.save(folder, params, cfg, model_type=family, tokenizer=load_tokenizer(folder).backend)
    return folder


def write_bert(folder: Path, *, prefix: str = "", **fields: object) -> tuple[bert.BertConfig, Tree]:
    """Writes a random BERT-class body whose words are spelled by letters; `fields` go into config.json."""
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *string.ascii_lowercase, *(f"##{c}" for c in string.ascii_lowercase)]
    vocab += [*string.digits, *(f"##{c}" for c in string.digits), *string.punctuation]
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({c: i for i, c in enumerate(vocab)}, unk_token="[UNK]"))
    backend.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.decoder = tokenizers.decoders.WordPiece()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.enable_truncation(7)
    backend.enable_padding(length=7)
    marks = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **marks).save_pretrained(str(folder))
    sizes = {"width": 42, "layers": 3, "heads": 6, "ffn": 53, "max_positions": 61, "token_types": 2}
    cfg = bert.BertConfig(vocab=len(vocab), norm_eps=1e-12, **sizes)
    rng = np.random.default_rng(7)
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: (path[-1].key.endswith("norm") + rng.normal(size=leaf.shape) / 3).astype(np.float32),
        bert.abstract(cfg, jnp.float32),
    )
    tensors = {}
    for name, slot in bert_family.tensor_map(cfg).items():
        leaf = functools.reduce(lambda node, part: node[part], slot.path, params)
        tensors[prefix + name] = np.ascontiguousarray(
            (leaf if slot.layer is None else leaf[slot.layer]).reshape(slot.shape)
        )
    save_file(tensors, folder / "model.safetensors")
    stated = {
        "model_type": "bert",
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.width,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "intermediate_size": cfg.ffn,
        "layer_norm_eps": cfg.norm_eps,
        "max_position_embeddings": cfg.max_positions,
        "type_vocab_size": cfg.token_types,
    }
    (folder / "config.json").write_text(json.dumps(stated | fields), "utf-8")
    return cfg, params


def edit_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    """Rewrites model.safetensors after `change` has had the dict of tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def write_gguf(path: Path, add: Callable[[GGUFWriter], Any], *, arch: str = "llama") -> Path:
    """Writes a file of the fields and tensors that `add` gives its writer."""
    writer = GGUFWriter(str(path), arch)
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_gguf_tokenizer(path: Path, fields: Mapping[str, Any]) -> Path:
    """Writes a file of a tokenizer alone, its fields named without "tokenizer.ggml."; None: left out."""

    def add(writer: GGUFWriter) -> None:
        kinds = {str: writer.add_string, list: writer.add_array, int: writer.add_int32, bool: writer.add_bool}
        for name, value in fields.items():
            if value is not None:
                kinds[type(value)](f"tokenizer.{'' if name == 'chat_template' else 'ggml.'}{name}", value)

    return write_gguf(path, add)


def contents(folder: Path) -> dict[str, bytes]:
    """{path in the folder: bytes} of every file."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def no_space(*_: Any, **__: Any) -> None:
    """Stands in for a function that writes, on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@functools.cache
def readers(root: Path) -> dict[str, Path]:
    """Writes both readers under `root` once."""
    return {"llama": write_reader(root / "llama", "llama"), "qwen": write_reader(root / "qwen", "qwen2")}


def make_config(root: Path, *, only: str = "", models: Mapping[str, Path] | None = None, **changes: object) -> Config:
    """Returns a small configuration over both readers, or `only` one, or other `models` by name.

    `changes` by dotted key, dots written as "__".
    """
    c = base.get_config()
    for name, folder in (readers(root) if models is None else models).items():
        if only in ("", name):
            c.llms[name] = base.llm(str(folder))
    c.encoder.update(kind="bytes", layers=1, width=24, slots=5, window=256)
    c.adapter.hidden = 40
    c.data.update(cards=64, validation_limit=16, facts=2, context_tokens=256)
    c.optim.update(warmup_steps=2, learning_rate=3e-3)
    c.train.update(steps=6, global_batch=8, log_every=1, checkpoint_every=3)
    c.compute.remat = "none"
    c.eval.update(examples=8, batch=8, max_new_tokens=4)
    values = {key.replace("__", "."): value for key, value in changes.items()}
    c.encoder.kind = values.get("encoder.kind", c.encoder.kind)
    c.update_from_flattened_dict(config.unread(config.build(c)) | values)
    return config.build(c)


def change(cfg: Config, **changes: object) -> Config:
    """Returns a configuration with other values; `changes` as in `make_config`."""
    values = ConfigDict(dataclasses.asdict(cfg))
    values.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    return config.build(values)


def write_config(path: Path, cfg: Config) -> Path:
    """Writes a configuration file of these values."""
    code = "from ml_collections import ConfigDict\n\n\ndef get_config():\n    return ConfigDict({!r})\n"
    path.write_text(code.format(config.to_dict(cfg)), "utf-8")
    return path


def make_searched_config(root: Path, **changes: object) -> Config:
    """Returns a configuration that leaves recomputation to the planner."""
    return make_config(root, **{"compute__remat": "auto"} | changes)


def place(cfg: Config, strategy: str = "single", *, devices: int = 1, **axes: int) -> placement.Placement:
    """Returns a placement on the first so many virtual devices."""
    return placement.place(strategy, recipes.reader_bytes(cfg), devices=jax.devices()[:devices], **axes)


def make_recipe(
    root: Path, *, devices: int = 1, model: int = 1, strategy: str = "", only: str = "", **changes: Any
) -> Any:
    """Returns the recipe on the first so many virtual devices; `changes` as in `make_config`, `models` too."""
    cfg = make_config(root, only=only, **changes)
    strategy = strategy or ("tensor" if model > 1 else "replicate")
    return recipes.kind_of(cfg)(cfg, place(cfg, strategy, model=model, devices=devices))


def make_wire(root: Path, **changes: Any) -> Any:
    """Returns an untrained wire; `changes` as in `make_recipe`."""
    recipe = make_recipe(root, **changes)
    return wire_of(recipe, recipe.build().trainable, step=0)


def wire_of(recipe: LatentWire | CacheWire, trainable: Tree, *, step: int = 6) -> Any:
    """Returns the wire of a recipe with these weights, wherever they lie."""
    kind = CodedWire if isinstance(recipe, CacheWire) else TrainedWire
    placed = jax.device_put(jax.device_get(trainable), recipe.shardings.trainable)
    return kind(recipe, placed, recipe.load_frozen(), step)


def outline(cfg: Config, strategy: str = "single", devices: int = 1, *, stands_for: str = "") -> StepSpec:
    """Returns the step of a placement by shapes alone; under `tensor` all devices share each product."""
    placed = place(cfg, strategy, model=devices if strategy == "tensor" else 1, devices=devices)
    return StepSpec(cfg, recipes.make(cfg, dataclasses.replace(placed, stands_for=stands_for), outline=True))


def start_step(recipe: Any, batch: Tree, *, accumulation: int = 1) -> tuple[StepSpec, Tree, Tree, Tree]:
    """(program, state, frozen weights, placed batch) with which a run's first step begins."""
    program, built = StepSpec(recipe.cfg, recipe), recipe.build()
    state = {"trainable": built.trainable, "opt_state": program.optimizer.init(built.trainable)}
    state["step"] = places.replicate(jnp.int32(0), recipe.placement.learner)
    return program, state, built.frozen, program.put(batch, accumulation)


def write_text(folder: Path) -> Path:
    """Writes about 5,000 bytes in which much can be foretold."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "text.txt"
    file.write_text(
        "\n\n".join(example.context for example in question_cards.make(40, facts=4, seed=1, split="train")), "utf-8"
    )
    return file


def make_ttt_config(root: Path, **changes: object) -> Config:
    """Returns a small Test-Time-Training model of bytes; `changes` as in `make_config`."""
    c = base.get_config("ttt")
    c.data.update(train=str(write_text(root)), validation="", held_out=0.1)
    # Widths and ffn divide by 8, so that a data axis of 8 splits them.
    c.ttt.update(layers=2, width=24, heads=3, ffn=40, chunk=4, length=12)
    c.optim.update(warmup_steps=2, learning_rate=3e-3, weight_decay=0.1)
    c.train.update(steps=6, global_batch=8, log_every=1, checkpoint_every=3, alarm_step=0)
    c.compute.remat = "none"
    c.eval.update(examples=10, batch=8)
    c.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    return config.build(c)


def make_ttt(root: Path, *, devices: int = 1, strategy: str = "replicate", **changes: object) -> TTT:
    """Returns the recipe on the first so many virtual devices."""
    cfg = make_ttt_config(root, **changes)
    validation.validate(cfg)
    return TTT(cfg, place(cfg, strategy, devices=devices))


class Recorder(WireFunctions):
    """Records every prompt's latents and channel."""

    def __init__(self, *given):
        super().__init__(*given)
        self.seen = []

    def prompt_from_latents(self, trainable, params, fields, latents, name):
        self.seen.append((np.asarray(fields["channel"]), np.asarray(latents)))
        return super().prompt_from_latents(trainable, params, fields, latents, name)


def make_bench(
    recipe: LatentWire, built: Weights, kind: type[WireFunctions] = WireFunctions
) -> control_rows.WireSession:
    """Returns the recipe as evaluation uses it."""
    functions = kind(recipe.wire, recipe.placement)
    return control_rows.WireSession(functions, built.frozen, recipe.tokenizers, built.trainable)


def gradient_of(recipe: LatentWire, frozen: Tree) -> Callable[[Tree, Tree], tuple[Tree, Any]]:
    """Returns jitted (trainable, batch) -> the gradient of the summed loss, and the loss' terms."""

    @jax.jit
    def run(trainable: Tree, batch: Tree) -> tuple[Tree, Any]:
        def objective(trainable: Tree) -> tuple[jax.Array, Any]:
            terms = recipe.loss(trainable, frozen, batch, jax.random.key(0))
            return terms.sum, terms

        return jax.grad(objective, has_aux=True)(trainable)

    return run


def compiled(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Returns what a function gives, run as one program; XLA would compile each operation by itself, for each shape."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]

    def run(arrays: list[jax.Array]) -> Any:
        filled = leaves.copy()
        for i, array in zip(at, arrays, strict=True):
            filled[i] = array
        args, kwargs = jax.tree.unflatten(tree, filled)
        return function(*args, **kwargs)

    return jax.jit(run)([leaves[i] for i in at])


def unsaved_curve(recipe: LatentWire | TTT, workdir: Path):
    """(exit code, logged losses, final trainable tree) of a whole run that writes no checkpoint."""
    workdir.mkdir()
    run = trainer.Run(recipe.cfg, recipe, None, workdir)
    code = run.train(lambda step: False)
    return code, logged_losses(workdir), jax.device_get(run.state["trainable"])


def curve(recipe: LatentWire | TTT, workdir: Path, *, stop: Callable[[int], bool] = lambda step: False):
    """(exit code, logged losses, final trainable tree) of a whole run."""
    with Checkpointer(workdir / "checkpoints", keep=2, identity=recipe.identity() | recipe.content()) as checkpointer:
        workdir.mkdir(exist_ok=True)
        run = trainer.Run(recipe.cfg, recipe, checkpointer, workdir)
        code = run.train(stop)
    return code, logged_losses(workdir), jax.device_get(run.state["trainable"])


def assert_same_curve(found: tuple[int, list[float], Tree], wanted: tuple[int, list[float], Tree]) -> None:
    """Holds what `curve` gives of one run to another's."""
    assert found[0] == wanted[0]
    np.testing.assert_allclose(found[1], wanted[1], rtol=LOSS)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=PARAMETERS), found[2], wanted[2])


def assert_same_scores(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Holds the records of an evaluation to another's."""
    assert found and len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert all(one[key] == other[key] for key in ("prediction", "reader", "row", "id"))
        np.testing.assert_allclose(one["nll"], other["nll"], rtol=LOSS)


def assert_equal_trees(found: Tree, wanted: Tree) -> None:
    """Holds two trees to each other, bit for bit."""
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(np.asarray(one), np.asarray(other)), found, wanted)


def assert_near_trees(found: Tree, wanted: Tree, tolerance: float) -> None:
    """Holds each leaf to the other tree's within so much of that leaf's largest value."""
    found, wanted = tree.flatten_paths(found), tree.flatten_paths(wanted)
    assert found.keys() == wanted.keys()
    for path, leaf in wanted.items():
        np.testing.assert_allclose(found[path], leaf, atol=tolerance * float(jnp.abs(leaf).max()), err_msg=path)


def logged_rows(workdir: Path, key: str = "train/loss") -> list[dict[str, Any]]:
    """Returns the rows of a run's log that have a value of this name."""
    return [row for row in run_folder.read_metrics(workdir / "metrics.jsonl") if key in row]


def logged_losses(workdir: Path) -> list[float]:
    """Returns the training losses that a run has logged."""
    return [row["train/loss"] for row in logged_rows(workdir)]


def untimed_rows(workdir: Path) -> list[dict[str, Any]]:
    """Returns the rows of a run's log without what is timed or measured of its devices."""
    timed = re.compile("seconds|per_second|devices/")
    rows = run_folder.read_metrics(workdir / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not timed.search(name)} for row in rows]


def start_folder(folder: Path, cfg: Config) -> Path:
    """Writes a run's folder as its command does before it trains."""
    run_folder.write_workdir(folder, cfg=cfg, base={}, command=["test"])
    return folder


def train_in(folder: Path, cfg: Config) -> Path:
    """Trains as the command does, in a folder of its own."""
    assert train.main(cfg, start_folder(folder, cfg)) == 0
    return folder


def call(verb: str, cfg: Config, workdir: Path, *, spec: str = "", **flags: Any) -> Any:
    """Runs a command on a configuration that is at hand, with its flags by name; returns its exit code."""
    command = parser.COMMANDS[verb]
    unset = {
        flag[2:]: options.get("default", False if options.get("action") == "store_true" else None)
        for flag, options in command.flags.items()
    }
    args = argparse.Namespace(**{"verb": verb, "config": spec, "workdir": None, "assignments": {}} | unset | flags)
    loaded = loading.Loaded(spec, cfg, workdir, {}, {}, {})
    return importlib.import_module(command.module).run(args, loaded)


def ask(cfg: Config, workdir: Path, *, context: str = "", message: bytes = b"", **flags: Any) -> Any:
    """Runs `answer` on a text or a message that is at hand."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "given"
        file.write_bytes(message or context.encode())
        return call("answer", cfg, workdir, **{"message" if message else "context": str(file)}, **flags)
