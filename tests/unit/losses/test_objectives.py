"""lw_jax/losses/objectives.py: each term by its formula, absent without a weight, and exact sums in every split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from lw_jax.core import config
from lw_jax.core.types import Task
from lw_jax.losses import chunked, objectives, token_losses

SAME = 1e-5  # fp32 sums of a few hundred terms of unit size
GRADIENT = 1e-4  # relative to the largest, of gradients summed in another order
B, T, V = 3, 7, 11
LENGTHS = (7, 2, 5)  # answer tokens and EOS


def weigh(**weights):
    return config.Loss(**base.get_config().loss.to_dict() | {"ce": 0.0} | weights)


def make(task="answer", *, teacher=False):
    """One pass over a ragged batch; `teacher` gives whole logits beside three kept tokens."""
    rng = np.random.default_rng(1)
    logits, other = (jnp.asarray(rng.normal(size=(B, T, V)), jnp.float32) for _ in range(2))
    logp, ids = jax.lax.top_k(jax.nn.log_softmax(other), 3)
    fields = {
        "targets": jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32),
        "weights": jnp.asarray(np.arange(T) < np.array(LENGTHS)[:, None], jnp.float32),
        "task": Task(task),
        "teacher": {"ids": ids, "logp": logp},
    }
    return logits, fields, other if teacher else None


def nll(logits, fields, _):
    return float(token_losses.nll(logits, fields["targets"], fields["weights"])[0])


def test_nll_is_of_the_targets_and_enters_the_objective_by_its_weight():
    one = make()
    found = objectives.total(weigh(ce=0.7), "llama", *one)
    assert float(found.terms["nll/llama"][0]) == pytest.approx(nll(*one), rel=SAME)
    assert float(found.terms["nll/llama"][1]) == pytest.approx(sum(LENGTHS))
    assert float(found.sum) == pytest.approx(0.7 * nll(*one), rel=SAME)
    assert float(found.weight) == sum(LENGTHS)


@pytest.mark.parametrize("teacher", [True, False])
def test_kl_is_from_the_whole_teacher_or_from_its_top_tokens(teacher):
    one = logits, fields, whole = make(teacher=teacher)
    counted, top = fields["weights"], fields["teacher"]
    found = objectives.total(weigh(kl=2.0), "qwen", *one)
    if teacher:
        expected, _ = token_losses.kl(whole, logits, counted)
    else:
        expected, _ = token_losses.kl_of_top(top["ids"], top["logp"], logits, counted)
    assert float(found.sum) == pytest.approx(2 * float(expected), rel=SAME)
    assert float(found.terms["kl/qwen"][0]) == pytest.approx(float(expected), rel=SAME)


@pytest.mark.parametrize("task", ["reconstruct", "continuation"])
def test_passages_have_their_own_names_full_weight_and_no_term_of_an_answer(task):
    one = make(task)
    found = objectives.total(weigh(ce=0.2, kl=2.0), "llama", *one)
    assert set(found.terms) == {f"{task}/nll/llama", f"{task}/accuracy/llama"}
    assert float(found.sum) == pytest.approx(nll(*one), rel=SAME)


@pytest.mark.parametrize("task", ["answer", "reconstruct"])
def test_piece_by_piece_the_objective_and_its_gradients_are_those_of_all_rows(task):
    (logits, *given), loss = make(task, teacher=task == "answer"), weigh(ce=1.0, kl=2.0)

    def measure(scale, logits, given):
        return objectives.total(loss, "llama", scale * logits, *given)

    def objective(logits, pieces):
        terms = chunked.sum_of_pieces(measure, jnp.float32(1.5), logits, given, pieces=pieces)
        return 3.0 * terms.sum, terms  # scaled, so that the incoming gradient is not 1

    graded = jax.jit(jax.value_and_grad(objective, has_aux=True), static_argnums=1)
    ((_, whole), wanted), ((_, parts), found) = (graded(logits, pieces) for pieces in (1, B))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=SAME), parts, whole)
    np.testing.assert_allclose(found, wanted, atol=GRADIENT * float(jnp.abs(wanted).max()))
    _, without_gradient = jax.jit(objective, static_argnums=1)(logits, B)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=SAME), without_gradient, whole)
