"""Costs of a function on one device, read from its jaxpr: FLOPs, memory and traffic. Nothing is compiled.

Products of matrices are counted to the last one. Memory and traffic follow XLA's fusion: elementwise values exist
inside of kernels, unless a product, a loop or the caller takes them. What a loop cuts from a stack for each step is
copied. docs/planning.md has how far this lies from compiled programs.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Var
from jax.interpreters.partial_eval import dce_jaxpr

_CALLS = ("checkpoint", "closed_call", "custom_jvp_call", "custom_vjp_call", "jit")  # their equations stand in place
_READERS = ("cond", "dot_general", "gather", "pallas_call", "scan", "sort", "while")  # take what lies in memory
_WRITERS = (*_READERS, "concatenate", "cumsum", "dynamic_update_slice", "scatter", "scatter-add")


@dataclasses.dataclass(frozen=True)
class Product:
    """One product of matrices, so many times."""

    dtype: str  # of its factors
    flops: float
    bytes: float  # of factors and result
    times: int


@dataclasses.dataclass(frozen=True)
class Loop:
    """A scan, so many times."""

    length: int
    reverse: bool  # a backward pass
    bytes: int  # of the largest array that it carries from step to step
    times: int


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a function computes and moves."""

    peak: int = 0  # most bytes alive at once, the function's inputs left out
    products: tuple[Product, ...] = ()
    moved: float = 0.0  # bytes that kernels other than products read and write
    loops: tuple[Loop, ...] = ()

    @property
    def flops(self) -> float:
        return sum(product.flops * product.times for product in self.products)


@dataclasses.dataclass(eq=False)
class _Value:
    aval: Any


@dataclasses.dataclass
class _Equation:
    name: str
    params: dict[str, Any]
    inputs: list[_Value]
    outputs: list[_Value]
    bodies: list[Any]


@dataclasses.dataclass
class _Sums:
    products: collections.Counter[tuple[str, float, float]]
    loops: list[Loop]
    moved: float = 0.0


def trace(function: Callable[..., Any], *args: Any) -> Costs:
    sums = _Sums(collections.Counter(), [])
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    peak = _add(dce_jaxpr(jaxpr, used_outputs=True, instantiate=True)[0], 1, sums)
    products = tuple(Product(*key, times) for key, times in sums.products.items())
    return Costs(peak, products, sums.moved, tuple(sums.loops))


def nbytes(values: Iterable[Any]) -> int:
    """Returns the bytes of values or shapes; what is no array, as a key, counts as nothing."""
    avals = [getattr(value, "aval", value) for value in values]
    return sum(math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 0) for aval in avals if hasattr(aval, "shape"))


def _add(jaxpr: Any, times: int, sums: _Sums) -> int:
    """Adds a jaxpr that runs so often; returns the most bytes alive at once of what it makes."""
    equations, results = _flatten(jaxpr, [_Value(var.aval) for var in jaxpr.invars])
    taken = {value for value in results if value}
    beside = {value for eqn in equations if eqn.name != "dot_general" for value in eqn.inputs}
    for eqn in equations:
        taken |= set(eqn.inputs) if eqn.name in _READERS else set()
    inside = []
    for eqn in equations:
        runs = times
        if eqn.name == "scan":
            runs *= eqn.params["length"]
            sums.moved += 2 * runs * nbytes(_add_loop(eqn, times, sums))
        inside.append(max((_add(body, runs, sums) for body in eqn.bodies), default=0))
        if eqn.name == "pallas_call":  # says its FLOPs itself, as `models/ttt_kernel.py` does
            flops = float(dict(eqn.params["metadata"])["flops"])
            sums.products[eqn.inputs[0].aval.dtype.name, flops, nbytes([*eqn.inputs, *eqn.outputs])] += times
        elif eqn.name == "dot_general":
            _add_product(eqn, times, sums)
            sums.moved += times * nbytes(beside.intersection(eqn.outputs))  # read by another kernel
        elif not eqn.bodies and eqn.name != "broadcast_in_dim":
            stored = eqn.outputs if eqn.name.startswith("reduce") else taken.intersection(eqn.outputs)
            sums.moved += 2 * times * nbytes(stored)
    return _peak(equations, inside, taken, results)


def _add_product(eqn: _Equation, times: int, sums: _Sums) -> None:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left, result = eqn.inputs[0].aval, eqn.outputs[0].aval
    flops = 2.0 * math.prod(left.shape[axis] for axis in contracted) * math.prod(result.shape)
    sums.products[left.dtype.name, flops, nbytes([*eqn.inputs, *eqn.outputs])] += times


def _add_loop(eqn: _Equation, times: int, sums: _Sums) -> list[Any]:
    """Adds a scan; returns what each of its steps cuts from stacks."""
    body = eqn.bodies[0]
    # Fixed and carried values first. Shapes say how many, as the primitive's parameters differ by JAX's version.
    pairs = zip(eqn.inputs, body.invars, strict=True)
    first = sum(len(outer.aval.shape) == len(inner.aval.shape) for outer, inner in pairs)
    pairs = zip(eqn.outputs, body.outvars, strict=True)
    carried = sum(len(outer.aval.shape) == len(inner.aval.shape) for outer, inner in pairs)
    largest = max((nbytes([var]) for var in body.invars[first - carried : first]), default=0)
    sums.loops.append(Loop(eqn.params["length"], eqn.params["reverse"], largest, times))
    return body.invars[first:]


def _flatten(jaxpr: Any, inputs: Sequence[_Value]) -> tuple[list[_Equation], list[_Value | None]]:
    """Returns a jaxpr's equations with those of the functions that it calls in place, and its results."""
    known = dict(zip(jaxpr.invars, inputs, strict=True)) | {var: _Value(var.aval) for var in jaxpr.constvars}
    equations: list[_Equation] = []
    for eqn in jaxpr.eqns:
        operands = [known[var] if isinstance(var, Var) else _Value(var.aval) for var in eqn.invars]
        name, bodies = eqn.primitive.name, list(_bodies(eqn))
        results: Sequence[_Value | None] = [_Value(var.aval) for var in eqn.outvars]
        if name in _CALLS:
            inner, results = _flatten(bodies[0], operands)
            equations += inner
        else:
            equations.append(_Equation(name, eqn.params, operands, [value for value in results if value], bodies))
        known |= {var: value or _Value(var.aval) for var, value in zip(eqn.outvars, results, strict=True)}
    return equations, [known[var] if isinstance(var, Var) else None for var in jaxpr.outvars]


def _bodies(eqn: Any) -> Iterator[Any]:
    """Yields the jaxprs inside an equation; of a conditional the largest, of a kernel, a black box, none."""
    if eqn.primitive.name == "pallas_call":
        return
    values = eqn.params.values()
    if eqn.primitive.name == "cond":
        values = [max(eqn.params["branches"], key=lambda branch: len(branch.jaxpr.eqns))]
    for value in values:
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(inner := getattr(item, "jaxpr", item), "eqns"):
                yield inner


def _peak(
    equations: Sequence[_Equation], inside: Sequence[int], taken: set[_Value], results: Sequence[_Value | None]
) -> int:
    """Returns the most bytes alive at once; `inside` are those of the equations' own bodies."""
    last = {value: len(equations) for value in results if value}
    stored: list[list[_Value]] = []
    for number, eqn in reversed(list(enumerate(equations))):
        writes = eqn.name in _WRITERS or eqn.name.startswith("reduce")
        spread = eqn.name == "broadcast_in_dim"  # made anew wherever it is taken
        fused = [value for value in eqn.outputs if spread or (not writes and value not in taken)]
        stored.append([value for value in eqn.outputs if value in last and value not in fused])
        # A fused value is computed where it is used, so what it comes from lives on until then.
        until = max((last.get(value, number) for value in fused), default=number)
        last |= {value: max(last.get(value, 0), until) for value in eqn.inputs}
    stored.reverse()
    ends = collections.defaultdict(list)
    for values in stored:
        for value in values:
            ends[last[value]].append(value)
    alive = most = 0
    for number, (written, body) in enumerate(zip(stored, inside, strict=True)):
        most = max(most, alive + nbytes(written) + body)
        alive += nbytes(written) - nbytes(ends[number])
    return most
