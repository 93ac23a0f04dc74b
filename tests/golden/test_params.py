"""Every parameter's path, shape, dtype, placement, rate and decay, as text; UPDATE_GOLDEN=1 writes the files anew."""

import collections
import dataclasses
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from lw_jax.core import tree
from lw_jax.hub import architectures, bert_family, ttt_family
from lw_jax.models import bert, decoder, ttt
from lw_jax.training import optimizers
from sharding import mesh as meshes
from sharding import rules, tables
from tests import tiny

GOLDEN = Path(__file__).resolve().parent / "params"

# Public config.json of google-bert/bert-base-uncased and sentence-transformers/all-MiniLM-L6-v2.
BERT_BASE = bert.BertConfig(
    vocab=30522, width=768, layers=12, heads=12, ffn=3072, norm_eps=1e-12, max_positions=512, token_types=2
)
MINILM_L6 = dataclasses.replace(BERT_BASE, width=384, layers=6, ffn=1536)
# Published sizes (109,482,240 and 22,713,216) less the pooler, d x d weights and d biases.
BODIES = {"bert_base": (BERT_BASE, 108_891_648), "minilm_l6": (MINILM_L6, 22_565_376)}
READERS = {
    "llama31_8b": architectures.KNOWN["meta-llama/Llama-3.1-8B"],
    "qwen25_7b": architectures.KNOWN["Qwen/Qwen2.5-7B"],
}
# The authors' 125m; the other inner model and backbone small, with a table filled up and a head of its own.
TTT = {
    "ttt_125m": ttt.TTTConfig(vocab=50257, width=768, layers=12, heads=12, ffn=2048),
    "ttt_mlp_mamba": ttt.TTTConfig(
        vocab=257,
        width=64,
        layers=2,
        heads=4,
        ffn=172,  # does not divide by 8
        inner="mlp",
        base_rate=0.1,
        pre_conv=True,
        share_qk=True,
        gate=True,
        tied=False,
        rows=320,
    ),
}
PLACEMENTS = {"replicate": {"data": 8}, "fsdp": {"data": 8}, "tensor": {"data": 2, "model": 4}}
ENCODERS = {
    "lm windows": {"encoder__kind": "lm", "encoder__pooling": "windows", "encoder__layers": 2},
    "lm queries": {"encoder__kind": "lm", "encoder__pooling": "queries", "encoder__rate": 0.0},
    "bytes windows": {"encoder__kind": "bytes", "encoder__pooling": "windows"},
    "bytes queries": {"encoder__kind": "bytes", "encoder__pooling": "queries"},
}


def compare(name: str, rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    text = "\n".join(lines) + "\n"
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8"), "changed on purpose? make golden, and say why in the commit"


def spec(sharding: jax.sharding.NamedSharding) -> str:
    return f"P({', '.join(map(repr, sharding.spec))})"  # PartitionSpec's own repr differs between versions of JAX


@pytest.mark.parametrize("name", READERS)
def test_frozen_tree_and_its_placements_are_unchanged(name: str) -> None:
    shapes = decoder.abstract(READERS[name], jnp.bfloat16)
    placed = {}
    for placement, axes in PLACEMENTS.items():
        found = rules.shardings(tables.reader_table(placement), shapes, meshes.make(**axes), name=name)
        placed[placement] = {path: spec(sharding) for path, sharding in tree.flatten_paths(found).items()}
    rows = [
        (path, str(leaf.shape), str(leaf.dtype), *(placed[placement][path] for placement in PLACEMENTS))
        for path, leaf in sorted(tree.flatten_paths(shapes).items())
    ]
    compare(name, [("path", "shape", "dtype", *PLACEMENTS), *rows])


@pytest.mark.parametrize("name", BODIES)
def test_bert_tree_has_the_published_number_of_parameters(name: str) -> None:
    cfg, count = BODIES[name]
    assert tree.count(bert.abstract(cfg, jnp.float32)) == count


def test_bert_tree_its_decay_and_the_tensors_it_comes_from_are_unchanged() -> None:
    shapes = bert.abstract(BERT_BASE, jnp.float32)
    flat, decay = tree.flatten_paths(shapes), tree.flatten_paths(optimizers.decays(shapes))
    stored = {path: bert_family.TENSORS[path].hugging_face for path in flat}
    rows = [(path, str(leaf.shape), str(leaf.dtype), str(decay[path]), stored[path]) for path, leaf in flat.items()]
    compare("bert_base", [("path", "shape", "dtype", "decay", "tensor"), *sorted(rows)])


@pytest.mark.parametrize("name", TTT)
def test_ttt_tree_its_placements_its_decay_and_the_tensors_it_comes_from_are_unchanged(name: str) -> None:
    shapes = ttt.abstract(TTT[name])
    columns = {
        placement: jax.tree.map(spec, rules.shardings(table, shapes, meshes.make(data=8), name=name))
        for placement, table in (("replicate", tables.TRAINABLE), ("fsdp", tables.LEARNER_FSDP))
    }
    columns |= {"decay": jax.tree.map(str, optimizers.decays(shapes))}
    flat = {column: tree.flatten_paths(values) for column, values in columns.items()}
    rows = [
        (
            path,
            str(leaf.shape),
            str(leaf.dtype),
            *(values[path] for values in flat.values()),
            ttt_family.TENSORS[path].hugging_face,
        )
        for path, leaf in sorted(tree.flatten_paths(shapes).items())
    ]
    compare(name, [("path", "shape", "dtype", *columns, "tensor"), *rows])


def test_trainable_tree_and_how_it_learns_are_unchanged(root: Path) -> None:
    found = collections.defaultdict(list)  # the encoders that have a row
    for name, changes in ENCODERS.items():
        source = {"encoder__source": str(tiny.readers(root)["qwen"])} if name.startswith("lm") else {}
        recipe = tiny.make_recipe(root, devices=2, **changes, **source)
        shapes = recipe.abstract.trainable
        columns = {
            "placement": jax.tree.map(spec, recipe.shardings.trainable),
            "rate": rules.match([(path, str(rate)) for path, rate in recipe.rates], shapes, name="rates"),
            "decay": jax.tree.map(str, optimizers.decays(shapes)),
        }
        flat = {column: tree.flatten_paths(values) for column, values in columns.items()}
        for path, leaf in tree.flatten_paths(shapes).items():
            row = (path, str(leaf.shape), str(leaf.dtype), *(values[path] for values in flat.values()))
            found[row].append(name)
    rows = [(*row, "all" if len(names) == len(ENCODERS) else ", ".join(names)) for row, names in found.items()]
    compare("trainable", [("path", "shape", "dtype", *columns, "encoders"), *sorted(rows)])


def test_no_golden_file_is_left_over() -> None:
    assert sorted(file.stem for file in GOLDEN.glob("*.txt")) == sorted([*READERS, *TTT, "bert_base", "trainable"])
