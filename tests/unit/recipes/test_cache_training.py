"""A cache wire's basis: fitted twice, and trained from there."""

import errno
import os
import shutil
import types

import jax
import numpy as np
import optax
import pytest

from lw_jax.core import validation
from lw_jax.core.errors import UserError
from lw_jax.evals import cache_rows
from lw_jax.evals.record_log import RecordLog
from lw_jax.inference.coded_wire import CodedWire
from lw_jax.models import cache_code
from lw_jax.recipes import cache_start
from lw_jax.training import preflight
from sharding import place, rules
from tests import tiny

CACHE = tiny.CACHE | {
    "encoder__width": 60,
    "message__bytes": 60,
    "train__checkpoint_every": 4,
    "train__steps": 4,
    "optim__learning_rate": 1e-3,
    "stages__answer__ratios": (2, 4),
    "stages__pretrain__share": 0.5,
    "stages__pretrain__reconstruct": 1.0,
    "stages__pretrain__lengths": (16,),
}
QUESTIONS = {"stages__pretrain__share": 0.0, "stages__pretrain__reconstruct": 0.0, "stages__pretrain__lengths": ()}
TRAINED = {"mean", "scale", "basis"}


def make(root, **changes):
    recipe = tiny.make_recipe(root, **CACHE | {"strategy": "single", "mesh__placement": "single"} | changes)
    validation.validate(recipe.cfg)
    return recipe


@pytest.fixture(scope="module")
def recipe(root):
    return make(root, only="qwen")


@pytest.fixture(scope="module")
def started(recipe):
    return recipe.build()


def fit_at_two(code, fitted):
    """A code whose messages are fitted at a ratio of 2 and at no other, or at all others."""
    return code | {"fitted": jax.numpy.full_like(code["fitted"], 1.0 - fitted).at[1].set(fitted)}


@pytest.fixture(scope="module")
def batch(recipe):
    ((_, questions), *_) = recipe.validation()
    return place.put_parts(questions.collate(range(8)), recipe.placement, place.put_eval)


@pytest.fixture(scope="module")
def gradient(recipe, started):
    return tiny.gradient_of(recipe, started.frozen)


def test_the_loss_is_that_of_the_message_that_is_sent(recipe, started, batch, gradient):
    encoded = recipe.encode(recipe.curriculum.examples("validation"))
    gaps = []
    for fitted in (0.0, 1.0):
        trainable = {"codes": {"qwen": fit_at_two(started.trainable["codes"]["qwen"], fitted)}}
        wire = CodedWire(recipe, trainable, started.frozen, 0)
        bench = cache_rows.CacheSession(recipe.functions, wire.frozen, recipe.tokenizers, wire.codes, 2)
        settings = {"rows": ["latents", "text"], "batch": 8, "max_new_tokens": 2}
        records = cache_rows.measure(bench, encoded, range(8), **settings, log=RecordLog())
        nats = {}
        for row in settings["rows"]:
            found = [one for one in records if one["row"] == row]
            nats[row] = sum(one["nll"] for one in found) / sum(one["tokens"] for one in found)
        total, weight = gradient(trainable, batch)[1].terms["nll/qwen"]
        assert float(total / weight) == pytest.approx(nats["latents"], abs=1e-3)
        gaps.append(abs(nats["text"] - nats["latents"]))
    assert max(gaps) > 4e-3, "else the text itself might have been read"


def count_fits(jaxpr):
    """Counts the Cholesky factors outside of a `lax.cond`."""
    parts = [part for eqn in jaxpr.eqns if eqn.primitive.name != "cond" for part in jax.tree.leaves(eqn.params)]
    inner = [getattr(part, "jaxpr", part) for part in parts]
    found = sum(count_fits(part) for part in inner if hasattr(part, "eqns"))
    return found + sum(eqn.primitive.name == "cholesky" for eqn in jaxpr.eqns)


def test_over_shards_texts_are_written_one_way_where_nothing_is_fitted(recipe, batch):
    shards = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
    weights = recipe.abstract
    losses = jax.vmap(recipe.loss, in_axes=(None, None, 0, None))
    traced = jax.make_jaxpr(losses)(weights.trainable, weights.frozen, shards, jax.random.key(0))
    assert count_fits(traced.jaxpr) == 0, "a predicate that differs between shards would compute both ways"


def test_steps_along_the_gradient_lower_the_loss(recipe, started, batch, gradient):
    @jax.jit
    def descend(trainable, slope):
        return optax.tree.add_scale(trainable, -0.3 / optax.tree.norm(slope), slope)

    trainable, first = started.trainable, None
    for _ in range(8):
        slope, terms = gradient(trainable, batch)
        first = first or float(terms.sum / terms.weight)
        trainable = descend(trainable, slope)
    assert float(gradient(trainable, batch)[1].sum / terms.weight) < first - 0.02
    rates = rules.match(recipe.rates, recipe.abstract.trainable, name="learning rates")
    assert {key for key, rate in rates["codes"]["qwen"].items() if rate} == TRAINED
    codes = jax.device_get(slope["codes"])
    for name, own in codes.items():
        assert {key for key, leaf in own.items() if np.abs(leaf).any()} <= TRAINED, name
        assert np.abs(own["basis"]).max() > 0


def test_streams_have_repetitions_ratios_and_other_texts(recipe):
    schedule = recipe.data_schedule()
    passages, questions = (phase.streams[0][0] for phase in schedule.phases)
    assert (passages.task, questions.task) == ("reconstruct", "answer")
    own = passages.collate([0])["readers"]["qwen"]
    tokenizer = recipe.tokenizers["qwen"]
    assert tokenizer.decode(own["own"]["ids"][own["own"]["mask"]].tolist()) == passages.examples[0].context
    assert cache_rows.REPEAT in tokenizer.decode(own["after"]["ids"][own["after"]["mask"]].tolist())
    drawn = [schedule.batch(n, global_batch=8, seed=0, share=slice(0, 8)) for n in range(4)]
    ratios = [set(one["source"]["channel"][:, 0].tolist()) for one in drawn]
    assert ratios[:2] == [{2}, {2}] and set.union(*ratios[2:]) == {2, 4}
    others = questions.shuffled().collate([0])["readers"]["qwen"]["own"]
    np.testing.assert_array_equal(others["ids"], questions.collate([0])["readers"]["qwen"]["other"]["ids"])
    assert recipe.validation()[-1][0] == "shuffled/"
    longest = max(map(len, questions.readers["qwen"]["own"].ids))
    assert f"qwen: longest text {longest}, longest question" in "\n".join(questions.describe())
    assert preflight.inspect(recipe.cfg, recipe) is not None


def test_a_disk_without_room_for_the_states_is_refused_before_a_text_is_read(root, monkeypatch):
    recipe = make(root)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=100_000))
    with pytest.raises(UserError, match=r"reader 'llama' take .* 0\.1 MB are free.*TMPDIR"):
        cache_start.start(recipe, {})


def test_room_that_another_start_took_meanwhile_is_missed_before_a_text_is_read(root, monkeypatch):
    recipe = make(root)
    monkeypatch.setattr(os, "posix_fallocate", tiny.no_space)
    with pytest.raises(UserError, match=r"reader 'llama' take .*TMPDIR"):
        cache_start._fit(recipe, {}, "llama", [np.arange(13)])


def test_the_basis_is_fitted_anew_to_what_messages_say(root, monkeypatch):
    def unable(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unable)  # as on a file system that takes no room beforehand
    recipe = make(root, only="qwen", encoder__width=12, encoder__ratio=4)
    first, fit_code = [], cache_code.fit_code
    monkeypatch.setattr(cache_code, "fit_code", lambda *a, **k: first.append(fit_code(*a, **k)) or first[-1])
    texts = recipe.encode(recipe.curriculum.examples("train")[:12]).readers["qwen"]["own"].ids
    code, _ = cache_start._fit(recipe, recipe.load_frozen()["qwen"], "qwen", texts)
    shared = np.linalg.norm(first[0].basis @ code["basis"].T) ** 2 / len(code["basis"])
    assert 0.5 < shared < 1 - 1e-4, "random readers look everywhere: it turns a little"
    np.testing.assert_allclose(code["mean"], first[0].mean, atol=np.abs(first[0].mean).max() / 100)  # rounded to int8


@pytest.fixture(scope="module")
def pair(root):
    """A start of which one reader's messages are fitted at a ratio of 2, and the other's are not."""
    recipe = make(root, **QUESTIONS)
    built = recipe.build()
    codes = built.trainable["codes"]
    codes.update({name: fit_at_two(codes[name], fitted) for name, fitted in (("llama", 1.0), ("qwen", 0.0))})
    return recipe, built


def curve_of(recipe, started, folder):
    """Losses and codes of a run from a start that was made elsewhere."""
    codes = jax.device_put(jax.device_get(started.trainable), recipe.shardings.trainable)
    weights = type(started)(codes, recipe.load_frozen())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "build", lambda frozen=None: weights)
        code, losses, trained = tiny.unsaved_curve(recipe, folder / "run")
    assert code == 0 and len(losses) == 4
    return losses, trained["codes"]


@pytest.fixture(scope="module")
def of_one_device(pair, tmp_path_factory):
    return curve_of(*pair, tmp_path_factory.mktemp("curve"))


@pytest.mark.slow
def test_a_run_trains_bases_means_and_scales_alone(pair, of_one_device):
    for name, own in jax.device_get(pair[1].trainable["codes"]).items():
        found = of_one_device[1][name]
        assert {key for key, leaf in own.items() if not np.array_equal(leaf, found[key])} == TRAINED, name


@pytest.mark.slow
@pytest.mark.parametrize("strategy, devices", [("replicate", 2), ("split", 2)])
def test_placements_train_alike(pair, of_one_device, root, tmp_path, strategy, devices):
    other = make(root, mesh__placement=strategy, strategy=strategy, devices=devices, **QUESTIONS)
    np.testing.assert_allclose(curve_of(other, pair[1], tmp_path)[0], of_one_device[0], atol=2e-3)


def test_a_text_that_is_read_twice_beyond_a_reader_s_positions_is_warned_of(root):
    recipe = make(root, only="qwen", data__context_tokens=300, stages__pretrain__lengths=(310,))
    texts, passages = map(str, recipe.findings()[-2:])
    assert "data.context_tokens, read twice, allow 624 positions, it was trained on 512" in texts
    assert "the stages' lengths, read twice, allow 644 positions" in passages
