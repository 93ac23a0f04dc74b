"""Two random readers as model folders, of two families and two vocabularies, and configurations that use them."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from configs import base
from lw_jax import evaluate, metrics, recipes, train, weights
from lw_jax.checkpoint import Checkpointer
from lw_jax.core import config
from lw_jax.core.config import Config
from lw_jax.core.types import Tree
from lw_jax.data import cards
from lw_jax.data.tokens import load_tokenizer
from lw_jax.evals import rows
from lw_jax.models import decoder
from lw_jax.recipes import selfmade
from lw_jax.recipes.base import Weights
from lw_jax.recipes.latentwire import LatentWire
from sharding import placement

SIZES = {
    # heads divide by 4 and kv heads by 2, so that model axes of 1, 2 and 4 are legal
    "llama": {"width": 48, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 10, "ffn": 72},
    "qwen2": {"width": 56, "layers": 3, "heads": 8, "kv_heads": 4, "head_dim": 6, "ffn": 88},
}


def write_reader(folder: Path, family: str, *, seed: int = 0, **sizes: int) -> Path:
    """Writes a random reader with weights large enough that its logits differ; `sizes` change those of `SIZES`."""
    kind = dataclasses.replace(selfmade.FAMILIES[family], vocab=352 if family == "llama" else 320)
    texts = [example.context for example in cards.make(64, facts=2, seed=0, split="train")]
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


@functools.cache
def readers(root: Path) -> dict[str, Path]:
    """Writes both readers under `root` once."""
    return {"llama": write_reader(root / "llama", "llama"), "qwen": write_reader(root / "qwen", "qwen2")}


def make_config(root: Path, **changes: object) -> Config:
    """Returns a small configuration over both readers; `changes` by dotted key, dots written as "__"."""
    c = base.get_config()
    for name, folder in readers(root).items():
        c.llms[name] = base.llm(str(folder))
    c.encoder.update(kind="bytes", layers=1, width=24, slots=5, window=256)
    c.adapter.hidden = 40
    c.data.update(cards=64, validation_cards=16, facts=2, context_tokens=256)
    c.optim.update(warmup_steps=2, learning_rate=3e-3)
    c.train.update(steps=6, global_batch=8, log_every=1, checkpoint_every=3)
    c.compute.remat = "none"
    c.eval.update(examples=8, batch=8, max_new_tokens=4)
    for key, value in changes.items():
        section, _, leaf = key.rpartition("__")
        node = c
        for part in section.split("__") if section else []:
            node = node[part]
        node[leaf] = value
    return config.build(c)


def make_recipe(root: Path, *, devices: int = 1, model: int = 1, strategy: str = "", **changes: object) -> LatentWire:
    """Returns the recipe on the first so many virtual devices."""
    cfg = make_config(root, **changes)
    strategy = strategy or ("tensor" if model > 1 else "replicate")
    sizes = recipes.reader_bytes(cfg)
    return LatentWire(cfg, placement.place(strategy, sizes, model=model, devices=jax.devices()[:devices]))


def make_bench(recipe: LatentWire, built: Weights) -> rows.Bench:
    """Returns the recipe as evaluation uses it, everything on one device."""
    decode = {name: tokenizer.decode for name, tokenizer in recipe.tokenizers.items()}

    def place(batch: Tree, name: str | None) -> Tree:
        del name
        return jax.tree.map(jnp.asarray, batch)

    return rows.Bench(evaluate.predict(recipe), built.trainable, built.frozen, decode, place)


def curve(recipe: LatentWire, workdir: Path, *, stop: Callable[[int], bool] = lambda step: False):
    """(exit code, logged losses, final trainable tree) of a whole run."""
    with Checkpointer(workdir / "checkpoints", keep=2, identity=recipe.identity()) as checkpointer:
        workdir.mkdir(exist_ok=True)
        run = train.Run(recipe.cfg, recipe, checkpointer, workdir)
        code = run.train(stop)
    return code, logged_losses(workdir), jax.device_get(run.state["trainable"])


def logged_losses(workdir: Path) -> list[float]:
    """Returns the training losses that a run has logged."""
    return [row["train/loss"] for row in metrics.read(workdir / "metrics.jsonl") if "train/loss" in row]
