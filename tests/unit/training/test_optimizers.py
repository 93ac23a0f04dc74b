"""The optimizer's tables: rates, decay, freezing, clipping, and the schedule at named steps."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lw_jax.core import config
from lw_jax.core.tree import flatten_paths
from lw_jax.training import optimizers
from lw_jax.training.optimizers import Phase

CFG = config.Optim(
    kind="adamw",
    learning_rate=2e-3,
    warmup_steps=10,
    end_fraction=0.1,
    weight_decay=0.0,
    clip_norm=1e9,
    b2=0.99,
)
RATES = ((r"encoder/body/.*", 0.25), (r"encoder/head/.*", 1.0), (r"adapters/.*", 3.0))
EXACT = 2e-5  # relative, fp32: a few products, a root and optimizers.EPS


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    monkeypatch.setattr(optimizers, "EPS", 1e-12)  # or it shows in the small gradients of these tests


def replace(**changes):
    return config.Optim(**(vars(CFG) | changes))


@pytest.fixture(scope="module")
def params():
    shapes = {
        "adapters": {"a": {"down": {"bias": (3,), "kernel": (2, 3)}, "gain": (), "norm": {"scale": (2,)}}},
        "encoder": {
            "body": {"embed": (7, 5), "layers": {"attn_norm": (2, 5), "q": (2, 3, 5), "q_bias": (2, 3)}},
            "head": {"mix": (3,), "pool": {"queries": (4, 5)}, "project": {"kernel": (5, 2)}},
        },
    }
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda shape: jnp.asarray(1 + rng.random(shape), jnp.float32), shapes, is_leaf=lambda n: isinstance(n, tuple)
    )


@pytest.fixture(scope="module")
def gradients(params):
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), params)


@pytest.fixture(scope="module")
def huge(gradients):
    """The gradients with an enormous one of the encoder's body."""
    body = jax.tree.map(lambda leaf: 1e6 * leaf, gradients["encoder"]["body"])
    return gradients | {"encoder": gradients["encoder"] | {"body": body}}


def first_update(cfg, params, gradients, rates=RATES, **more):
    made = optimizers.make(cfg, phases=[Phase(100)], rates=rates, abstract=params, **more)
    updates, state = made.update(gradients, made.init(params), params)
    return updates, state


def test_schedule_warms_up_to_the_peak_and_ends_at_the_fraction():
    rate = optimizers.schedule(CFG, [Phase(110)])
    peak, end = CFG.learning_rate, CFG.learning_rate * CFG.end_fraction
    for step, wanted in (
        (0, peak / 10),  # no step is made at rate 0
        (4, peak / 2),
        (9, peak),
        (34, end + (peak - end) * (1 + math.cos(math.pi / 4)) / 2),
        (59, (peak + end) / 2),
        (109, end),
    ):
        assert float(rate(step)) == pytest.approx(wanted)
    assert float(optimizers.schedule(replace(warmup_steps=5), [Phase(5)])(4)) == pytest.approx(peak)
    short = optimizers.schedule(CFG, [Phase(4), Phase(40)])  # ends at its peak, shorter than its warm-up
    assert [float(short(step)) for step in (0, 3, 4)] == pytest.approx([peak / 4, peak, peak / 10])


def test_first_step_is_the_rate_times_each_subtree_s_multiple(params, gradients):
    updates, _ = first_update(CFG, params, gradients)
    signs = flatten_paths(jax.tree.map(lambda leaf: leaf / (jnp.abs(leaf) + optimizers.EPS), gradients))
    for path, update in flatten_paths(updates).items():
        multiple = 3.0 if path.startswith("adapters") else 0.25 if "body" in path else 1.0
        np.testing.assert_allclose(update, -CFG.learning_rate / 10 * multiple * signs[path], rtol=EXACT)


@pytest.mark.parametrize("which", ["matrices", "all"])
def test_decay_pulls_matrices_or_all(params, which):
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = first_update(replace(weight_decay=0.5), params, zero, decays_all=which == "all")
    found, weights = flatten_paths(updates), flatten_paths(params)
    decayed = {path for path, update in found.items() if np.asarray(update).any()}
    matrices = {"adapters/a/down/kernel", "encoder/body/layers/q", "encoder/head/project/kernel"}
    assert decayed == (matrices if which == "matrices" else found.keys())
    wanted = -CFG.learning_rate / 10 * 0.25 * 0.5 * weights["encoder/body/layers/q"]
    np.testing.assert_allclose(found["encoder/body/layers/q"], wanted, rtol=EXACT)


def test_rate_zero_freezes_to_the_bit_and_keeps_no_state(params, gradients):
    rates = ((r"encoder/body/.*", 0.0), *RATES[1:])
    made = optimizers.make(replace(weight_decay=0.5), phases=[Phase(100)], rates=rates, abstract=params)
    state, moved = made.init(params), params
    for _ in range(3):
        updates, state = made.update(gradients, state, moved)
        moved = optax.apply_updates(moved, updates)
    jax.tree.map(np.testing.assert_array_equal, moved["encoder"]["body"], params["encoder"]["body"])
    assert not np.array_equal(moved["encoder"]["head"]["mix"], params["encoder"]["head"]["mix"])
    learning = {"adapters": params["adapters"], "head": params["encoder"]["head"]}
    moments = sorted(leaf.shape for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.float32)
    assert moments == sorted(2 * [leaf.shape for leaf in jax.tree.leaves(learning)])


def test_gradients_are_clipped_to_the_norm_of_those_that_learn(params, huge):
    rates = ((r"encoder/body/.*", 0.0), *RATES[1:])
    for scale, expected in ((1000.0, 0.5), (1e-3, None)):
        scaled = jax.tree.map(lambda leaf, s=scale: s * leaf, huge)
        _, state = first_update(replace(clip_norm=0.5), params, scaled, rates)
        mu = float(optax.tree.norm(optax.tree.get(state, "mu"))) / (1 - optimizers.B1)
        learning = (scaled["adapters"], scaled["encoder"]["head"])
        assert mu == pytest.approx(expected or float(optax.tree.norm(learning)), rel=1e-4)


STAGES = [Phase(20, rate=10.0), Phase(30), Phase(50, rate=0.5)]


def test_schedule_starts_anew_in_each_phase():
    rate = optimizers.schedule(CFG, STAGES)
    for begin, phase in zip((0, 20, 50), STAGES, strict=True):
        alone = optimizers.schedule(replace(learning_rate=CFG.learning_rate * phase.rate), [Phase(phase.steps)])
        values = [float(rate(begin + step)) for step in range(phase.steps)]
        np.testing.assert_allclose(values, [float(alone(step)) for step in range(phase.steps)], rtol=EXACT)
        assert max(values) == pytest.approx(CFG.learning_rate * phase.rate)
        assert values[-1] == pytest.approx(CFG.learning_rate * phase.rate * CFG.end_fraction)
    assert float(rate(100)) <= CFG.learning_rate * 0.5 * CFG.end_fraction * (1 + EXACT), "the last one has no end"


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_phase_of_rate_zero_leaves_moments_their_count_and_the_clip_alone(params, gradients, huge, kind):
    """The body's gradient is enormous where it waits: first in the run, then behind a phase that trained it."""
    rounding = 1e-8 if kind == "muon" else 0.0  # of updates of 1e-4: Newton-Schulz amplifies it
    rates, cfg = ((r"encoder/body/.*", (0.0, 0.25, 0.0)), *RATES[1:]), replace(kind=kind, clip_norm=0.5)
    phases = [Phase(3), Phase(2), Phase(2)]
    made = optimizers.make(cfg, phases=phases, rates=rates, abstract=params)
    alone = optimizers.make(cfg, phases=phases, rates=((r"encoder/body/.*", 0.0), *RATES[1:]), abstract=params)
    update, state, other = jax.jit(made.update), made.init(params), alone.init(params)

    def moments(state):
        return {path: np.asarray(leaf) for path, leaf in flatten_paths(state).items() if "encoder/body" in path}

    assert len(moments(state)) >= 5
    for _ in range(3):
        updates, state = update(huge, state, params)
        expected, other = alone.update(huge, other, params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=EXACT, atol=rounding), updates, expected)
    assert not any(leaf.any() for leaf in moments(state).values()), "nothing of the waiting body in its moments"
    updates, state = update(gradients, state, params)
    once = optimizers.make(cfg, phases=[Phase(2)], rates=((r".*", 0.25),), abstract=params)
    fresh = once.update(gradients, once.init(params), params)[0]["encoder"]["body"]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=EXACT, atol=rounding), updates["encoder"]["body"], fresh
    )
    _, state = update(gradients, state, params)
    before = moments(state)
    assert all(leaf.any() for leaf in before.values())
    _, state = update(huge, state, params)
    jax.tree.map(np.testing.assert_array_equal, moments(state), before)


def test_offsets_of_an_inner_model_and_vectors_of_tasks_do_not_decay_among_matrices():
    tree = {"layers": {"w1": 0, "b1": 0, "w2": 0, "b2": 0, "token": 0, "rate": 0, "rate_bias": 0}, "tokens": 0}
    assert optimizers.decays({"model": tree}) == {
        "model": {
            "layers": dict.fromkeys(("w1", "w2", "rate"), True)
            | dict.fromkeys(("b1", "b2", "token", "rate_bias"), False),
            "tokens": True,
        }
    }
    adapter = {"tasks": jnp.ones((3, 5)), "down": {"kernel": jnp.ones((2, 5))}}
    assert optimizers.decays({"adapters": {"a": adapter}}) == {
        "adapters": {"a": {"tasks": False, "down": {"kernel": True}}}
    }


def test_muon_steps_each_layer_s_matrix_along_its_gradient_made_orthogonal(params, gradients):
    adam, muon = (flatten_paths(first_update(replace(kind=kind), params, gradients)[0]) for kind in ("adamw", "muon"))
    matrices = {"adapters/a/down/kernel", "encoder/body/layers/q", "encoder/head/project/kernel"}
    for path in adam.keys() - matrices:
        np.testing.assert_array_equal(muon[path], adam[path])
    rate = -CFG.learning_rate / 10 * 0.25
    updates, wanted = (np.asarray(tree["encoder/body/layers/q"]) for tree in (muon, flatten_paths(gradients)))
    for update, gradient in zip(updates, wanted, strict=True):
        left, _, right = np.linalg.svd(gradient, full_matrices=False)
        inside = left.T @ (update / (rate * 0.2 * math.sqrt(5))) @ right.T  # 3 x 5: the longer side is 5
        np.testing.assert_allclose(inside, np.diag(np.diag(inside)), atol=1e-3)  # the gradient's own directions
        assert np.all((np.diag(inside) > 0.5) & (np.diag(inside) < 1.3))  # which the five iterations bring near one
