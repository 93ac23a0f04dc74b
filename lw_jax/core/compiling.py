"""Jitted methods, and compilation of several programs at once, in threads: XLA compiles without Python's lock."""

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from lw_jax.core import precision


def jitted(*static: str, donate: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Makes a method a jitted function that is compiled once for each object and its `static` arguments."""

    def make(method: Callable[..., Any]) -> Any:
        return functools.cached_property(
            lambda self: jax.jit(functools.partial(method, self), static_argnames=static, donate_argnames=donate)
        )

    return make


def compile_together(programs: Iterable[tuple[Any, tuple[Any, ...]]]) -> None:
    """Compiles jitted functions for arguments like these; calls with such arguments then find them compiled.

    No arguments are kept. Nothing is done on a CPU, whose compiler takes all cores for one program, and in several
    processes, which compile in one order: there first calls compile.

    Args:
        programs: (jitted function, its positional arguments), static ones among them; equal ones are compiled once.
    """
    if jax.default_backend() == "cpu" or jax.process_count() > 1:
        return
    seen = set()
    with ThreadPoolExecutor(precision.cores()) as pool:
        futures = []
        for function, args in programs:
            leaves, structure = jax.tree.flatten(args)
            program = function, structure, tuple(map(_shape, leaves))
            if program not in seen:
                seen.add(program)
                futures.append(pool.submit(function.lower(*args).compile))
    for future in futures:
        future.result()


def _shape(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.sharding) if isinstance(leaf, jax.Array) else leaf
