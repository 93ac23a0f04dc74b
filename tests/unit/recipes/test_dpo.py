"""lw_jax/recipes/dpo.py: the loss of preference pairs on a tiny model, from rows to learned pairs."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from lw_jax import recipes
from lw_jax.core import config, validation
from lw_jax.core.errors import UserError
from lw_jax.data import question_cards
from lw_jax.models import decoder, lora
from sharding import mesh as meshes
from sharding import placement
from tests import tiny

SAME = 1e-5  # fp32 sums in another order


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A model folder and a file of pairs: the chosen answer is the right one, the rejected one another card's."""
    root = tmp_path_factory.mktemp("dpo")
    tiny.write_reader(root / "model", "llama", head_dim=16, width=64, ffn=128)
    made = question_cards.make(96, facts=2, seed=4, split="train")
    rows = [
        {"prompt": f"{one.context} {one.question} ", "chosen": one.answers[0], "rejected": f"{other.answers[0]} or so"}
        for one, other in zip(made, made[1:] + made[:1], strict=True)
    ]
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return root


def make_config(root, **changes):
    c = base.get_config("dpo")
    c.llms.policy = base.llm(str(root / "model"))
    c.data.update(train=str(root / "pairs.jsonl"), validation="", held_out=0.2)
    c.lora.update(rank=3)
    c.dpo.max_length = 96
    c.optim.update(warmup_steps=1, learning_rate=1e-2)
    c.train.update(steps=6, global_batch=8, log_every=1, checkpoint_every=3)
    c.compute.remat = "none"
    c.eval.update(examples=0, batch=8)
    for key, value in changes.items():
        section, leaf = key.split("__")
        c[section][leaf] = value
    cfg = config.build(c)
    validation.validate(cfg)
    return cfg


def make(root, mesh=None, **changes):
    cfg = make_config(root, **changes)
    mesh = mesh or meshes.make(data=1, model=1)
    return recipes.make(cfg, placement.one_mesh(mesh, ["policy"], table="replicate"))


def batch_of(recipe, number=0):
    data_schedule = recipe.data_schedule()
    size = recipe.cfg.train.global_batch
    return data_schedule.batch(number, global_batch=size, seed=0, share=slice(0, size))


@functools.cache
def compiled_loss(recipe):
    return jax.jit(recipe.loss)


def terms(recipe, pairs, frozen, batch, seed=0):
    return compiled_loss(recipe)(pairs, frozen, batch, jax.random.key(seed))


@pytest.fixture(scope="module")
def recipe(root):
    return make(root)


@pytest.fixture(scope="module")
def frozen(recipe):
    return recipe.load_frozen()


def moved(recipe, scale=0.2):
    """Pairs that have learned something."""
    rng = np.random.default_rng(3)
    return jax.tree.map(
        lambda x: jnp.asarray(scale * rng.standard_normal(x.shape), jnp.float32), recipe.abstract.trainable
    )


def test_each_length_bucket_is_read_as_often_as_it_has_pairs(root):
    (phase,) = make(root, train__steps=100).data_schedule().phases
    sizes = np.array([len(pairs) for pairs, _ in phase.streams])
    assert len(sizes) > 1 and sizes.sum() % 8, "an epoch is not of whole batches"
    np.testing.assert_allclose(np.array(phase.counts(100)) / sizes, 100 / sizes.sum(), rtol=0.1)


def plain_logp(params, cfg, ids, mask, scored):
    """Summed log-probability of the scored tokens, one row at a time, without padding or chunks."""
    out = []
    for row in range(len(ids)):
        length = int(mask[row].sum())
        x = decoder.embed(params, jnp.asarray(ids[row, :length])[None])
        hidden = tiny.compiled(decoder.forward, params, cfg, x, mask=jnp.ones((1, length), bool)).hidden
        logp = jax.nn.log_softmax(decoder.logits(params, hidden)[0, :-1], axis=-1)
        chosen = np.asarray(logp)[np.arange(length - 1), ids[row, 1:length]]
        out.append(float(chosen[scored[row, 1:length]].sum()))
    return np.array(out)


def test_log_probabilities_are_those_of_the_answers_tokens_one_sequence_at_a_time(root, recipe, frozen):
    params, pairs, fields = frozen["policy"], moved(recipe), batch_of(recipe)["readers"]["policy"]
    policy, merged = (
        lora.attach(params, pairs, recipe.lora),
        lora.merge(jax.tree.map(jnp.copy, params), pairs, recipe.lora),
    )
    rows = [[fields[key][:1, side] for key in ("ids", "mask", "completion")] for side in range(2)]
    wanted = np.stack([plain_logp(merged, recipe.model, *row) for row in rows], axis=1)
    for chunk in (0, 7):
        score = jax.jit(make(root, compute__logits_chunk=chunk)._score)
        found, _ = score(policy, params, jax.tree.map(jnp.asarray, fields))
        np.testing.assert_allclose(found[:1], wanted, rtol=2e-4, err_msg=str(chunk))


def test_before_the_first_step_policy_and_reference_are_equal_to_the_bit(root, recipe):
    for one in (recipe, make(root, llms__policy=base.llm(str(root / "model"), weights="nf4"))):
        built = one.build()
        found = terms(one, built.trainable, built.frozen, batch_of(one))
        assert float(found.terms["rewards/chosen"][0]) == 0.0 == float(found.terms["rewards/rejected"][0])
        assert float(found.sum / found.weight) == pytest.approx(math.log(2), rel=1e-6)
        assert float(found.terms["rewards/accuracies"][0]) == 0.0, "no strict preference yet"


def test_kept_reference_is_the_live_one_and_is_read_once(root, recipe, frozen, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path))
    stored, pairs = make(root, dpo__reference="cached"), moved(recipe)
    stored.load_frozen()
    assert "reference: " in capsys.readouterr().out
    batch = batch_of(stored)
    assert batch["readers"]["policy"]["reference"].shape == (8, 2)
    one, other = (terms(r, pairs, frozen, batch_of(r)) for r in (recipe, stored))
    assert float(one.sum) == pytest.approx(float(other.sum), rel=SAME)
    again = make(root, dpo__reference="cached")
    again.load_frozen()
    assert "reference: " not in capsys.readouterr().out
    np.testing.assert_array_equal(
        batch_of(again)["readers"]["policy"]["reference"], batch["readers"]["policy"]["reference"]
    )


def test_loss_is_of_the_named_kind_with_the_sft_term_beside_it(root, recipe, frozen):
    pairs, batch = moved(recipe), batch_of(recipe)
    plain = terms(recipe, pairs, frozen, batch)
    alone, both = (
        terms(make(root, dpo__loss=kinds, dpo__weights=weights), pairs, frozen, batch)
        for kinds, weights in ((("sft",), (1.0,)), (("sigmoid", "sft"), (1.0, 0.5)))
    )
    assert float(both.sum) == pytest.approx(float(plain.sum) + 0.5 * float(alone.sum), rel=SAME)
    assert float(alone.sum) != pytest.approx(float(plain.sum), rel=0.1)


@pytest.mark.slow
def test_accumulation_and_devices_give_the_same_curve(root, tmp_path):
    dropped = {"lora__dropout": 0.5, "train__steps": 3, "train__eval_every": 0}
    wanted = tiny.unsaved_curve(make(root, **dropped), tmp_path / "one")
    assert wanted[1][2] < wanted[1][0]
    for devices, micro in ((2, 4), (3, 2)):  # of each device; 3 do not divide the batch
        mesh = meshes.make(data=devices, model=1, devices=jax.devices()[:devices])
        recipe = make(root, mesh=mesh, train__micro_batch=micro, **dropped)
        tiny.assert_same_curve(tiny.unsaved_curve(recipe, tmp_path / str(devices)), wanted)


def test_dropout_is_drawn_in_training_and_off_in_validation(root, frozen):
    recipe = make(root, lora__dropout=0.5)
    (_, held_out), *_ = recipe.validation()
    for batch, same in ((held_out.collate(range(8)), True), (batch_of(recipe), False)):
        first, second = (float(terms(recipe, moved(recipe), frozen, batch, seed).sum) for seed in (1, 2))
        assert (first == second) == same


def test_rows_of_both_sources_are_read_by_the_named_columns_and_overlap_is_told(root, tmp_path):
    lines = (root / "pairs.jsonl").read_text("utf-8").replace('"chosen"', '"better"').splitlines(keepends=True)
    for name, part in {"a.jsonl": lines[:64], "b.jsonl": lines[64:]}.items():
        (tmp_path / name).write_text("".join(part), "utf-8")
    (tmp_path / "same.jsonl").symlink_to(tmp_path / "a.jsonl")
    named = {"data__train": str(tmp_path / "a.jsonl"), "data__columns": ("chosen:better",), "data__held_out": 0.0}
    (tmp_path / "some.jsonl").write_text("".join([*lines[:3], *lines[64:]]), "utf-8")
    for name, count in (("b", 32), ("some", 35)):
        recipe = make(root, **named | {"data__validation": str(tmp_path / f"{name}.jsonl")})
        (_, held_out), *_ = recipe.validation()
        assert len(held_out.examples) == count
        assert any("3 of 35" in str(finding) for finding in recipe.findings()) == (name == "some")
    with pytest.raises(UserError, match="same.jsonl' is the training source"):
        make(root, **named | {"data__validation": str(tmp_path / "same.jsonl")}).validation()


@pytest.mark.parametrize(("truncation", "lost"), [("keep_start", "end"), ("keep_end", "beginning")])
def test_the_part_of_a_prompt_that_is_cut_off_is_named(root, truncation, lost):
    found = [str(one) for one in make(root, dpo__truncation=truncation, dpo__max_prompt=9).findings()]
    assert [line.endswith(f"does not see its {lost}") for line in found if "truncated prompt" in line] == [True], found


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lora__targets": ("qkv_proj",)}, "'qkv_proj'"),
        ({"dpo__loss": ("sigmod",)}, "'sigmoid'"),
        ({"dpo__weights": (1.0, 2.0)}, r"dpo.weights.*\(1.0, 2.0\)"),
        ({"data__held_out": 0.0}, "data.held_out"),
        ({"data__train": "cards"}, "data.train.*'cards'"),
        ({"dpo__label_smoothing": 0.1, "dpo__loss": ("ipo",)}, "dpo.label_smoothing"),
        ({"dpo__label_smoothing": 0.5}, "dpo.label_smoothing"),
        ({"dpo__beta": 0.0}, "dpo.beta"),
        ({"dpo__weights": (float("inf"),)}, "dpo.weights"),
    ],
)
def test_what_cannot_work_is_refused_by_name(root, changes, named):
    with pytest.raises(UserError, match=named):
        make(root, **changes)
