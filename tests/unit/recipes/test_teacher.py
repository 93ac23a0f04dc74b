"""lw_jax/recipes/teacher.py: a teacher's likeliest tokens are computed once, and are the live teacher's."""

import fcntl
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.data import frozen_cache
from lw_jax.data.frozen_cache import CachedRows, Store
from lw_jax.hub import sources, weights
from lw_jax.inference import taught_text
from lw_jax.models import wire
from tests import tiny
from tests.unit.recipes import test_dpo, test_surprisal

HALF = 2e-2  # log-probabilities down to -20 kept in fp16, which has 11 bits
CURVE = 2e-3  # relative, of losses whose teacher is kept in fp16 against one in fp32
KL = 1e-2  # relative, of the KL alone, which is smaller than the log-probabilities
GRADIENT = 2e-2  # of the largest in a leaf, likewise
K = 7


pytestmark = pytest.mark.usefixtures("cache")


def make(root, **changes):
    return tiny.make_recipe(
        root, **{"only": "qwen", "loss__kl": 1.0, "loss__teacher_k": K, "data__cards": 13} | changes
    )


def attend(recipe):
    """The training questions with their teacher's tokens, and whose passes that took."""
    teacher, calls = recipe._teacher, []
    run = teacher._likeliest
    teacher.__dict__["_likeliest"] = lambda *arguments: calls.append(arguments[-1]) or run(*arguments)
    encoded = recipe.curriculum.stream("train", "answer", 0)
    recipe.load_frozen()
    return encoded, calls


def test_second_run_computes_nothing_and_reads_the_same(root):
    first, calls = attend(make(root, only=""))
    assert sorted(set(calls)) == ["llama", "qwen"]
    again, none = attend(make(root, only=""))
    assert none == []
    for name in ("llama", "qwen"):
        np.testing.assert_equal(
            again.collate([5, 0, 12])["readers"][name]["teacher"], first.collate([5, 0, 12])["readers"][name]["teacher"]
        )


def test_who_reads_a_trained_wire_needs_no_cache_and_may_have_several_processes(root, monkeypatch, tmp_path):
    recipe = make(root)
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert recipe.load_frozen().keys() == {"qwen"}
    assert not (tmp_path / "none" / "teacher").exists()


def test_other_examples_of_the_same_teacher_are_added(root):
    attend(make(root, data__cards=9))
    more, calls = attend(make(root, eval__batch=4))
    assert len(more) == 13 and calls == ["qwen"], "four examples are missing: one batch"
    assert len(list((make(root)._teacher.stores["qwen"].folder.parent).iterdir())) == 1


def test_each_cache_of_a_frozen_model_is_another_where_one_number_within_a_tensor_is(tmp_path, monkeypatch):
    monkeypatch.setattr(taught_text, "_train", lambda *given, **options: (np.zeros((1, 48), "f"), [1.0] * 4))
    for name in "abc":
        tiny.readers(tmp_path / name)
        (tmp_path / name / "model").symlink_to("llama")
        rows = '{"prompt": "Where?", "chosen": "Here.", "rejected": "There."}\n' * 9
        (tmp_path / name / "pairs.jsonl").write_text(rows)
    tiny.edit_tensors(tmp_path / "c" / "llama", lambda tensors: tensors["model.embed_tokens.weight"][99:100].fill(0.5))
    prints, folders = set(), []
    for name in "abc":
        recipe = make(tmp_path / name, only="llama", eval__taught_steps=4)
        stores = recipe._teacher.stores["llama"], test_surprisal.make(tmp_path / name).store
        taught_text.teach(recipe, {"llama": {}}, batch=8)
        taught = len(list((sources.cache_root() / "taught").iterdir()))
        stores += (test_dpo.make(tmp_path / name, dpo__reference="cached", train__global_batch=4)._store,)
        folders.append([*(store.folder for store in stores), taught])
        prints.add(weights.fingerprint(tmp_path / name / "llama"))
    a, b, c = folders
    assert len(prints) == 1 and a == b and not set(a) & set(c), "a copy is the same model"


def test_teacher_that_is_asked_otherwise_has_a_store_of_its_own(root, tmp_path):
    def folder(**changes):
        return make(root, only="llama", **changes)._teacher.stores["llama"].folder

    own = folder()
    assert own == folder(seed=3, encoder__slots=3, data__facts=1, optim__learning_rate=1.0), "nothing of the teacher"
    changed = {
        **{"prompt__anchor": "\nReply:", "prompt__user": "{context}\nAsked: {question}", "loss__teacher_k": K - 1},
        **{"llms__llama__weights": "bf16", "compute__dtype": "bf16", "data__answer_tokens": 23},
        "llms__llama__source": str(tiny.write_reader(tmp_path / "other", "llama", seed=9)),
    }
    assert len({own, *(folder(**{key: value}) for key, value in changed.items())}) == 1 + len(changed)


ROWS = {bytes([i]) * 16: i for i in range(7)}


def compute(asked):
    """Rows that tell which example they are of."""

    def run(positions):
        asked.append(list(positions))
        ids = np.array(positions, np.int32)[:, None, None] * 100 + np.arange(6, dtype=np.int32).reshape(2, 3)
        return {"ids": ids, "logp": (-ids / 8).astype(np.float32)}

    return run


SHAPES = {"ids": ((2, 3), np.int32), "logp": ((2, 3), np.float16)}


@pytest.mark.parametrize(("name", "cut", "missing"), [("keys", 5, 1), ("keys", 16 * 3, 3), ("logp", 13, 2)])
def test_store_of_a_stopped_job_is_taken_up_where_its_keys_end(tmp_path, name, cut, missing):
    keys = list(ROWS)
    Store(tmp_path, {"of": "a"}, rows=SHAPES).fill(keys, compute([]), batch=3)
    store, asked = Store(tmp_path, {"of": "a"}, rows=SHAPES), []
    (file,) = store.folder.glob(f"*/{name}")
    file.write_bytes(file.read_bytes()[: file.stat().st_size - cut])
    with (file.parent / "ids").open("ab") as rest:
        rest.write(b"half a row")  # written, but its key was not
    assert store.fill(keys, compute(asked), batch=3) == missing
    assert sum(len(set(one)) for one in asked) == missing
    found = CachedRows(store, keys)(range(7))
    np.testing.assert_array_equal(found["ids"], compute([])(range(7))["ids"])
    np.testing.assert_allclose(found["logp"], compute([])(range(7))["logp"], rtol=1e-3)  # fp16


def test_nodes_whose_locks_do_not_meet_leave_each_other_s_rows_alone(tmp_path, monkeypatch):
    keys, stores = list(ROWS), []
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    for node in ("one", "two"):
        monkeypatch.setattr(os, "uname", lambda node=node: os.uname_result(("Linux", node, "", "", "")))
        stores.append(Store(tmp_path, {}, rows=SHAPES))
    one, two = stores

    def meanwhile(positions):
        two.fill(keys[3:], lambda behind: compute([])([i + 3 for i in behind]), batch=2)
        return compute([])(positions)

    assert one.fill(keys, meanwhile, batch=3) == 7
    two.fill(keys, compute([]), batch=3)
    for store in stores:
        np.testing.assert_array_equal(store.read(keys)["ids"], compute([])(range(7))["ids"])


def test_each_key_is_computed_once_in_batches_of_one_size(tmp_path, monkeypatch):
    keys, asked = list(ROWS), []
    store = Store(tmp_path, {}, rows=SHAPES)
    assert store.fill([*keys, keys[2]], compute(asked), batch=4) == 7
    assert [len(one) for one in asked] == [4, 4]
    monkeypatch.setattr(frozen_cache, "locked", None)  # what is all there waits for no job, and writes nothing
    assert store.fill(keys, compute(asked), batch=4) == 0 and len(asked) == 2
    assert CachedRows(store, [keys[6], keys[1]])([1, 0])["ids"][:, 0, 0].tolist()[0] in (100, 200, 800)


def test_kept_rows_are_the_live_teacher_s_in_a_ragged_batch(root):
    recipe = make(root)
    encoded, _ = attend(recipe)
    text = make(root, loss__teacher_k=0).curriculum.stream("train", "answer", 0)
    fields, kept = (one.collate([11, 2, 7, 5, 3])["readers"]["qwen"] for one in (text, encoded))
    assert "teacher" not in fields and "text" not in kept
    params = recipe.load_frozen()["qwen"]
    prompt = wire.text_prompt(params, jax.tree.map(jnp.asarray, fields["text"]))
    logits = tiny.compiled(recipe.wire.answer_logits, params, "qwen", prompt, fields)
    logp = np.asarray(jax.nn.log_softmax(logits, axis=2))
    real = fields["weights"] > 0
    assert len(set(fields["text"]["mask"].sum(axis=1).tolist())) > 1, "the batch must be ragged"
    ids, values = kept["teacher"]["ids"], kept["teacher"]["logp"].astype(np.float32)
    assert ids.shape == (5, fields["targets"].shape[1], K)
    np.testing.assert_allclose(values[real], np.take_along_axis(logp, ids, axis=2)[real], atol=HALF)
    np.testing.assert_allclose(values[real], -np.sort(-logp, axis=2)[:, :, :K][real], atol=HALF)


@pytest.mark.slow
def test_loss_and_gradient_from_all_cached_tokens_are_those_of_the_whole_teacher(root):
    losses, gradients = {}, {}
    for k in (0, 10_000, 2):
        recipe = make(root, loss__kl=2.0, loss__ce=0.5, loss__teacher_k=k)
        encoded, built = recipe.curriculum.stream("train", "answer", 0), recipe.build()
        batch = jax.tree.map(jnp.asarray, encoded.collate([3, 0, 7, 12]))

        def objective(trainable, recipe=recipe, frozen=built.frozen, batch=batch):
            terms = recipe.loss(trainable, frozen, batch, jax.random.key(0))
            return terms.sum / terms.weight

        losses[k], gradients[k] = jax.jit(jax.value_and_grad(objective))(built.trainable)
    assert float(losses[10_000]) == pytest.approx(float(losses[0]), rel=CURVE)
    assert losses[2] < losses[0], "fewer tokens: a lower bound"
    for found, wanted in zip(*map(jax.tree.leaves, (gradients[10_000], gradients[0])), strict=True):
        np.testing.assert_allclose(found, wanted, atol=GRADIENT * float(jnp.abs(wanted).max()))
