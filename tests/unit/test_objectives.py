"""lw_jax/losses/objectives.py: each term by its formula, absent without a weight, and exact sums in every split."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from lw_jax.core import config
from lw_jax.core.types import EXACT, Task
from lw_jax.losses import chunked, objectives, token_losses
from lw_jax.losses.objectives import Pass
from lw_jax.models import encoder

SAME = 1e-5  # fp32 sums of a few hundred terms of unit size
COSINE = 1e-4  # the same of cosines, which divide by two roots
B, T, V, M, Z, D = 3, 7, 11, 4, 5, 6
LENGTHS = (7, 2, 5)  # answer tokens and EOS
SLOTS = (4, 2, 3)
TERMS = ("kl", "first", "k", "align", "entropy", "diversity")


def weigh(**weights):
    return config.Loss(**base.get_config().loss.to_dict() | {"ce": 0.0} | weights)


def make(task="answer", *, teacher=False, embedded=False):
    """One pass over a ragged batch; `teacher` gives whole logits beside three kept tokens."""
    rng = np.random.default_rng(1)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    logits, told, latents, prefix = draw(B, T, V), draw(B, T, V), draw(B, M, Z), draw(B, M, D)
    logp, ids = jax.lax.top_k(jax.nn.log_softmax(told), 3)
    fields = {
        "targets": jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32),
        "weights": jnp.asarray(np.arange(T) < np.array(LENGTHS)[:, None], jnp.float32),
        "channel": jnp.asarray([[slots, Z, EXACT] for slots in SLOTS], jnp.int32),
        "task": Task(task),
        "teacher": {"ids": ids, "logp": logp},
    }
    latents = jnp.where(encoder.slot_mask(fields["channel"][:, 0], M)[:, :, None], latents, 0.0)
    return Pass(logits, fields, latents, prefix, draw(B, T, D) if embedded else None, told if teacher else None)


def choose(one, rows):
    """The same pass of some examples."""
    arrays = {key: value for key, value in one.fields.items() if key != "task"}
    fields = jax.tree.map(lambda x: x[rows], arrays) | {"task": one.fields["task"]}
    kept = {key: getattr(one, key) for key in ("logits", "latents", "prefix", "embedded", "teacher")}
    return Pass(fields=fields, **{key: None if value is None else value[rows] for key, value in kept.items()})


def expect(one, key):
    """A term's sum by hand, example by example."""
    logits, targets = np.asarray(one.logits, np.float64), np.asarray(one.fields["targets"])
    logp = logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))
    nll = -np.take_along_axis(logp, targets[:, :, None], axis=2)[:, :, 0]
    total = 0.0
    for row, length in enumerate(LENGTHS):
        if key == "nll":
            total += nll[row, :length].sum()
        elif key in ("first", "k"):
            total += length * nll[row, : min(length, 1 if key == "first" else 3)].mean()
        elif key == "entropy":
            total += length * (np.exp(logp[row, 0]) * logp[row, 0]).sum()
        else:
            x = np.asarray(one.latents[row, : SLOTS[row]], np.float64)
            x /= np.linalg.norm(x, axis=1, keepdims=True)
            total += length * ((x @ x.T) ** 2)[~np.eye(SLOTS[row], dtype=bool)].mean()
    return total


@pytest.mark.parametrize("key", ["nll", "first", "k", "entropy", "diversity"])
def test_term_is_its_formula_and_enters_the_objective_by_its_weight(key):
    one, weights = make(), {"ce" if key == "nll" else key: 0.7} | {"k_tokens": 3}
    found = objectives.total(weigh(**weights), "llama", one)
    total = expect(one, key)
    assert float(found.terms[f"{key}/llama"][0]) == pytest.approx(total, rel=SAME)
    assert float(found.terms[f"{key}/llama"][1]) == pytest.approx(sum(LENGTHS))
    assert float(found.sum) == pytest.approx(0.7 * total, rel=SAME)
    assert float(found.weight) == sum(LENGTHS)


@pytest.mark.parametrize("teacher", [True, False])
def test_kl_is_from_the_live_teacher_or_from_its_kept_tokens(teacher):
    one = make(teacher=teacher)
    counted, kept = one.fields["weights"], one.fields["teacher"]
    found = objectives.total(weigh(kl=2.0, temperature=1.5), "qwen", one)
    if teacher:
        expected, _ = token_losses.kl(one.teacher, one.logits, counted, temperature=1.5)
    else:
        expected, _ = token_losses.kl_of_top(kept["ids"], kept["logp"], one.logits, counted, temperature=1.5)
    assert float(found.sum) == pytest.approx(2 * float(expected), rel=SAME)
    assert float(found.terms["kl/qwen"][0]) == pytest.approx(float(expected), rel=SAME)


def test_align_compares_each_slot_in_use_with_the_mean_of_its_window_without_eos():
    one = make("reconstruct", embedded=True)
    total = 0.0
    for row, (length, slots) in enumerate(zip(LENGTHS, SLOTS, strict=True)):
        text, cosines = length - 1, []
        for slot in range(slots):
            first = slot * text // slots
            window = np.asarray(one.embedded[row, first : max((slot + 1) * text // slots, first + 1)]).mean(axis=0)
            mine = np.asarray(one.prefix[row, slot])
            cosines.append(mine @ window / np.linalg.norm(mine) / np.linalg.norm(window))
        total += length * (1 - np.mean(cosines))
    found = objectives.total(weigh(align=0.3), "llama", one)
    assert float(found.terms["reconstruct/align/llama"][0]) == pytest.approx(total, rel=COSINE)
    assert float(found.sum - found.terms["reconstruct/nll/llama"][0]) == pytest.approx(0.3 * total, rel=COSINE)


def test_prefix_that_is_its_windows_means_is_aligned():
    one = make("reconstruct", embedded=True)
    text = jnp.asarray(np.arange(T) < np.array(LENGTHS)[:, None] - 1)
    means = encoder.window_weights(text, M, one.fields["channel"][:, 0]) @ one.embedded
    for scale in (1.0, 0.01):
        found = objectives.total(weigh(align=1.0), "llama", dataclasses.replace(one, prefix=scale * means))
        assert abs(float(found.terms["reconstruct/align/llama"][0])) < COSINE


@pytest.mark.parametrize("task", ["reconstruct", "continuation"])
def test_passages_have_their_own_names_full_weight_and_no_term_of_an_answer(task):
    one = make(task)
    found = objectives.total(weigh(ce=0.2, kl=2.0, first=1.0, k=1.0, entropy=1.0), "llama", one)
    assert set(found.terms) == {f"{task}/nll/llama", f"{task}/accuracy/llama"}
    assert float(found.sum) == pytest.approx(expect(one, "nll"), rel=SAME)


@pytest.mark.parametrize("task", ["answer", "reconstruct"])
def test_only_what_has_a_weight_is_named_and_computed(task):
    label, one = "" if task == "answer" else f"{task}/", make(task)

    def trace(loss):
        embedded = jnp.ones((B, T, D)) if objectives.needs_embedded(loss, task) else None

        def run(logits, latents, prefix):
            made = dataclasses.replace(one, logits=logits, latents=latents, prefix=prefix, embedded=embedded)
            return objectives.total(loss, "llama", made)

        arrays = (one.logits, one.latents, one.prefix)
        return set(jax.eval_shape(run, *arrays).terms), len(str(jax.make_jaxpr(run)(*arrays)).splitlines())

    names, work = trace(weigh(ce=1.0))
    assert names == {f"{label}nll/llama", f"{label}accuracy/llama"}
    told = {"answer": set(TERMS) - {"align"}, "reconstruct": {"align", "diversity"}}[task]
    for key in TERMS:
        more, longer = trace(weigh(ce=1.0, **{key: 0.1}))
        assert more - names == ({f"{label}{key}/llama"} if key in told else set())
        assert longer > work if key in told else longer == work, key


def test_teacher_and_embeddings_are_asked_for_only_where_a_term_reads_them():
    tasks = ("answer", "reconstruct", "continuation")
    assert [objectives.needs_teacher(weigh(kl=1.0), task) for task in tasks] == [True, False, False]
    assert [objectives.needs_embedded(weigh(align=1.0), task) for task in tasks] == [False, True, False]
    assert not any(objectives.needs_teacher(weigh(ce=1.0), task) for task in tasks)
    assert not any(objectives.needs_embedded(weigh(ce=1.0), task) for task in tasks)


@pytest.mark.parametrize("task", ["answer", "reconstruct"])
def test_batch_is_the_sum_of_its_parts_in_every_term(task):
    one = make(task, embedded=task == "reconstruct")
    loss = weigh(ce=1.0, kl=2.0, first=0.5, k=0.5, k_tokens=3, align=0.3, entropy=0.1, diversity=0.2)
    whole = objectives.total(loss, "llama", one)
    parts = [objectives.total(loss, "llama", choose(one, jnp.asarray(rows))) for rows in ([0], [2, 1])]
    assert len(whole.terms) == (7 if task == "answer" else 4)
    for key, pair in whole.terms.items():
        for number in range(2):
            assert float(pair[number]) == pytest.approx(sum(float(p.terms[key][number]) for p in parts), rel=SAME)
    assert float(whole.sum) == pytest.approx(sum(float(part.sum) for part in parts), rel=SAME)
    assert float(whole.weight) == sum(float(part.weight) for part in parts) == sum(LENGTHS)


@pytest.mark.parametrize("task", ["answer", "reconstruct"])
def test_piece_by_piece_the_objective_and_its_gradients_are_those_of_all_rows(task):
    one = make(task, teacher=task == "answer", embedded=task == "reconstruct")
    loss = weigh(ce=1.0, kl=2.0, first=0.5, k=0.5, k_tokens=3, align=0.3, entropy=0.1, diversity=0.2)

    def measure(scale, learned, given):
        logits, latents, prefix = learned
        fields, embedded, teacher = given
        return objectives.total(loss, "llama", Pass(scale * logits, fields, latents, prefix, embedded, teacher))

    def objective(learned, pieces):
        given = (one.fields, one.embedded, one.teacher)
        terms = chunked.sum_of_pieces(measure, jnp.float32(1.5), learned, given, pieces=pieces)
        return 3.0 * terms.sum, terms  # the gradient of what is made of the sum passes through

    learned = (one.logits, one.latents, one.prefix)
    (_, whole), wanted = jax.value_and_grad(objective, has_aux=True)(learned, 1)
    (_, parts), found = jax.value_and_grad(objective, has_aux=True)(learned, B)
    assert len(whole.terms) == (7 if task == "answer" else 4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=SAME), parts, whole)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=COSINE * float(jnp.abs(b).max()))
    assert [bool(leaf.any()) for leaf in wanted] == [True, True, task == "reconstruct"], (
        "only align asks for the prefix"
    )
    unasked = chunked.sum_of_pieces(
        measure, jnp.float32(1.5), learned, (one.fields, one.embedded, one.teacher), pieces=B
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=SAME), unasked, whole)
