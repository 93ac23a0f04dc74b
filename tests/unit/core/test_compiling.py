"""lw_jax/core/compiling.py: programs that are compiled before they are called."""

import functools

import jax
import jax.numpy as jnp
import pytest

from lw_jax.core import compiling


@pytest.mark.parametrize(("backend", "early"), [("gpu", ["jit(scale)", "jit(scale)", "jit(shift)"]), ("cpu", [])])
def test_programs_are_compiled_once_and_before_their_calls(backend, early, compiled, monkeypatch):
    @functools.partial(jax.jit, static_argnames="by")
    def scale(tree, by):
        return tree["x"] * by

    @jax.jit
    def shift(x):
        return x + 1

    short, long = jnp.zeros(3), jnp.zeros(5)
    other = jnp.zeros(3) + 2
    calls = [(scale, ({"x": short}, 2)), (scale, ({"x": other}, 2)), (scale, ({"x": short}, 7)), (shift, (long,))]
    compiled.clear()
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: backend)
        compiling.compile_together(calls)
    assert sorted(compiled) == early
    for function, args in calls:
        function(*args)
    assert sorted(compiled) == ["jit(scale)", "jit(scale)", "jit(shift)"]


def test_what_the_compiler_says_reaches_the_caller(monkeypatch):
    def fail(x):
        raise ValueError("shapes")

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match="shapes"):
        compiling.compile_together([(jax.jit(fail), (jnp.zeros(2),))])
